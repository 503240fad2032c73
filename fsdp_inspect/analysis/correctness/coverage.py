"""Find parameters that no optimizer trains, that get no gradient, or that are updated twice.

It also finds optimizers that are made anew for each update.

- Seen: the parameters that the optimizers hold and those with a gradient, in the first 8 updates;
  the units without a gradient in one of five later ones.
- Proof: no optimizer holds or changes a parameter that has gradients; a unit runs with a graph, an
  optimizer holds it, and it never has a gradient, or not in the last five updates that were seen;
  updates use the same gradients again; at least four updates, and more than half, begin without
  the state that an optimizer before has left.
- Refuted by: an optimizer that holds the parameter on another rank (ZeRO-1) or steps later;
  an optimizer whose code does not name `grad`, such as a proximal step, a decay or a projection;
  optimizers that hold less than half of the values with gradients, as for LoRA or a new head whose
  base was not frozen; outputs that are detached on purpose, which no optimizer holds; an optimizer
  without state, as SGD without momentum.
"""

from collections.abc import Iterator
from dataclasses import replace

from fsdp_inspect.analysis.correctness.faults import (
    LEAST_STREAK,
    Observed,
    TrainingCheck,
    TrainingFault,
)
from fsdp_inspect.formatting import format_unit, plural
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.correctness import CoverageSeen, StreakSeen

_LEAST_UPDATES = 3
_LEAST_WITHOUT_STATE = 4
_LEAST_TENSORS = 8


def check_coverage(observed: Observed) -> Iterator[TrainingFault]:
    """Find parameters that no optimizer trains, that get no gradient, or that change twice."""
    seen = {
        rank: each.coverage
        for rank, each in observed.seen.items()
        if each.coverage is not None and each.coverage.num_updates >= _LEAST_UPDATES
    }
    if len(seen) < len(observed.run.ranks):
        observed.not_checked[TrainingCheck.PARAMETERS] = (
            f"Fewer than {_LEAST_UPDATES} updates were observed, or the optimizer updates "
            "partitions."
        )
        return
    found = [
        fault
        for find in (_unreduced, _missing, _without, _no_longer, _repeated, _rebuilt)
        if (fault := find(observed, seen)) is not None
    ]
    yield from found
    if not found and (note := _mostly_without(observed, seen)) is not None:
        yield note


_Seen = dict[int, CoverageSeen]


def _fault(observed: Observed, seen: _Seen, sentence: str, why: str, change: str) -> TrainingFault:
    return TrainingFault(
        TrainingCheck.PARAMETERS,
        tuple(sorted(seen)),
        sentence,
        why,
        change,
        observed.place_of_update(min(seen)),
    )


def _unreduced(observed: Observed, seen: _Seen) -> TrainingFault | None:
    names = seen[min(seen)].unreduced
    if not names or not all(each.unreduced for each in seen.values()):
        return None
    more = f" and {plural(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
    return _fault(
        observed,
        seen,
        "DDP does not reduce gradients of parameters that were unfrozen later.",
        f"An optimizer holds {names[0]}{more}, and no bucket of DDP does: frozen when the model "
        "was wrapped, or added since. Each rank then updates with gradients of its own.",
        "Wrap the model again after parameters are unfrozen, or freeze them after it is wrapped, "
        "with find_unused_parameters=True. If the loop reduces these gradients, ignore this.",
    )


def _missing(observed: Observed, seen: _Seen) -> TrainingFault | None:
    names = set.intersection(*(set(each.missing) for each in seen.values()))
    first = seen[min(seen)]
    held = sum(each.held_values for each in seen.values())
    missing = sum(each.missing_values for each in seen.values())
    if not names or not missing or not held:  # an optimizer of nothing has its own check
        return None
    is_most = held < missing  # as for a new head, or beside a teacher
    num = min(each.num_missing for each in seen.values())
    shown = [name for name in first.missing if name in names]
    more = f" and {plural(num - 1, 'other parameter')}" if num > 1 else ""
    verb, them = ("has", "it") if num == 1 else ("have", "them")
    fault = _fault(
        observed,
        seen,
        f"No optimizer holds {plural(num, 'parameter')} that {verb} gradients.",
        f"{shown[0]}{more} {verb} gradients in {_updates(observed, seen)}, and no "
        f"optimizer holds or changes {them}.",
        "Create the optimizer from all parameters of the model, after the last one is added. "
        "Freeze those that should stay: requires_grad_(False) saves their gradients.",
    )
    return replace(fault, is_note=is_most)


def _without(observed: Observed, seen: _Seen) -> TrainingFault | None:
    wrong = set.intersection(*(set(each.units_without) for each in seen.values()))
    if wrong:  # a backward after the first updates may have reached them
        rows = observed.run.summary(ranks=[min(seen)], kinds=[EventKind.REDUCE_SCATTER])
        wrong -= set(rows.unit.tolist())
    optimizers = [one for rank in seen for one in observed.seen[rank].optimizers]
    if not any(one.num_with_gradient for one in optimizers):
        return None
    return _cut(observed, seen, wrong, f"in the first {_updates(observed, seen)}")


def _updates(observed: Observed, seen: _Seen) -> str:
    """The number of updates that were looked at, as a phrase."""
    first = min(seen)
    others = len(observed.seen[first].optimizers) > 1
    return plural(seen[first].num_updates, "update") + " of all optimizers" * others


def _mostly_without(observed: Observed, seen: _Seen) -> TrainingFault | None:
    """Note that most trainable tensors of the only optimizer had no gradient in any update."""
    known = [observed.seen[rank] for rank in seen]
    first = known[0]
    if not all(len(each.optimizers) == 1 for each in known):
        return None
    [optimizer] = first.optimizers
    most = max(each.optimizers[0].num_with_gradient for each in known)
    least = min(each.num_trainable for each in known)
    if not most or least < max(_LEAST_TENSORS, 2 * most) or optimizer.num_of_model < least:
        return None
    fault = _fault(
        observed,
        seen,
        f"{least - most} of {plural(least, 'trainable parameter')} have no gradient.",
        f"They had none in the first {plural(optimizer.num_steps, 'update')}.",
        "Look for no_grad, detach or a reentrant checkpoint around the part that should train: it "
        "needs an input that requires a gradient. Freeze the part if it should stay: "
        "requires_grad_(False).",
    )
    return replace(fault, is_note=True)


def _no_longer(observed: Observed, seen: _Seen) -> TrainingFault | None:
    """Units without a gradient in the last updates, which had some before."""
    late = [each for rank in sorted(seen) if (each := observed.seen[rank].late) is not None]
    streaks = {
        int(index): first
        for index, first in (late[0].units_without.items() if len(late) == len(seen) else ())
        if all(_is_long(each.units_without.get(index, StreakSeen())) for each in late)
    }
    first = max(streaks.values(), key=lambda each: each.since or 0, default=StreakSeen())
    when = f"in {plural(first.number, 'update')} that were looked at from step {first.since} on"
    return _cut(observed, seen, set(streaks), when, had_some=True)


def _is_long(streak: StreakSeen) -> bool:
    return streak.number >= LEAST_STREAK and streak.num_before >= _LEAST_UPDATES


def _cut(
    observed: Observed, seen: _Seen, wrong: set[int], when: str, *, had_some: bool = False
) -> TrainingFault | None:
    """Units without a gradient; a note if they had some before, which may be meant."""
    units = observed.run.manifest.units
    names = [format_unit(units[each].fqn) for each in sorted(wrong) if each < len(units)]
    if not names:
        return None
    more = f" and {plural(len(names) - 1, 'other unit')}" if len(names) > 1 else ""
    is_one = len(names) == 1
    verb, its, they, them = (
        ("runs", "its", "it", "it") if is_one else ("run", "their", "they", "them")
    )
    any_more = " any more" if had_some else ""
    or_rests = "it no longer runs, or " if had_some else ""
    before = " Before, the optimizer had gradients of it." if had_some else ""
    ignore = " If this part is meant to rest, ignore this." if had_some else ""
    fault = _fault(
        observed,
        seen,
        f"{plural(len(names), 'unit')} {'gets' if is_one else 'get'} no gradient{any_more}.",
        f"{names[0]}{more} {verb} with gradients enabled, an optimizer holds {its} parameters, and "
        f"{they} had no gradient {when}: {or_rests}the graph is cut in or after {them}, or "
        f"{its} parameters are not used.{before}",
        "Look for detach(), .data, .item() or no_grad() in this unit, or between it and the loss, "
        f"and for adapters that are off. Freeze what should not be trained: requires_grad_(False)."
        f"{ignore}",
    )
    return replace(fault, is_note=had_some)


def _repeated(observed: Observed, seen: _Seen) -> TrainingFault | None:
    num = min(each.num_repeated for each in seen.values())
    if num < _LEAST_UPDATES:
        return None
    return _fault(
        observed,
        seen,
        "Parameters are updated twice with the same gradients.",
        f"{num} of {plural(seen[min(seen)].num_updates, 'update')} used gradients that an update "
        "before had used, without a backward between: two optimizers hold these parameters, one "
        "steps twice, or the script restores the weights between two tries.",
        "Give each parameter to one optimizer, and call step() once after the last backward. If "
        "the script searches for the step in this way, or one of two optimizers only decays or "
        "projects the parameters, ignore this.",
    )


def _rebuilt(observed: Observed, seen: _Seen) -> TrainingFault | None:
    first = min(seen.values(), key=lambda each: each.num_without_state)
    number, num_updates = first.num_without_state, first.num_updates
    if number < _LEAST_WITHOUT_STATE or 2 * number <= num_updates:
        return None
    return _fault(
        observed,
        seen,
        "Most updates begin with a new optimizer, which has no state.",
        f"In {number} of {plural(num_updates, 'update')}, the optimizer had no state, and one "
        "before had left state for the same parameters. Averages of gradients, such as momentum, "
        "begin again each time.",
        "Create the optimizer once, before the loop. If it is meant to forget its state, ignore "
        "this.",
    )
