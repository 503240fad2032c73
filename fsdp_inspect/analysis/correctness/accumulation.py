"""Find mistakes of gradient accumulation: never cleared, cleared too often, divided wrongly.

- Seen: between the first 8 updates, the backwards that changed the gradients of 8 parameters, and
  whether these and their parameters were changed in between; the gradient of each mean loss.
- Proof: each first backward adds to the gradients of the update before; gradients of one batch are
  cleared before the backward of the next, without an update between; each of the microbatches adds
  the gradient of a whole mean, or of a mean that is divided by the square of their number; the
  learning rate changes between them; at the end of an epoch, an update has fewer backwards than
  usual, whose losses are divided by the usual number.
- Refuted by: changed parameters between the backwards (SAM), several backwards for one batch (an
  attack on the inputs, chunks of a sequence), batches of several loaders (tasks that add up),
  gradients that the loop or a divide factor of FSDP2 divides or that the loop keeps apart
  (differential privacy), a number of backwards that varies elsewhere, other terms of a loss with a
  small weight (distillation).
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.late import CLEAR
from fsdp_inspect.formatting import plural
from fsdp_inspect.trace.correctness import LossSeen, RoundSeen, TrainingSeen

_LEAST_ROUNDS = 3
_TOLERANCE = 0.02
_LEAST_FOR_TWICE = 3
"""With two microbatches, the loss may have the weight of a half on purpose."""


def check_accumulation(observed: Observed) -> Iterator[TrainingFault]:
    """Find mistakes of gradient accumulation."""
    yield from _short_windows(observed)
    rounds = {rank: each.rounds for rank, each in observed.seen.items() if len(each.rounds) >= 2}
    if not rounds or min(map(len, rounds.values())) < _LEAST_ROUNDS:
        observed.not_checked[TrainingCheck.ACCUMULATION] = (
            f"Fewer than {_LEAST_ROUNDS + 1} updates of a torch optimizer with gradients were "
            "observed, or one in each backward."
        )
        return
    if len(rounds) < len(observed.seen):
        return
    for find in (_never_cleared, _cleared_between, _not_divided, _divided_twice, _rate_changes):
        fault = find(observed, rounds)
        if fault is not None:
            yield fault
            return


_Rounds = dict[int, list[RoundSeen]]


def _all(rounds: _Rounds, holds: Callable[[RoundSeen], bool]) -> bool:
    return all(holds(each) for own in rounds.values() for each in own)


def _fault(
    rounds: _Rounds, sentence: str, why: str, change: str, place: str, *, is_certain: bool = False
) -> TrainingFault:
    ranks = tuple(sorted(rounds))
    return TrainingFault(
        TrainingCheck.ACCUMULATION, ranks, sentence, why, change, place, is_certain=is_certain
    )


def _place_of(observed: Observed, rounds: _Rounds) -> str:
    return observed.seen[min(rounds)].backward_place


def _never_cleared(observed: Observed, rounds: _Rounds) -> TrainingFault | None:
    if not _all(rounds, lambda each: each.is_kept and not each.num_cleared):
        return None
    late = [each.late for each in observed.seen.values() if each.late is not None]
    ended = any(each.kept.since is None for each in late)
    num = min(each.kept.number for each in late) if late and not ended else 0
    num = max(num, min(map(len, rounds.values())))
    return _fault(
        rounds,
        "Gradients are not cleared in the first updates."
        if ended
        else "Gradients are never cleared: each update repeats all earlier ones.",
        f"In {'the first ' if ended else ''}{plural(num, 'update')} that were looked at, the first "
        "backward after the update before added to its gradients."
        f"{' Later, they were cleared.' if ended else ''}",
        CLEAR,
        _place_of(observed, rounds),
        is_certain=not ended and observed.run.manifest.device_type == "cpu",  # where zeros are seen
    )


def _has_a_batch_each(each: RoundSeen, num: int) -> bool:
    return each.num_batches == num and each.num_loaders == 1


def _have_a_batch_each(observed: Observed, rounds: _Rounds, num: int) -> bool:
    """Whether each backward of an update of `num` has a batch of its own, and adds up.

    An update at the end of an epoch may have fewer. The end disturbs the counts of up to two
    rounds: the loader reads ahead, or another one evaluates.
    """
    for rank, own in rounds.items():
        windows = observed.seen[rank].windows
        short = {each.step: each.num_backwards for each in windows.short}
        num_regular = sum(_has_a_batch_each(each, short.get(each.step, num)) for each in own)
        disturbed = 2 * len(short) if all(each.ends_pass for each in windows.short) else 0
        if any(each.num_cleared for each in own) or len(own) - num_regular > disturbed:
            return False
        if num_regular < _LEAST_ROUNDS:
            return False
    return True


def _cleared_between(observed: Observed, rounds: _Rounds) -> TrainingFault | None:
    def is_wrong(each: RoundSeen) -> bool:
        num = each.num_backwards
        is_cleared = num > 1 and each.num_cleared == num - 1 and not each.num_moved
        return is_cleared and _has_a_batch_each(each, num)

    if not (_all(rounds, is_wrong) and _uses_last(observed, rounds)):
        return None
    num = next(iter(rounds.values()))[0].num_backwards
    return _fault(
        rounds,
        "Gradients are cleared between the microbatches of a step.",
        f"Each step has {plural(num, 'backward')}, each for a batch of its own, and every one "
        "after the first found the gradients of the one before cleared: the update uses the last "
        "batch only.",
        "Call optimizer.zero_grad() only after an update, not before each backward. If the other "
        "gradients are only measured, ignore this.",
        _place_of(observed, rounds),
    )


def _uses_last(observed: Observed, rounds: _Rounds) -> bool:
    """Whether updates use the gradients of the last backward, at most scaled by one factor.

    A loop may keep the gradients of each backward apart, as for differential privacy.
    """
    updates = [update for rank in rounds for update in observed.seen[rank].updates]
    return any(each.factor is not None for each in updates)


def _not_divided(observed: Observed, rounds: _Rounds) -> TrainingFault | None:
    numbers = {rank: _whole_means(observed.seen[rank]) for rank in rounds}
    known = [number for number in numbers.values() if number]
    if len(known) < len(rounds) or len(set(known)) > 1:
        return None
    number = known[0]
    if not _have_a_batch_each(observed, rounds, number):
        return None
    short = {each.step for rank in rounds for each in observed.seen[rank].windows.short}
    factors = [
        update.factor
        for rank in rounds
        for update in observed.seen[rank].updates
        if update.factor is not None and update.step not in short
    ]
    if not factors or median(factors) < (1 + _TOLERANCE) / number:
        return None
    if _is_divided_by_factor(observed, rounds):
        return None
    return _fault(
        rounds,
        f"The loss is not divided by the {number} microbatches.",
        f"Each of {number} backwards in a step starts from a whole mean over its own microbatch, "
        f"and nothing divides the sum: the gradient is {number} times the mean over the step.",
        f"Divide the loss of each microbatch by {number}. If the learning rate allows for the sum, "
        "ignore this.",
        observed.seen[min(rounds)].losses[0].place,
    )


def _is_divided_by_factor(observed: Observed, rounds: _Rounds) -> bool:
    """Whether FSDP2 divides by a number of the script, or a hook may divide."""
    settings = observed.run.manifest.observed
    return any(settings.get(name) for name in ("comm_hooks", "gradient_hooks")) or any(
        each.divide_factor not in (None, len(rounds))
        for rank in rounds
        for each in observed.seen[rank].parameters
    )


def _divided_twice(observed: Observed, rounds: _Rounds) -> TrainingFault | None:
    windows = [observed.seen[rank].windows for rank in rounds]
    number = windows[0].num_backwards
    groups = [len(group.ranks) for group in observed.run.manifest.process_groups]
    is_of_ranks = number in (len(rounds), *groups)  # or divided by the ranks
    if is_of_ranks or number < _LEAST_FOR_TWICE or _is_divided_by_factor(observed, rounds):
        return None
    if any(
        each.num_backwards != number
        or each.num_usual < _LEAST_ROUNDS
        or abs(number * each.scale - 1) > _TOLERANCE
        for each in windows
    ):
        return None
    if any(each.is_part for rank in rounds for each in observed.seen[rank].losses):
        return None  # it may have this weight among other terms
    if not _have_a_batch_each(observed, rounds, number):
        return None
    return _fault(
        rounds,
        f"The loss is divided by the {number} microbatches twice.",
        f"The {number} backwards of an update start from {1 / number**2:.3g} of the mean over "
        f"their own microbatch: the gradient is 1/{number} of the mean over the step.",
        f"Divide by {number} once. If the factor is meant, ignore this.",
        observed.seen[min(rounds)].losses[0].place,
    )


def _whole_means(seen: TrainingSeen) -> int:
    """The number of backwards from a whole mean in each step, of one line; 0: others too."""
    by_step: dict[int, list[LossSeen]] = {}
    for loss in seen.losses:
        by_step.setdefault(loss.step, []).append(loss)
    ends = {each.step for each in seen.windows.short if each.ends_pass}
    whole = {step: len(each) for step, each in by_step.items() if _are_whole(each)}
    numbers = {number for step, number in whole.items() if step not in ends}
    is_regular = len(numbers) == 1 and len(whole) >= max(_LEAST_ROUNDS, len(by_step) - 1)
    return numbers.pop() if is_regular else 0


def _are_whole(losses: Sequence[LossSeen]) -> bool:
    is_single = len({each.microbatch for each in losses}) == len(losses) > 1
    is_whole = all(abs(each.scale - 1) < _TOLERANCE for each in losses)
    return is_single and is_whole and len({each.place for each in losses}) == 1


def _rate_changes(observed: Observed, rounds: _Rounds) -> TrainingFault | None:
    def is_wrong(each: RoundSeen) -> bool:
        return each.num_passes > 1 and each.num_rates == each.num_passes and not each.num_cleared

    if not _all(rounds, is_wrong):
        return None
    num = next(iter(rounds.values()))[0].num_passes
    return _fault(
        rounds,
        "The learning rate changes in every microbatch, not in every update.",
        f"Each step has {plural(num, 'backward')} with as many learning rates: a schedule that "
        "counts updates ends after a part of the steps.",
        "Call scheduler.step() once for each optimizer.step(). If the rate is meant to follow the "
        "tokens seen, ignore this.",
        _place_of(observed, rounds),
    )


def _short_windows(observed: Observed) -> Iterator[TrainingFault]:
    """Find last updates of an epoch that are scaled as if they had all microbatches."""
    seen = {rank: each.windows for rank, each in observed.seen.items()}
    for each in seen.values():
        usual = each.num_backwards
        is_usual = each.num_usual >= _LEAST_ROUNDS and abs(each.scale - 1) < _TOLERANCE
        if not (each.short and is_usual and usual > 1):
            return
        for short in each.short:
            share = short.num_backwards / usual
            if not short.ends_pass or abs(short.scale - share) > _TOLERANCE * share:
                return
    if not seen or any(loss.is_sum for each in observed.seen.values() for loss in each.losses):
        return  # a sum may be divided by a constant on purpose
    first = seen[min(seen)]
    short, usual = first.short[0], first.num_backwards
    times = usual / short.num_backwards
    ranks = tuple(sorted(seen))
    yield TrainingFault(
        TrainingCheck.ACCUMULATION,
        ranks,
        f"The last update of an epoch is {times:.3g} times too small.",
        f"In step {short.step}, the data ended after "
        f"{plural(short.num_backwards, 'microbatch', 'microbatches')}, and the update scales their "
        f"losses as in the updates of {usual}. "
        f"{plural(len(first.short), 'update')} of {first.num_usual + len(first.short)} did so.",
        "Divide by the number of microbatches that the update has, carry the rest into the next "
        "epoch, or drop it.",
        observed.place_of_update(ranks[0]),
    )
