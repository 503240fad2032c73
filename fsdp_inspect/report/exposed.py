"""How do a rank's waits for communication read in a terminal? Nothing is computed here."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.bandwidth import Bandwidth, KindBandwidth
from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.analysis.exposed import Exposed, ExposedOwner, ExposedWait
from fsdp_inspect.analysis.prefetch import Prefetch, UnitPrefetch
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.formatting import (
    MISSING,
    format_bytes_per_s,
    format_ms,
    format_ns,
    format_ratio,
    format_unit,
)
from fsdp_inspect.report.causes import causes_table, format_cause, phrase_cause
from fsdp_inspect.report.layout import dim, new_table, owner_name, section, unit_name
from fsdp_inspect.report.values import format_kind, format_method, format_metric

MOST_OWNERS = 12
"""How many owners of exposed communication are listed unless one unit is asked for."""
MOST_GATHERS = 16
"""How many rows of all-gathers are listed unless one unit is asked for."""
_TRANSFERS = {
    "all_ranks": "the shortest duration over the ranks, which waits for nobody",
    "rank": "this rank's own time, in which it may wait for other ranks",
    "mixed": "the shortest duration over the ranks where they share the collective",
}


def render_waits(digest: RankWaits) -> RenderableType:
    """Whose communication a rank waits for and why, prefetch, bandwidth, contention, evidence."""
    exposed = digest.exposed
    if exposed is None:
        return Group(
            Text("What is exposed cannot be told: no step is timed yet.", style="bold"),
            dim(digest.left_out),
        )
    return Group(
        Text(_headline(digest, exposed), style="bold"),
        *(_causes(exposed) if digest.unit is None else ()),
        *_passes(digest, exposed),
        *_owners(digest, exposed),
        *_evidence(digest, exposed),
        *_prefetch(digest.prefetch, digest.unit),
        *_bandwidth(digest.bandwidth),
        *_contention(digest.contention, digest.unit),
        "",
        *_footer(digest, exposed),
    )


def _headline(digest: RankWaits, exposed: Exposed) -> str:
    if digest.unit is not None:
        return _unit_headline(digest.unit, exposed)
    step = format_metric("step_time_ns", exposed.step_time_ns)
    if not exposed.exposed_ns:
        return f"Rank {exposed.rank} waits for no communication in its typical step of {step}."
    waited = (
        f"Rank {exposed.rank} waits {format_metric('exposed_ns', exposed.exposed_ns)} a step for "
        f"communication ({format_ratio(exposed.step_ratio)} of {step})"
    )
    for cause, duration in list(exposed.causes_ns.items())[:1]:
        ratio = format_ratio(duration / exposed.exposed_ns)
        waited += f", {ratio} of it {_phrase(cause, digest)}"
    top = exposed.owners[0]
    longest = format_metric("exposed_ns", top.exposed_ns)
    return f"{waited}. The longest wait, {longest}, is for {_whose(top)}."


def _phrase(cause: str, digest: RankWaits) -> str:
    """A cause in the headline; without other ranks bandwidth cannot be told from stragglers."""
    is_alone = digest.arrivals is None or digest.arrivals.num_ranks < 2
    if cause == "bandwidth" and is_alone:
        return "for want of bandwidth or for later ranks, which cannot be told apart here"
    return phrase_cause(cause)


def _unit_headline(unit: str, exposed: Exposed) -> str:
    name = format_unit(unit)
    waited = [
        f"{format_metric('exposed_ns', owner.exposed_ns)} for the {format_kind(owner.kind)} in "
        f"{owner.phase} ({_main_cause(owner)})"
        for owner in exposed.owners
        if owner.exposed_ns
    ]
    if not waited:
        return f"Rank {exposed.rank} does not wait for communication of {name} in its typical step."
    return f"In each step rank {exposed.rank} waits for {name}: {', '.join(waited)}."


def _main_cause(owner: ExposedOwner) -> str:
    return phrase_cause(next(iter(owner.causes_ns))) if owner.causes_ns else "cause unknown"


def _whose(owner: ExposedOwner) -> str:
    nobody = " that FSDP did not issue" if owner.is_fsdp is False else ""
    whose = nobody if owner.fqn is None else f" of {format_unit(owner.fqn)}"
    place = f" in {owner.phase}" if owner.phase in ("forward", "backward") else ""
    return f"the {format_kind(owner.kind)}{whose}{place}"


def _causes(exposed: Exposed) -> Iterator[RenderableType]:
    if exposed.causes_ns:
        yield from section("Causes in the typical step", causes_table(exposed.causes_ns))


def _passes(digest: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    if digest.unit is not None or not exposed.exposed_ns:
        return
    headers = ("collective", "phase", "n", "units", "exposed", "<why")
    table = new_table(*headers, names=2)
    for row in exposed.passes:
        if row.exposed_ns:
            table.add_row(
                format_kind(row.kind),
                row.phase,
                format_metric("count_per_step", row.count_per_step),
                str(row.num_units),
                format_metric("exposed_ns", row.exposed_ns),
                _why(row.causes_ns),
            )
    yield from section(f"By collective, typical step of rank {exposed.rank}", table)


def _owners(digest: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    shown = [owner for owner in exposed.owners if owner.exposed_ns or digest.unit is not None]
    if not shown:
        return
    limit = len(shown) if digest.unit is not None else MOST_OWNERS
    rest = f", the first {limit} of {len(shown)}" if len(shown) > limit else ""
    headers = ("unit", "collective", "phase", "n", "exposed", "<why")
    table = new_table(*headers, names=3)
    for owner in shown[:limit]:
        table.add_row(
            owner_name(owner),
            format_kind(owner.kind),
            owner.phase,
            format_metric("count_per_step", owner.count_per_step),
            format_metric("exposed_ns", owner.exposed_ns),
            _why(owner.causes_ns),
        )
    title = f"By unit, typical step of rank {exposed.rank}{rest}"
    yield from section(title, table)


def _why(causes_ns: dict[str, int]) -> str:
    total = sum(causes_ns.values())
    shares = ((cause, duration / total) for cause, duration in causes_ns.items())
    return ", ".join(f"{format_cause(cause)} {share:.0%}" for cause, share in shares)


def _evidence(digest: RankWaits, exposed: Exposed) -> Iterator[RenderableType]:
    if not exposed.evidence:
        return
    which = "The longest waits" if digest.unit is not None else "The longest wait of each"
    table = new_table("step", "<waited for", "issued", "needed", "ended", "exposed", "<mostly")
    for wait in exposed.evidence:
        table.add_row(
            str(wait.step),
            _collective(wait),
            format_ms(wait.issue_ns),
            format_ms(wait.need_ns),
            format_ms(wait.end_ns),
            format_ns(wait.exposed_ns),
            _mostly(wait),
        )
    yield from section(f"{which} (evidence; ms from the start of its step)", table)


def _collective(wait: ExposedWait) -> Text:
    place = f" ({wait.phase})" if wait.phase in ("forward", "backward") else ""
    return owner_name(wait).append(f" {format_kind(wait.kind)}{place}")


def _mostly(wait: ExposedWait) -> Text:
    mostly = Text(format_cause(wait.cause))
    if wait.cause == "serialized" and wait.ahead is not None:
        mostly.append(" behind ").append(owner_name(wait.ahead))
        mostly.append(f" {format_kind(wait.ahead.kind)}")
    return mostly


def _prefetch(prefetch: Prefetch | None, unit: str | None) -> Iterator[RenderableType]:
    if prefetch is None or not prefetch.num_gathers:
        return
    counted = ", ".join(f"{count} {issue}" for issue, count in prefetch.num_by_issue.items())
    steps = "1 step" if prefetch.num_steps == 1 else f"{prefetch.num_steps} steps"
    title = f"All-gathers over {steps}: {counted}"
    if unit is None and set(prefetch.num_by_issue) <= {"blocked", "first"}:
        yield from section(title, Text("They block the host, so that nothing runs beside them."))
        return
    limit = len(prefetch.units) if unit is not None else MOST_GATHERS
    if len(prefetch.units) > limit:
        title += f"; the first {limit} of {len(prefetch.units)} rows"
    table = new_table("unit", "phase", "<issued", "lead", "in flight", "hidden", names=2)
    for row in prefetch.units[:limit]:
        table.add_row(
            unit_name(row.fqn),
            row.phase,
            _issued(row),
            format_metric("lead_ns", row.lead_ns),
            format_metric("duration_ns", row.duration_ns),
            format_metric("hidden_ratio", row.hidden_ratio),
        )
    yield from section(title, table)
    if prefetch.unused_bytes:
        wasted = format_metric("unused_bytes", prefetch.unused_bytes)
        yield Text(f"Gathered and never used: {wasted} over these steps.", style="yellow")
    for pair in prefetch.swapped:
        yield Text(
            f"Issued {format_unit(pair.issued_first)} before {format_unit(pair.needed_first)}, "
            f"needed the other way round in {pair.phase}: {pair.num_times} times, "
            f"{format_ns(pair.waited_ns)} waited in the queue.",
            style="yellow",
        )


def _issued(row: UnitPrefetch) -> Text:
    issued = Text(", ".join(row.num_by_issue))
    if row.issued_by:
        issued.append(f" by {format_unit(row.issued_by[0])}")
    return issued


def _bandwidth(bandwidth: Bandwidth | None) -> Iterator[RenderableType]:
    if bandwidth is None or not bandwidth.kinds:
        return
    headers = ("collective", "group", "per step", "transfer", "bus", "latency", "scatter")
    table = new_table(*headers, names=2)
    table.columns[0].no_wrap = True
    for row in bandwidth.kinds:
        fit = row.link if row.link and row.link.refusal is None else None
        table.add_row(
            format_kind(row.kind),
            _group(row),
            format_metric("communication_bytes", row.bytes_per_step),
            format_metric("transfer_ns", row.transfer_ns),
            format_bytes_per_s(row.bus_bytes_per_s),
            format_metric("latency_ns", fit.latency_ns if fit else None),
            f"± {format_ratio(fit.residual_ratio)}" if fit else MISSING,
        )
    yield from section("Bandwidth (bytes-weighted), and latency where sizes tell it", table)
    sources = dict.fromkeys(_TRANSFERS[row.transfer_from] for row in bandwidth.kinds)
    yield dim(f"Transfer: {'; '.join(sources)}.")
    for row in bandwidth.kinds:
        if row.link is not None and row.link.refusal is not None:
            yield dim(f"{format_kind(row.kind)}, {_group(row)}: no latency. {row.link.refusal}")


def _group(row: KindBandwidth) -> str:
    if row.group is None:
        return MISSING
    return f"{row.group_role} of {row.group_size or '?'}"


def _contention(contention: Contention | None, unit: str | None) -> Iterator[RenderableType]:
    if contention is None:
        return
    yield from section("Compute beside communication")
    if contention.slowdown is None:
        yield Text(f"Its slowdown cannot be told. {contention.reason}")
        return
    spread = f"single passes {contention.low:.2f} to {contention.high:.2f} x"
    told = f"{contention.slowdown:.2f} x as long as alone ({spread})"
    if contention.is_clear:
        yield Text(f"It takes {told}.")
    else:
        yield Text(f"It takes {told}: that cannot be told from noise.")
    if unit is not None:
        yield _contention_table(contention)


def _contention_table(contention: Contention) -> Table:
    table = new_table("phase", "compute", "beside", "slowdown", "<compared with")
    for row in contention.units:
        table.add_row(
            row.phase,
            format_metric("compute_ns", row.compute_ns),
            format_metric("beside_ratio", row.beside_ratio),
            MISSING if row.slowdown is None else f"{row.slowdown:.2f} x",
            row.compared_with or row.reason or "",
        )
    return table


def _footer(digest: RankWaits, exposed: Exposed) -> Sequence[RenderableType]:
    methods = dict.fromkeys(
        f"{format_kind(row.kind)} {format_method(row.method)}"
        for row in (digest.bandwidth.kinds if digest.bandwidth else ())
    )
    lines = [f"{digest.source.capitalize()} run {digest.run_id}. {digest.left_out}"]
    if methods:
        lines.append(f"Times: {'; '.join(methods)}.")
    if digest.arrivals is not None:
        lines.append(digest.arrivals.sentence)
    return [dim(" ".join(lines))]
