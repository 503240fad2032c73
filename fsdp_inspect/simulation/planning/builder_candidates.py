"""Define the keywords of a builder that a plan chooses, and list their combinations."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fsdp_inspect.simulation.planning.candidates import BATCH_SIZES

KNOBS: Mapping[str, tuple[Any, ...]] = {
    "batch_size": BATCH_SIZES,
    "checkpointing": ("full", "selective", "none"),
    "reshard_after_forward": ("true", "false"),
    "offload": ("cpu", "none"),
}
"""The keywords that a plan varies, each with its values from the least memory to the most."""
AS_BUILT = "as built"
"""A setting that the builder has no keyword for."""


@dataclass(frozen=True, slots=True)
class BuilderCandidate:
    """One combination of a builder's keywords."""

    items: tuple[tuple[str, Any], ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The keywords and their values."""
        return dict(self.items)

    @property
    def batch_size(self) -> int | None:
        """Sequences of a microbatch; None: as the builder has it."""
        value = self.settings.get("batch_size")
        return value if isinstance(value, int) else None

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return int(self.settings.get("microbatches", 1))

    @property
    def checkpointing(self) -> str:
        """The activation checkpointing."""
        return str(self.settings.get("checkpointing", AS_BUILT))

    @property
    def offload(self) -> bool:
        """Whether parameters, gradients and states are on the host."""
        return self.settings.get("offload") == "cpu"

    @property
    def reshards(self) -> bool | None:
        """Whether units are freed after forward; None: as the builder has it."""
        value = self.settings.get("reshard_after_forward")
        return None if value is None else value == "true"

    @property
    def effort(self) -> int:
        """The number of settings that are not torch's default."""
        return (self.reshards is False) + self.offload

    @property
    def kind(self) -> tuple[object, ...]:
        """The settings in which reported plans differ."""
        return (self.checkpointing, self.offload, self.reshards)

    def change(self, **changes: Any) -> "BuilderCandidate":
        """A copy with other values; a keyword that it lacks stays out."""
        kept = ((name, changes.get(name, value)) for name, value in self.items)
        return BuilderCandidate(tuple(kept))


def list_builder_candidates(
    knobs: Mapping[str, Collection[Any]],
) -> Iterator[BuilderCandidate]:
    """All combinations of the values."""
    for values in product(*knobs.values()):
        yield BuilderCandidate(tuple(zip(knobs, values, strict=True)))
