"""Define the common base of all JSON records of a run."""

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
"""Version of the run folder; increased when an older reader would misread a newer run."""


class Record(BaseModel):
    """Base of the records stored as JSON: unknown fields are ignored, values are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)
