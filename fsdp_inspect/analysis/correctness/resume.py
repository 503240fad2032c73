"""Find a resumed training that does not continue: weights, optimizer state, schedule or data.

- Seen: in each attempt of a run, the sampled values before the first update, whether the optimizer
  has state then and later, the learning rates of the first updates, and the first batches.
- Proof: all or some values are those before the first update of the first attempt, which changed
  them and saved a checkpoint. Or the values continue, and the optimizer starts without the state
  that it keeps, or the learning rates or at least three different batches repeat those of the first
  attempt.
- A note: the parameters continue, and the first three logged losses are higher than all of the
  second half of the attempt before.
- Refuted by: no checkpoint before the restart: the training then rightly starts again. A pass over
  the data that ended before the restart: the next one may begin with the same batches.
"""

import math
from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.batches import LEAST_BATCHES
from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.formatting import listed, plural
from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.correctness import TrainingSeen
from fsdp_inspect.trace.run import RunSource, completed_steps

_RATES = 3
"""Learning rates after the first update, whose rate may come with the optimizer's state."""
_FIRST_LOSSES, _LAST_LOSSES = 3, 20
"""The losses that are compared after a resume, and the fewest before it."""
_NOT_CHECKED = (
    "No update was sampled in the first attempt or in this one, or the sampled parameters differ."
)


def check_resume(observed: Observed) -> Iterator[TrainingFault]:
    """Find a resumed training that does not continue."""
    earlier = observed.run.earlier_attempts
    if not earlier:
        return
    first = {record.rank: record.training for record in earlier[0].ranks if record.training}
    pairs = {
        rank: (first[rank], now)
        for rank, now in observed.seen.items()
        if rank in first and _are_comparable(first[rank], now)
    }
    if not pairs:
        observed.not_checked[TrainingCheck.RESUME] = _NOT_CHECKED
        return
    ranks = tuple(sorted(pairs))
    place = observed.place_of_update(ranks[0])
    num_steps = max(
        (completed_steps(run, each) for run in earlier for each in run.ranks), default=0
    )
    if all(then.updates[0].digests == now.updates[0].digests for then, now in pairs.values()):
        if any(_saves(each) for each in earlier):
            yield TrainingFault(
                TrainingCheck.RESUME,
                ranks,
                "The resumed training starts from its first values again.",
                "Before its first update, the sampled parameters hold the values with which the "
                "first attempt began, although an attempt before saved a checkpoint after up to "
                f"{plural(num_steps, 'step')}.",
                "Load the checkpoint into the model before its first step. If the training is "
                "meant to start again, ignore this.",
                place,
            )
        return
    yield from _loss_rises(observed, ranks)
    yield from _parts_from_the_start(observed, pairs)
    lost = [rank for rank, (_, now) in pairs.items() if _starts_without_state(now)]
    if len(lost) == len(pairs):
        yield TrainingFault(
            TrainingCheck.RESUME,
            ranks,
            "The resumed optimizer starts without its state.",
            "The parameters continue, but the optimizer had no state before its first update and "
            "had state after it: its averages of the gradients are lost.",
            "Save and load the optimizer's state with the model's.",
            place,
        )
    rates = [
        [[each.rate for each in seen.updates[1 : 1 + _RATES]] for seen in pair]
        for pair in pairs.values()
    ]
    if all(then == now and len(set(now)) > 1 for then, now in rates):
        shown = ", ".join(f"{rate:.3g}" for rate in rates[0][1])
        yield TrainingFault(
            TrainingCheck.RESUME,
            ranks,
            "The resumed training starts its learning rate schedule again.",
            f"The parameters continue, but the first learning rates are those of the first "
            f"attempt: {shown}.",
            "Save and load the scheduler's state with the model's. If the schedule is periodic, "
            "and a period ended there, ignore this.",
            place,
        )
    if all(_repeats_data(*pair) for pair in pairs.values()) and not any(
        one.has_ended
        for run in earlier
        for record in run.ranks
        if record.training is not None
        for one in record.training.passes
    ):
        num = min(len(seen.batches) for pair in pairs.values() for seen in pair)
        yield TrainingFault(
            TrainingCheck.RESUME,
            ranks,
            "The resumed training reads the same data again.",
            f"The parameters continue, but the first {plural(num, 'batch', 'batches')} are those "
            "of the first attempt, which had not ended a pass over its data.",
            "Save and load the position in the data (StatefulDataLoader), or skip the batches that "
            "the checkpoint has seen.",
        )


def _loss_rises(observed: Observed, ranks: tuple[int, ...]) -> Iterator[TrainingFault]:
    """Note that the loss begins higher than before; by chance, this happens once in 1,771."""
    attempts = (observed.run.earlier_attempts[-1], observed.run)
    before, now = (measure_loss(each) for each in attempts)
    if before is None or now is None or before.name != now.name:
        return
    last, first = before.values[len(before.values) // 2 :], now.values[:_FIRST_LOSSES]
    is_known = len(last) >= _LAST_LOSSES and len(first) == _FIRST_LOSSES
    if not is_known or not all(map(math.isfinite, (*last, *first))) or min(first) <= max(last):
        return
    shown = ", ".join(f"{value:.4g}" for value in first)
    yield TrainingFault(
        TrainingCheck.RESUME,
        ranks,
        "The loss is higher after the resume than before it.",
        f"The first {len(first)} values of {now.name} are {shown}, and the last {len(last)} of the "
        f"attempt before are between {min(last):.4g} and {max(last):.4g}. The sampled parameters "
        "continue.",
        "Compare what a checkpoint may lack: buffers, the mode of dropout, the scale of a gradient "
        "scaler, the data. If steps were lost or the data changed, ignore this.",
        is_note=True,
    )


def _parts_from_the_start(
    observed: Observed, pairs: dict[int, tuple[TrainingSeen, TrainingSeen]]
) -> Iterator[TrainingFault]:
    """A fault if some parameters continue, and some hold their first values again on every rank."""
    reset = [_reset_parameters(*pair) for pair in pairs.values()]
    if not all(reset) or not any(_saves(each) for each in observed.run.earlier_attempts):
        return
    names = list(dict.fromkeys(name for each in reset for name in each))
    yield TrainingFault(
        TrainingCheck.RESUME,
        tuple(sorted(pairs)),
        "A part of the resumed model keeps its first values.",
        f"Before the first update, {listed(names, 3)} {'holds' if len(names) == 1 else 'hold'} the "
        "values with which the first attempt began and which it then changed. The other sampled "
        "parameters continue.",
        "Compare the checkpoint's keys with the model's: load_state_dict with strict=False skips "
        "missing ones. If this part is meant to start again, ignore this.",
        observed.place_of_update(min(pairs)),
    )


def _reset_parameters(then: TrainingSeen, now: TrainingSeen) -> list[str]:
    """The parameters that changed in the first attempt, and are as before its first update."""
    first, again = then.updates[0].digests, now.updates[0].digests
    return [
        parameter.name
        for place, parameter in enumerate(then.parameters)
        if first[place] == again[place]
        and any(update.digests[place] != first[place] for update in then.updates[1:])
    ]


def _repeats_data(then: TrainingSeen, now: TrainingSeen) -> bool:
    first, again = ([each.digest for each in seen.batches] for seen in (then, now))
    num = min(len(first), len(again))
    return first[:num] == again[:num] and len(set(again[:num])) >= LEAST_BATCHES


def _are_comparable(then: TrainingSeen, now: TrainingSeen) -> bool:
    names = [[each.name for each in seen.parameters] for seen in (then, now)]
    return bool(then.updates and now.updates) and names[0] == names[1]


def _starts_without_state(seen: TrainingSeen) -> bool:
    kept = [each for each in seen.optimizers if each.num_of_model and each.keeps_state]
    return bool(kept) and not any(each.began_with_state for each in kept)


def _saves(run: RunSource) -> bool:
    """Whether a rank saved a checkpoint with torch, or the script marked one."""
    for record in run.ranks:
        if record.life is not None and record.life.background_saves:
            return True
        rows = run.events(record.rank, kinds=[EventKind.BETWEEN_STEPS])
        if bool(((rows.flags & EventFlag.CHECKPOINT) != 0).any()):
            return True
    return False
