"""Classify the completed steps of a run: timed, warm-up, memory or numerics.

Timed steps are the completed steps that belong to none of the other classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.trace.run import RunManifest


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a run that decide which steps are timed."""

    num_warmup: int
    memory: frozenset[int]
    """The planned memory steps."""
    numerics_every: int
    """Each multiple of it is a numerics step; 0: none."""

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """The rules of a run."""
        every = manifest.recorder.get("numerics_every")
        return cls(
            num_warmup=manifest.warmup_steps,
            memory=frozenset(manifest.memory_steps),
            numerics_every=every if type(every) is int and every > 0 else 0,
        )


@dataclass(frozen=True, slots=True)
class StepSelection:
    """The completed steps of a run: timed steps, and steps that no time uses."""

    finished: tuple[int, ...]
    """Steps that at least one rank completed."""
    timed: tuple[int, ...]
    """Steps that times use."""
    warmup: tuple[int, ...]
    """Warm-up steps, which contain allocator growth, communicator set-up and compilation."""
    memory: tuple[int, ...]
    """Memory steps, which the storage tracker slows."""
    numerics: tuple[int, ...] = ()
    """Numerics steps, in which the recorder looks at the values of the model."""

    @property
    def sentence(self) -> str:
        """The number of timed steps and the steps that are left out, as a sentence."""
        left_out = [
            f"{_numbered(steps)} {reason}"
            for steps, reason in (
                (self.warmup, "(warm-up)"),
                (self.memory, "(memory)"),
                (self.numerics, "(numerics)"),
            )
            if steps
        ]
        counted = f"{len(self.timed)} of {len(self.finished)} completed steps are timed"
        return f"{counted}; left out: {', '.join(left_out)}." if left_out else f"{counted}."


def classify_steps(
    finished: Sequence[int], slowed: Sequence[int], rules: StepRules
) -> StepSelection:
    """Classify the completed steps. Warm-up comes first.

    Args:
        finished: The steps that at least one rank completed, ascending.
        slowed: The steps that some rank marked as slowed by the recorder.
        rules: The settings of the run.
    """
    first, every = finished[0] if finished else 0, rules.numerics_every
    unplanned = {*slowed} - rules.memory
    numerics = {step for step in unplanned if every and step % every == 0}
    memory = rules.memory | (unplanned - numerics)
    warmup = [step for step in finished if step < first + rules.num_warmup]
    rest = finished[len(warmup) :]
    return StepSelection(
        finished=tuple(finished),
        timed=tuple(step for step in rest if step not in memory and step not in numerics),
        warmup=tuple(warmup),
        memory=tuple(step for step in rest if step in memory),
        numerics=tuple(step for step in rest if step in numerics),
    )


def _numbered(steps: Sequence[int]) -> str:
    """`step 4`, `steps 0-2`, `steps 0-2, 7`."""
    return f"{'step' if len(steps) == 1 else 'steps'} {format_numbers(steps)}"
