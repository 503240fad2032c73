"""Find an optimizer that updates nothing, and updates that are left out.

- Seen: the tensors of each optimizer in the first 8 updates; the number of all updates and
  backwards; sampled values of the parameters.
- Proof: no tensor is a parameter of the model or ever has a gradient, and the model's parameters
  have some. Ranks that train the same part of the model ran equally many backwards, and one made
  at least two updates fewer. Without any update, the sampled values stay.
- Noted: beside an optimizer of the model, another one had no gradient in five updates, and its
  tensors are the same at the end. Its model may join later. Noted too: the only optimizers change
  as many other tensors as the model trains, which never reach the model.
- Refuted by: one such tensor; values that change all the same, as by an optimizer of copies; equal
  values at the end on ranks with fewer updates, as after a broadcast. The optimizer of another
  model has gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import list_holders, values_change
from fsdp_inspect.formatting import capitalize, format_ranks, plural
from fsdp_inspect.trace.correctness import LateSeen, OptimizerSeen, TrainingSeen


def check_optimizer(observed: Observed) -> Iterator[TrainingFault]:
    """Find an optimizer without the model's parameters, and updates that a rank left out."""
    for ranks in observed.list_peers():
        yield from _left_out(observed, ranks)
    yield from _never_updates(observed)
    if not any(each.optimizers for each in observed.seen.values()):
        observed.not_checked[TrainingCheck.OPTIMIZER] = (
            "No update of a torch optimizer was observed, or more than 16 optimizers step."
        )
    stale = {
        rank: each
        for rank, each in observed.seen.items()
        if each.num_with_gradient
        and each.optimizers
        and not values_change(each)
        and not any(one.num_of_model or one.num_with_gradient for one in each.optimizers)
    }
    if stale:
        yield _stale(stale)
    else:
        yield from _changes_nothing(observed)
        yield from _never_copied(observed)


_COPIES = (
    " They have the shapes of the model's whole parameters: those of a copy, or of this model "
    "before it was sharded."
)
_FROM_SHARDED = (
    "Create the optimizer from the parameters of the model that trains, after it is sharded."
)
_ALIKE = " They have shapes of the recorded model's parameters, so they may be those of a copy."


def _are_copies(optimizers: Iterable[OptimizerSeen]) -> bool:
    return all(one.num_tensors == one.num_alike > 0 for one in optimizers)


def _stale(stale: Mapping[int, TrainingSeen]) -> TrainingFault:
    first = stale[min(stale)]
    is_old = _are_copies(one for each in stale.values() for one in each.optimizers)
    number = sum(one.num_tensors for one in first.optimizers)
    num_frozen = sum(one.num_frozen for one in first.optimizers)
    steps = max(one.num_steps for one in first.optimizers)
    remark, remedy = _COPIES if is_old else "", _FROM_SHARDED
    if num_frozen:
        remark = f" {num_frozen} of them are its frozen parameters."
        remedy = "Create the optimizer from the parameters that require gradients."
    return TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(stale)),
        "The optimizer updates no parameter of the model.",
        f"None of its {plural(number, 'tensor')} is a trainable parameter of the model or had a "
        f"gradient in {plural(steps, 'update')}, while {first.num_with_gradient} of the model's "
        f"{first.num_trainable} parameters have gradients.{remark}",
        remedy,
        first.optimizers[0].place,
        is_certain=is_old,
    )


_LEAST_IDLE = 5
_CUT = "Look for detach() or no_grad() between the model that it updates and the loss"


def _changes_nothing(observed: Observed) -> Iterator[TrainingFault]:
    """Find an optimizer of another model, whose gradients never arrive."""
    idle: dict[tuple[str, int], dict[int, OptimizerSeen]] = {}
    for rank, each in observed.seen.items():
        for one in each.optimizers:
            if one.has_moved is False and not one.num_with_gradient:
                idle.setdefault((one.place, one.num_tensors), {})[rank] = one
    trains = all(
        any(one.num_with_gradient for one in each.optimizers) for each in observed.seen.values()
    )
    for by_rank in idle.values() if trains else ():
        if len(by_rank) == len(observed.seen):
            yield from _idle(by_rank)


def _idle(idle: Mapping[int, OptimizerSeen]) -> Iterator[TrainingFault]:
    number = min(each.num_steps for each in idle.values())
    first = idle[min(idle)]
    if number < _LEAST_IDLE:
        return
    is_old = _are_copies(idle.values())
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(idle)),
        "One of the optimizers changes none of its tensors.",
        f"Its {plural(first.num_tensors, 'tensor')} belong to no recorded model. None had a "
        f"gradient in its first {plural(number, 'update')}, and none changed until the end."
        f"{_ALIKE if is_old else ''}",
        f"{'Create it from the parameters of the model that trains' if is_old else _CUT}. If its "
        "model joins later, ignore this.",
        first.place,
        is_note=True,
    )


def _never_copied(observed: Observed) -> Iterator[TrainingFault]:
    """Find copies of the parameters that train in their place, as float32 masters."""
    found: list[OptimizerSeen] = []
    for each in observed.seen.values():
        steps = [one.num_steps for one in each.optimizers if one.has_moved and not one.num_of_model]
        number = sum(one.num_tensors for one in each.optimizers)
        is_all = len(steps) == len(each.optimizers) and number == each.num_trainable
        # In a narrower dtype, small changes round away.
        is_exact = {one.dtype for one in each.parameters} == {"float32"}
        knows_values = is_exact and each.late is not None and each.late.digests and each.updates
        if not is_all or min(steps, default=0) < _LEAST_IDLE or not knows_values:
            return
        if values_change(each) or not each.num_with_gradient:
            return
        found += each.optimizers
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(observed.seen)),
        "The optimizer changes copies of the parameters, and the model stays.",
        f"Its {plural(found[0].num_tensors, 'tensor')} changed, and none is a parameter of the "
        "model, whose sampled values were equal at the start and at the end.",
        "Copy the values to the model after each update.",
        found[0].place,
        is_note=True,
    )


_SHOWN = 4
_LEAST_LEFT_OUT = 2
"""A rank that ends within a step has made one update fewer than others."""


def _left_out(observed: Observed, ranks: Sequence[int]) -> Iterator[TrainingFault]:
    late = {rank: seen for rank in ranks if (seen := observed.seen[rank].late) is not None}
    most = max((each.num_updates for each in late.values()), default=0)
    fewer = [rank for rank, each in late.items() if each.num_updates < most]
    backwards = {each.num_backwards for each in late.values()}
    if not fewer or len(backwards) > 1:
        return
    if min(most - late[rank].num_updates for rank in fewer) < _LEAST_LEFT_OUT:
        return
    if not all(each.num_updates or _stays(each) for each in late.values()):
        return
    if _ends_equal(observed, set(fewer)):
        return
    others = [rank for rank in late if rank not in fewer]
    who = format_ranks(fewer) if len(fewer) <= _SHOWN else plural(len(fewer), "rank")
    made = format_ranks(others) if len(others) == 1 else "other ranks"
    counts = "; ".join(f"rank {rank}: {late[rank].num_updates}" for rank in sorted(late)[:_SHOWN])
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(fewer),
        f"{capitalize(who)} left out updates that {made} made.",
        f"After {backwards.pop()} backwards on each rank, the updates are {counts}. The "
        "parameters of these ranks are from different updates since.",
        "Decide on all ranks together whether an update is left out: reduce the condition over "
        "them first. A gradient scaler of FSDP1 must be ShardedGradScaler, which does so.",
        observed.place_of_update(others[0]),
        is_certain=True,
    )


def _stays(late: LateSeen) -> bool:
    """Whether a rank that made no update has the values at the end that it had before."""
    return bool(late.began) and late.began == late.digests


def _ends_equal(observed: Observed, fewer: Set[int]) -> bool:
    """Whether ranks with fewer updates end with the values of others, as after a broadcast."""
    shared = [
        each
        for each in list_holders(observed)
        if any(rank in fewer for rank in each.updates) and not fewer >= each.updates.keys()
    ]
    return bool(shared) and all(each.ends_equal for each in shared)


def _never_updates(observed: Observed) -> Iterator[TrainingFault]:
    late = {rank: seen.late for rank, seen in observed.seen.items() if seen.late is not None}
    if not late or len(late) < len(observed.seen):
        return
    if any(each.num_updates or not _stays(each) for each in late.values()):
        return
    if any(each.optimizers for each in observed.seen.values()):
        return
    number = min(each.num_backwards for each in late.values())
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(late)),
        "No optimizer updates the model.",
        f"In {plural(number, 'backward')}, no optimizer stepped, and the sampled parameters "
        "stayed as they were.",
        "Look for a gradient scaler that skips each update because the scaled gradients are not "
        "finite, or for a condition before optimizer.step() that never holds. If the gradients are "
        "only read, ignore this.",
    )
