"""Describe in words how the order of collectives differs between ranks.

The recorder prints this sentence while the ranks train, and `report` shows the same sentence later.
Both use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_inspect.formatting import capitalize, format_bytes, format_ranks, format_unit
from fsdp_inspect.store.reduction.collective_order import Difference, Issued, OrderDifference
from fsdp_inspect.trace.codes import DTYPES, NO_UNIT, UNKNOWN_STEP, UNKNOWN_UNIT, Phase


def describe_difference(found: OrderDifference, unit_names: Sequence[str]) -> str:
    """Describe the difference in one or two sentences: ranks, collectives, place and effect.

    Args:
        found: The difference.
        unit_names: The fqns of the units, by index.
    """
    if found.is_unknown:
        return (
            f"The ranks issued different collectives before step {found.step}. The first "
            "difference is older than the stored collectives. Results since then are wrong."
        )
    earlier = ""
    if found.usual.unit == UNKNOWN_UNIT:
        earlier = " Before it, they may have differed in collectives of equal kind and size."
    return f"{_subject(found, unit_names)}{_branch(found)} {_consequence(found)}{earlier}"


def describe_issued(issued: Issued, unit_names: Sequence[str], *, with_size: bool = True) -> str:
    """Describe a collective, such as `the all-gather of layers.7 in forward`."""
    kind = name_kind(issued)
    article = "an" if kind[0] in "aeiou" else "a"
    if issued.unit == NO_UNIT:
        of = "of a background thread" if issued.is_background else "of no unit"
        what = f"{article} {kind} {of}"
        size = f" ({format_bytes(issued.bytes)})" if issued.bytes > 0 and with_size else ""
        return f"{what}{size}{_in_phase(issued.phase)}"
    if issued.unit == UNKNOWN_UNIT:
        size = f" ({format_bytes(issued.bytes)})" if issued.bytes > 0 and with_size else ""
        return f"{kind} {issued.sequence + 1}{size}{_in_phase(issued.phase)}"
    return f"the {kind} of {name_unit(issued.unit, unit_names)}{_in_phase(issued.phase)}"


def name_kind(issued: Issued) -> str:
    """The name of a kind of collective: `all-gather`, `reduce-scatter`, ..."""
    return issued.kind.label.replace("_", "-")


def name_unit(unit: int, unit_names: Sequence[str]) -> str:
    """The name of a unit by index; `unit 7` if the run has no name for it."""
    return format_unit(unit_names[unit]) if 0 <= unit < len(unit_names) else f"unit {unit}"


def of_step(step: int | None) -> str:
    """` of step 41`; empty if the step is unknown."""
    return "" if step in (None, UNKNOWN_STEP) else f" of step {step}"


def _in_phase(phase: Phase) -> str:
    return "" if phase == Phase.OUTSIDE else f" in {phase.title}"


def _subject(found: OrderDifference, names: Sequence[str]) -> str:
    usual, deviant = found.usual, found.deviant
    where = "" if found.step == UNKNOWN_STEP else f" in step {found.step}"
    where += "" if found.is_first else " or earlier"
    if found.difference is Difference.STEP:
        return _steps(found, names)
    if deviant is None:
        text = f"The ranks issued different collectives{where}: {_each_set(found, names)}."
        if found.is_race:
            text += (
                " Two threads of a rank issue collectives on this process group, so their order "
                "depends on timing."
            )
        return text
    who = capitalize(format_ranks(found.culprits))
    others = [rank for ranks, _ in found.issued for rank in ranks if rank not in found.culprits]
    rest = capitalize(format_ranks(sorted(others)))
    at, usual_at = _at(deviant), _at(usual)
    mine, theirs = describe_issued(deviant, names), describe_issued(usual, names)
    match found.difference:
        case Difference.SKIPPED:
            return f"{who} left out {theirs}{where}{usual_at}, and issued {mine}{at} instead."
        case Difference.EXTRA:
            return f"{who} issued {mine}{where}{at}. {rest} did not, and issued {theirs}."
        case Difference.SWAPPED:
            return f"{who} issued {mine} before {theirs}{where}{at}. {rest} did the opposite."
        case Difference.SIZE:
            what = describe_issued(deviant, names, with_size=False)
            return (
                f"{who} issued {what} with {format_bytes(deviant.bytes)}{where}{at}. {rest} "
                f"sent {format_bytes(usual.bytes)}."
            )
        case Difference.DTYPE:
            return (
                f"{who} issued {mine} in {DTYPES[deviant.dtype]}{where}{at}. {rest} used "
                f"{DTYPES[usual.dtype]}."
            )
        case _:
            return f"{who} issued {mine}{where}{at}. {rest} issued {theirs}{usual_at}."


def _branch(found: OrderDifference) -> str:
    """A sentence about the line of the training loop that only one side has reached."""
    if not found.branch:
        return ""
    place = found.usual.place
    is_of_others = place is not None and place.loop_line == found.branch
    others = [rank for ranks, _ in found.issued for rank in ranks if rank not in found.culprits]
    line = shorten_place(found.branch)
    if is_of_others:
        return f" In this step, only {format_ranks(sorted(others))} reached {line}."
    return f" Only {format_ranks(found.culprits)} reached {line}."


def _steps(found: OrderDifference, names: Sequence[str]) -> str:
    """Describe ranks that issued one collective in different steps."""
    what = describe_issued(found.issued[0][1], names)
    each = "; ".join(
        f"{format_ranks(ranks)} in step {issued.step}{_at(issued)}"
        for ranks, issued in found.issued
    )
    text = f"The ranks issued {what} in different steps: {each}."
    if found.culprits:
        text += (
            f" {capitalize(format_ranks(found.culprits))} did more or fewer backward passes or "
            "optimizer steps than before."
        )
    return text


def _each_set(found: OrderDifference, names: Sequence[str]) -> str:
    with_size = found.difference is not Difference.SIZE
    return "; ".join(
        f"{format_ranks(ranks)} {describe_issued(issued, names, with_size=with_size)}"
        f"{_message(issued, found)}"
        f"{_at(issued)}"
        for ranks, issued in found.issued
    )


def _message(issued: Issued, found: OrderDifference) -> str:
    """The dtype or the size of a message, if only it differs."""
    if found.difference is Difference.DTYPE:
        return f" in {DTYPES[issued.dtype]}"
    is_size = found.difference is Difference.SIZE
    return f" with {format_bytes(issued.bytes)}" if is_size else ""


def _at(issued: Issued) -> str:
    return "" if issued.place is None else f" ({shorten_place(str(issued.place))})"


def shorten_place(place: str) -> str:
    """Shorten `file:line` to at most one folder: `models/llama.py:31`."""
    return "/".join(place.replace("\\", "/").split("/")[-2:])


def _consequence(found: OrderDifference) -> str:
    place = f"osition {found.sequence + 1} of this process group"
    since = "collective has" if found.num_since == 1 else "collectives have"
    if found.difference is Difference.STEP:
        return (
            f"P{place} still pairs the same tensors, but of different steps: {found.num_since:,} "
            f"{since} finished since, and their results may mix batches or updates."
        )
    if not found.num_since:
        return f"The collectives from p{place} on cannot pair: the job hangs or fails there."
    return (
        f"P{place} pairs different tensors: {found.num_since:,} {since} finished since, and those "
        "of different tensors have wrong results."
    )
