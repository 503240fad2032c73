"""Define the common base of all JSON records of a run, and the largest values they may hold."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
"""Version of the run folder; increased when an older reader would misread a newer run."""


class Record(BaseModel):
    """Base of the records stored as JSON: unknown fields are ignored, values are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


# --- Limit the sizes that a run may state, so that no loop or array over them is endless.
#
# The limits are far above any training run. A file with a larger number is damaged or hostile.

MAX_WORLD_SIZE = 1 << 20
MAX_MICROBATCHES = 1 << 10
"""Most microbatches of a step that a plan may have: each one is simulated."""
MAX_INDEX = 1 << 24
"""Largest number of a unit, a step, an attempt or a rank."""
MAX_NS = 1 << 62
"""Largest time and largest size in bytes: sums of two fit into 64 bits."""

WorldSize = Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)]
Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
Amount = Annotated[int, Field(ge=0, le=MAX_NS)]
"""A number of bytes, nanoseconds or parameters."""
Moment = Annotated[int, Field(ge=-MAX_NS, le=MAX_NS)]
"""A time on a clock, ns."""
