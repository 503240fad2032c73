"""Find mistakes that begin after the first updates, and last until the end.

- Seen: in one of five updates, whether their gradients are those of an earlier update, and whether
  the first backward added to them; in each update, the learning rates that the host knows.
- Proof: from some update on, all have no gradient, or an old one, although backwards run; or none
  clears the gradients of the one before; or the last 50 have learning rate 0. At least three
  updates before did not.
- Noted: the learning rate is 0 in all of at least 50 updates, and no sampled value changes.
- Refuted by: one optimizer whose updates differ, as in turns; frozen parameters; gradients that the
  loop scales or zeroes after the update; a pause.
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import (
    LEAST_STREAK,
    Observed,
    TrainingCheck,
    TrainingFault,
)
from fsdp_inspect.analysis.correctness.samples import values_change
from fsdp_inspect.formatting import plural
from fsdp_inspect.trace.correctness import StreakSeen

CLEAR = "Call optimizer.zero_grad() once in each step, after the update."
_WORDINGS = (
    (
        "unused",
        TrainingCheck.GRADIENTS,
        "No new gradient reaches the optimizer any more.",
        "In each of {} that were looked at from step {} on, the optimizer had no gradient, or "
        "those of an earlier update, although backwards ran. Before, it had new ones.",
        "Look for zero_grad() between backward() and step(), and for a model that was made anew "
        "while the optimizer holds the parameters of the old one.",
    ),
    (
        "kept",
        TrainingCheck.ACCUMULATION,
        "Gradients are no longer cleared.",
        "Before each of {} that were looked at from step {} on, the first backward added to the "
        "gradients of the update before. Earlier, they were cleared.",
        CLEAR,
    ),
    (
        "idle",
        TrainingCheck.PRECISION,
        "The learning rate is 0 while the training goes on.",
        "In each of {} from step {} on, all groups of the optimizers had the learning "
        "rate 0. Earlier, it was not 0.",
        "Look at the schedule: it may count epochs or updates and be stepped more often, or have "
        "ended. If the parameters are meant to stay, ignore this.",
    ),
)
_LEAST = {"unused": LEAST_STREAK, "kept": LEAST_STREAK, "idle": 50}
"""The updates of a streak: a schedule that ends with the training has few at rate 0."""
_LEAST_BEFORE = 3


def check_late(observed: Observed) -> Iterator[TrainingFault]:
    """Find mistakes that begin after the first updates."""
    for name, check, sentence, why, change in _WORDINGS:
        found = {
            rank: streak
            for rank, each in observed.seen.items()
            if each.late is not None
            and each.coverage is not None  # all optimizers are seen
            and (streak := getattr(each.late, name)).number >= _LEAST[name]
            and streak.num_before >= _LEAST_BEFORE
        }
        if len(found) == len(observed.seen):
            first = found[min(found)]
            number = plural(first.number, "update")
            yield TrainingFault(
                check,
                tuple(sorted(found)),
                sentence,
                why.format(number, first.since),
                change,
                observed.place_of_update(min(found)),
            )
    yield from _never_above_zero(observed)


def _never_above_zero(observed: Observed) -> Iterator[TrainingFault]:
    """Note a learning rate that is 0 from the first update to the last."""
    streaks = [
        each.late.idle if each.late is not None and each.coverage is not None else StreakSeen()
        for each in observed.seen.values()
    ]
    least = min(each.number for each in streaks)
    is_whole = least >= _LEAST["idle"] and not any(each.num_before for each in streaks)
    # An optimizer with a rate of its own changes values all the same.
    if is_whole and not any(map(values_change, observed.seen.values())):
        yield TrainingFault(
            TrainingCheck.PRECISION,
            tuple(sorted(observed.seen)),
            "The learning rate is 0 in all updates.",
            f"In each of {plural(least, 'update')}, all groups of the optimizers had the learning "
            "rate 0, with which torch's optimizers change nothing.",
            "Look at the schedule: a warm-up may count in integers, or last longer than the run.",
            observed.place_of_update(min(observed.seen)),
            is_note=True,
        )
