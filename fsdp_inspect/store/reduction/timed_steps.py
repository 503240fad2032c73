"""Classify the completed steps of a run: timed, warm-up, memory, numerics or plain.

Timed steps are the completed steps that belong to none of the other classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_steps, plural
from fsdp_inspect.statistics import middle_half, spread_blocks
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
    slowed: tuple[int, ...] = ()
    """Other steps that the recorder slows, as by a look at the values of all parameters."""
    plain: tuple[int, ...] = ()
    """Steps without rows of units and collectives on some rank: see `recording.overhead`."""

    @property
    def detailed(self) -> tuple[int, ...]:
        """The completed steps with rows of units and collectives on all ranks."""
        plain = {*self.plain}
        return tuple(step for step in self.finished if step not in plain)

    @property
    def sentence(self) -> str:
        """The number of timed steps and the steps that are left out, as a sentence."""
        left_out = [
            f"{format_steps(steps)} {reason}"
            for steps, reason in (
                (self.warmup, "(warm-up)"),
                (self.memory, "(memory)"),
                (self.numerics, "(numerics)"),
                (self.slowed, "(slowed by the recorder)"),
            )
            if steps
        ]
        if self.plain:
            left_out.append(f"{plural(len(self.plain), 'plain step')} (recorded without units)")
        counted = f"{len(self.timed)} of {len(self.finished)} completed steps are timed"
        return f"{counted}; left out: {', '.join(left_out)}." if left_out else f"{counted}."


def classify_steps(
    finished: Sequence[int], slowed: Sequence[int], rules: StepRules, plain: Sequence[int] = ()
) -> StepSelection:
    """Classify the completed steps. Warm-up comes first.

    Args:
        finished: The steps that at least one rank completed, ascending.
        slowed: The steps that some rank marked as slowed by the recorder.
        rules: The settings of the run.
        plain: The steps that some rank did not record in detail.
    """
    first, every = finished[0] if finished else 0, rules.numerics_every
    unplanned = {*slowed} - rules.memory
    numerics = {step for step in unplanned if every and step % every == 0}
    others = unplanned - numerics
    warmup = [step for step in finished if step < first + rules.num_warmup]
    without_units = {*plain} - rules.memory - {*slowed}
    rest = finished[len(warmup) :]
    left_out = rules.memory | unplanned | without_units
    return StepSelection(
        finished=tuple(finished),
        timed=tuple(step for step in rest if step not in left_out),
        warmup=tuple(warmup),
        memory=tuple(step for step in rest if step in rules.memory),
        numerics=tuple(step for step in rest if step in numerics),
        slowed=tuple(step for step in rest if step in others),
        plain=tuple(step for step in rest if step in without_units),
    )


# --- Choose the typical steps among the timed steps of one rank.
#
# [Note: the typical step] Every scalar over steps is the mean over the typical steps of one rank:
# the middle half of its timed steps by step time. All quantities use the same steps, so parts add
# up to their total, on every page and in every command. A timed step has rows of the step and of
# its communication.
#
# [Note: long runs] The cost of an analysis must not grow with the length of the training, so there
# are at most `MAX_TYPICAL_STEPS`. If the middle half has more steps, eight blocks of them are
# chosen, evenly spread over the run. Their members follow one another, so most row groups are not
# read. The middle half varies little, so the mean hardly changes: with normally distributed step
# times, the standard error of the mean is 4% of the standard deviation of the step time.

_NUM_BLOCKS, _BLOCK_LENGTH = 8, 12
MAX_TYPICAL_STEPS = _NUM_BLOCKS * _BLOCK_LENGTH


def choose_typical(step_time_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Choose the typical steps of a rank. See [Note: the typical step].

    Args:
        step_time_ns: The times of its timed steps, by step, shape (S,).

    Returns:
        Shape (S,). Only without any step, none is chosen.
    """
    chosen = middle_half(step_time_ns)
    middle = np.flatnonzero(chosen)
    chosen[:] = False
    chosen[middle[limit_middle(len(middle))]] = True
    return chosen


def limit_middle(count: int) -> NDArray[np.int64]:
    """Choose the typical steps among the `count` steps of the middle half, by step.

    Returns:
        Ascending positions, shape (min(count, MAX_TYPICAL_STEPS),). See [Note: long runs].
    """
    return spread_blocks(count, num_blocks=_NUM_BLOCKS, length=_BLOCK_LENGTH)
