"""Render the exposed waits of a rank for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.bandwidth import LINKS, Bandwidth, KindBandwidth
from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.analysis.exposed import (
    EXPOSED_DIMENSIONS,
    PASSES,
    Exposed,
    ExposedOwner,
    ExposedWait,
)
from fsdp_inspect.analysis.prefetch import GATHERS, Prefetch
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.formatting import (
    MISSING,
    ShortNames,
    format_cause,
    format_ms,
    format_ns,
    format_ratio,
    format_unit,
    phrase_cause,
    plural,
    shorten_names,
)
from fsdp_inspect.report.layout import (
    dim,
    indented,
    new_table,
    render_table,
    section,
    with_prefix,
)
from fsdp_inspect.report.wording import (
    NO_COMMUNICATION,
    Owned,
    causes_table,
    describe_main_cause,
    format_kind,
    format_method,
    format_metric,
    name_owner,
)

MOST_OWNERS = 12
"""The most owners to list, unless the report is about one unit."""
MOST_GATHERS = 16
"""The most rows of all-gathers to list, unless the report is about one unit."""
_OWNER_COLUMNS = ("unit", "collective", "phase", "exposed_ns", "causes")
_GATHER_COLUMNS = ("unit", "phase", "issue", "issued_by", "lead_ns", "duration_ns", "hidden_ratio")
_LINK_COLUMNS = (
    "collective",
    "group",
    "bytes_per_step",
    "transfer_ns",
    "bus_bytes_per_s",
    "latency_ns",
    "residual_ratio",
)
_COMPARED_WITH = {"itself": "the same unit, without communication", "alike": "similar units"}
_TRANSFERS = {
    "all_ranks": "shortest duration over the ranks, without the waits for the last rank that the "
    "table of units includes",
    "rank": "time on this rank, which may include waits for other ranks",
    "mixed": "shortest duration over the ranks, where they share the collective",
}


def render_waits(found: RankWaits) -> RenderableType:
    """Render exposed waits by unit and cause, prefetch, bandwidth, slowdown and evidence."""
    exposed = found.exposed
    if exposed is None:
        why = NO_COMMUNICATION if found.num_timed_steps else "the run has no timed step."
        return Group(
            Text(f"Exposed communication is unknown: {why}", style="bold"),
            dim(found.left_out),
        )
    return Group(
        Text(_headline(found, exposed), style="bold"),
        *_details(found, exposed),
        *(_causes(exposed) if found.unit is None else ()),
        *(_dimensions(exposed) if found.unit is None else ()),
        *_passes(found, exposed),
        *_owners(found, exposed),
        *_evidence(found, exposed),
        *_prefetch(found.prefetch, found.unit),
        *_bandwidth(found.bandwidth),
        *_contention(found.contention, found.unit),
        "",
        *_footer(found, exposed),
    )


def _headline(found: RankWaits, exposed: Exposed) -> str:
    if found.unit is not None:
        return _unit_headline(found.unit, exposed)
    if not exposed.exposed_ns:
        return f"Rank {exposed.rank} has no exposed communication in its typical step."
    waited = format_metric("exposed_ns", exposed.exposed_ns)
    return f"Rank {exposed.rank} waits {waited} per step for communication."


def _details(found: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    """The main cause and the largest waits, below the headline."""
    if found.unit is not None or not exposed.exposed_ns:
        return
    step = format_metric("step_time_ns", exposed.step_time_ns)
    yield indented(f"Step time: {step} (typical step).")
    for cause, duration in list(exposed.causes_ns.items())[:1]:
        ratio = format_ratio(duration / exposed.exposed_ns)
        yield indented(f"Main cause: {_phrase(cause, found)} ({ratio} of the exposed time).")
    top = exposed.owners[0]
    longest = format_metric("exposed_ns", top.exposed_ns)
    yield indented(f"Largest waits: {longest} per step for {_describe_owner(top)}.")


def _phrase(cause: str, found: RankWaits) -> str:
    """A cause in a sentence. Bandwidth and stragglers need other ranks to be distinguished."""
    is_alone = found.arrivals is None or found.arrivals.num_ranks < 2
    if cause == "bandwidth" and is_alone:
        return "limited by the transfer, or waiting for other ranks (one rank cannot show which)"
    return phrase_cause(cause)


def _unit_headline(unit: str, exposed: Exposed) -> str:
    name = format_unit(unit)
    waits = [
        f"{format_metric('exposed_ns', owner.exposed_ns)} for the {format_kind(owner.kind)} in "
        f"{owner.phase} ({_main_cause(owner)})"
        for owner in exposed.owners
        if owner.exposed_ns
    ]
    if not waits:
        return f"Rank {exposed.rank} does not wait for {name} in its typical step."
    return f"In its typical step, rank {exposed.rank} waits for {name}: {', '.join(waits)}."


def _main_cause(owner: ExposedOwner) -> str:
    return describe_main_cause([owner]) or "cause unknown"


def _describe_owner(owner: ExposedOwner) -> str:
    issuer = " that FSDP did not issue" if owner.is_fsdp is False else ""
    unit = issuer if owner.fqn is None else f" of {format_unit(owner.fqn)}"
    phase = f" in {owner.phase}" if owner.phase in ("forward", "backward") else ""
    return f"the {format_kind(owner.kind)}{unit}{phase}"


def _causes(exposed: Exposed) -> Iterator[RenderableType]:
    if exposed.causes_ns:
        yield from section("Causes in the typical step", causes_table(exposed.causes_ns))


def _dimensions(exposed: Exposed) -> Iterator[RenderableType]:
    """The dimensions of the mesh; nothing for a mesh of one dimension."""
    if exposed.exposed_ns and len(exposed.dimensions) > 1:
        table = render_table(EXPOSED_DIMENSIONS, exposed.dimensions)
        yield from section("By mesh dimension", table)


def _passes(found: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    if found.unit is not None or not exposed.exposed_ns:
        return
    passes = [row for row in exposed.passes if row.exposed_ns]
    names = [column.name for column in PASSES.columns]
    if len(exposed.dimensions) < 2:
        names.remove("dimension")
    table = render_table(PASSES, passes, *names)
    yield from section(f"By collective, typical step of rank {exposed.rank}", table)


def _owners(found: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    shown = [owner for owner in exposed.owners if owner.exposed_ns or found.unit is not None]
    if not shown:
        return
    limit = len(shown) if found.unit is not None else MOST_OWNERS
    rest = f", the first {limit} of {len(shown)}" if len(shown) > limit else ""
    table = render_table(RankWaits.TABLE, shown[:limit], *_OWNER_COLUMNS)
    title = f"By unit, typical step of rank {exposed.rank}{rest}"
    yield from section(title, table)


def _evidence(found: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    if not exposed.evidence:
        return
    which = "Longest waits" if found.unit is not None else "Longest wait of each owner"
    owners: list[Owned] = [
        *exposed.evidence,
        *(wait.ahead for wait in exposed.evidence if wait.ahead),
    ]
    short = shorten_names(name_owner(owner) for owner in owners)
    table = new_table("step", "<collective", "issued", "needed", "ended", "exposed", "<main cause")
    for wait in exposed.evidence:
        table.add_row(
            str(wait.step),
            _collective(wait, short),
            format_ms(wait.issue_ns),
            format_ms(wait.need_ns),
            format_ms(wait.end_ns),
            format_ns(wait.exposed_ns),
            _mostly(wait, short),
        )
    title = f"{which} (ms from the start of the step)"
    yield from section(title, with_prefix(short, table))


def _collective(wait: ExposedWait, short: ShortNames) -> Text:
    place = f" ({wait.phase})" if wait.phase in ("forward", "backward") else ""
    owner = short(name_owner(wait))
    return Text(f"{owner} {format_kind(wait.kind)}{place}")


def _mostly(wait: ExposedWait, short: ShortNames) -> Text:
    mostly = format_cause(wait.cause)
    if wait.cause == "serialized" and wait.ahead is not None:
        owner = short(name_owner(wait.ahead))
        mostly += f" behind {owner} {format_kind(wait.ahead.kind)}"
    return Text(mostly)


def _prefetch(prefetch: Prefetch | None, unit: str | None) -> Iterator[RenderableType]:
    if prefetch is None or not prefetch.num_gathers:
        return
    counted = ", ".join(f"{count} {issue}" for issue, count in prefetch.num_by_issue.items())
    steps = plural(prefetch.num_steps, "step")
    title = f"All-gathers over {steps}: {counted}"
    if unit is None and set(prefetch.num_by_issue) <= {"blocked", "first"}:
        yield from section(title, Text("They block the host, so no compute hides them."))
        return
    limit = len(prefetch.units) if unit is not None else MOST_GATHERS
    if len(prefetch.units) > limit:
        title += f"; the first {limit} of {len(prefetch.units)} rows"
    table = render_table(GATHERS, prefetch.units[:limit], *_GATHER_COLUMNS)
    yield from section(title, table)
    if prefetch.unused_bytes:
        wasted = format_metric("unused_bytes", prefetch.unused_bytes)
        yield Text(f"Unused all-gathers: {wasted} over these steps.", style="yellow")
    for pair in prefetch.swapped:
        yield Text(
            f"In {pair.phase}, the all-gather of {format_unit(pair.issued_first)} is issued before "
            f"that of {format_unit(pair.needed_first)}, but needed later ({pair.num_times} times). "
            f"The rank waits {format_ns(pair.waited_ns)} for this queue.",
            style="yellow",
        )


def _bandwidth(bandwidth: Bandwidth | None) -> Iterator[RenderableType]:
    if bandwidth is None or not bandwidth.kinds:
        return
    table = render_table(LINKS, bandwidth.kinds, *_LINK_COLUMNS)
    yield from section("Bandwidth of the transfers", table)
    yield dim(describe_transfers(bandwidth))
    for row in bandwidth.kinds:
        if row.link is not None and row.link.refusal is not None:
            yield dim(
                f"{format_kind(row.kind)}, {_group(row)}: latency is unknown. {row.link.refusal}"
            )


def describe_transfers(bandwidth: Bandwidth) -> str:
    """The source of the transfers and of the bus bandwidth."""
    sources = dict.fromkeys(_TRANSFERS[row.transfer_from] for row in bandwidth.kinds)
    steps = plural(bandwidth.num_steps, "step")
    bounds = "".join(
        f" {format_kind(row.kind).capitalize()}, {_group(row)}: without {row.num_bounds} of "
        f"{row.num_events}, whose ends are upper bounds."
        for row in bandwidth.kinds
        if row.num_bounds
    )
    return (
        f"Transfer, over {steps}: mean {'; '.join(sources)}. Bus: of all bytes in all transfers."
        f"{bounds}"
    )


def _group(row: KindBandwidth) -> str:
    if row.group is None:
        return MISSING
    return f"{row.group_role} of {row.group_size or '?'}"


def _contention(contention: Contention | None, unit: str | None) -> Iterator[RenderableType]:
    if contention is None:
        return
    yield from section("Slowdown of compute by communication")
    if contention.slowdown is None:
        yield Text(f"Unknown. {contention.reason}")
        return
    spread = f"single passes: {contention.low:.2f} to {contention.high:.2f}"
    noise = "" if contention.is_clear else " This is within noise."
    yield Text(
        f"During communication, compute takes {contention.slowdown:.2f} times as long ({spread})."
        f"{noise}"
    )
    if unit is not None:
        yield _contention_table(contention)


def _contention_table(contention: Contention) -> Table:
    table = new_table("phase", "compute", "during comm.", "slowdown", "<compared with")
    for row in contention.units:
        table.add_row(
            row.phase,
            format_metric("compute_ns", row.compute_ns),
            format_metric("beside_ratio", row.beside_ratio),
            MISSING if row.slowdown is None else f"{row.slowdown:.2f}",
            _COMPARED_WITH.get(row.compared_with, row.compared_with) or row.reason or "",
        )
    return table


def _footer(found: RankWaits, exposed: Exposed) -> Sequence[RenderableType]:
    methods = dict.fromkeys(
        f"{format_kind(row.kind)} {format_method(row.method)}"
        for row in (found.bandwidth.kinds if found.bandwidth else ())
    )
    lines = [f"{found.source.capitalize()} run {found.run_id}. {found.left_out}"]
    if methods:
        lines.append(f"Times: {'; '.join(methods)}.")
    if found.arrivals is not None:
        lines.append(found.arrivals.sentence)
    return [dim(" ".join(lines))]
