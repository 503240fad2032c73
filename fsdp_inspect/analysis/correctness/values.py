"""Find parameters that are not finite, without the numerics of every step.

- Seen: the first loss of each step, the largest magnitude of the parameters before step 1, before
  every 100th step and at the end, and the numerics of the step after the first value that is not
  finite.
- Proof: a trained parameter or an optimizer state is not finite.
- Refuted by: finite parameters; values that were not finite before step 1, with finite losses: a
  mask. A gradient scaler and a loop that skips a bad batch expect
  gradients and losses that are not finite, and a script may log NaN for "no value".
"""

from collections.abc import Iterator, Mapping, Set

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.numerics import (
    NonFinite,
    find_masked_units,
    is_finite_again,
    measure_numerics,
)
from fsdp_inspect.formatting import format_ranks, format_unit, plural
from fsdp_inspect.trace.correctness import ValuesSeen

_BY_DESIGN = " If they hold such values from the start, as a mask, ignore this."


def check_finite(observed: Observed) -> Iterator[TrainingFault]:
    """Find parameters that are not finite."""
    masked = find_masked_units(observed.run)
    seen = {rank: _unmask(each.values, masked) for rank, each in observed.seen.items()}
    numerics = measure_numerics(observed.run)
    first = None if numerics is None else numerics.first_non_finite
    first = None if first is not None and first.has_recovered else first
    wrong = {rank: each for rank, each in seen.items() if each.step is not None}
    if first is None and not wrong:
        if not any(each.finite_step is not None for each in seen.values()):
            observed.not_checked[TrainingCheck.VALUES] = (
                "The parameters were not looked at: the run ended before step 100 without closing "
                "its recorder."
            )
        return
    last = min((each.step for each in wrong.values() if each.step is not None), default=None)
    losses = [
        (each.loss_step, each.loss_place) for each in seen.values() if each.loss_step is not None
    ]
    finite = [each.finite_step or 0 for each in seen.values()]
    was_finite = bool(min(finite) or (losses and not is_finite_again(observed.run)))
    was_finite |= first is not None and first.is_exact
    parts = []
    if first is not None:
        parts.append(_of_numerics(first, was_finite=was_finite))
    if last is not None and (first is None or last <= first.step):
        parts.append(_of_looks(observed, wrong, last))
    if min(finite):
        parts.append(f"They were finite before step {min(finite)}.")
    if not was_finite:
        losses_were = "the last loss was" if losses else "all losses were"
        parts.append(f"No earlier look found them finite, and {losses_were} finite.")
    if losses:
        step, _ = min(losses)
        parts.append(f"The first loss that is not finite is that of step {step}.")
    yield TrainingFault(
        TrainingCheck.VALUES,
        tuple(sorted(wrong)) or (first.ranks if first is not None else ()),
        "Parameters are not finite.",
        " ".join(parts),
        "Start again from the last checkpoint before, with --numerics-every 1 "
        "(numerics_every=1): it finds the step, the unit and the rank."
        f"{'' if was_finite else _BY_DESIGN}",
        min(losses)[1] if losses else "",
        is_certain=was_finite,
    )


def _unmask(seen: ValuesSeen, masked: Set[int]) -> ValuesSeen:
    """What a rank saw, with the units whose values before step 1 are no mask."""
    if not set(seen.masked) - masked or seen.step is not None:
        return seen
    return seen.model_copy(update={"step": 1, "units": seen.masked})


def _of_numerics(first: NonFinite, *, was_finite: bool) -> str:
    if not was_finite:
        return f"Parameters or optimizer states are not finite in step {first.step}."
    since = "in" if first.is_exact else "in or before"
    sentence = f"Parameters or optimizer states stopped being finite {since} step {first.step}"
    return f"{sentence}: {_name(first.fqn)}." if first.is_exact else f"{sentence}."


def _name(fqn: str | None) -> str:
    return "parameters of no unit" if fqn is None else format_unit(fqn)


def _of_looks(observed: Observed, seen: Mapping[int, ValuesSeen], step: int) -> str:
    units = observed.run.manifest.units
    wrong = {rank: each for rank, each in seen.items() if each.step == step}
    numbers = sorted({number for each in wrong.values() for number in each.units})
    names = [_name(units[number].fqn if 0 <= number < len(units) else None) for number in numbers]
    more = f" and {plural(len(names) - 1, 'more unit')}" if len(names) > 1 else ""
    return (
        f"After step {step - 1}, trained parameters of {names[0]}{more} are not finite on "
        f"{format_ranks(sorted(wrong))}."
    )
