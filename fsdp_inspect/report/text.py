"""How does a run read in a terminal? Tables that fit 80 columns; nothing is computed here.

Names from the run (units, hosts, commands) are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory.peak import CategoryBytes, Memory
from fsdp_inspect.analysis.overlap import RankOverlap
from fsdp_inspect.analysis.plan_check.check import PlanCheck
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.units import UnitCollective, UnitCost, UnitCosts
from fsdp_inspect.analysis.verdict import RankVerdict, Verdict
from fsdp_inspect.formatting import MISSING, format_bytes, format_count, format_ratio, format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import dim, new_table, owner_name, section, unit_name
from fsdp_inspect.report.values import format_kind, format_method, format_metric
from fsdp_inspect.report.wording import name_backend

MOST_EXPOSED = 5
"""How many owners of exposed communication a summary names."""
MOST_RANKS = 16
"""How many ranks a summary lists."""
MOST_DIFFERING = 5
"""How many ranks with a verdict of their own a summary names."""
MOST_FINDINGS = 5
"""How many findings about the plan a summary names."""
MOST_NAMED = 3
"""How many units a finding names."""
_BAR_WIDTH = 32


def render_summary(digest: Summary) -> RenderableType:
    """A whole run: verdict, breakdown, typical step, exposed units, memory, ranks, provenance."""
    return Group(
        _headline(digest),
        "",
        render_verdict(digest.verdict),
        *_notes(digest.notes),
        *_sections(digest),
        "",
        _provenance(digest),
    )


def render_verdict(verdict: Verdict) -> RenderableType:
    """What limits the step, why, and what to try next."""
    lines: list[RenderableType] = [Text(verdict.sentence, style="bold")]
    lines.append(Padding(Text(f"Why: {verdict.why}"), (0, 0, 0, 2)))
    for number, step in enumerate(verdict.next_steps):
        lines.append(Padding(Text(f"{'Next' if number == 0 else 'Or'}: {step}"), (0, 0, 0, 2)))
    return Group(*lines)


def render_units(costs: UnitCosts) -> RenderableType:
    """What each unit costs: its collectives, then its compute and copies."""
    return Group(
        Text("Collectives of each unit", style="bold"),
        _collectives_table(costs.units),
        "",
        Text("Compute and copies of each unit, per step", style="bold"),
        _compute_table(costs.units),
        "",
        dim(_units_footer(costs)),
    )


def _headline(digest: Summary) -> RenderableType:
    identity = digest.identity
    where = identity.device_name or identity.device_type
    model = f"{identity.model}, {format_count(identity.num_parameters or None)} parameters"
    title = Text(digest.run_id, style="bold")
    title.append(f"  {digest.status}", style=_status_style(digest.status))
    ranks = f"{digest.world_size} {'rank' if digest.world_size == 1 else 'ranks'}"
    if digest.num_ranks != digest.world_size:
        ranks += f" ({digest.num_ranks} recorded)"
    facts = [ranks, name_backend(digest.backend), where, model if identity.model else ""]
    return Group(title, Text(" · ".join(fact for fact in facts if fact)))


def _status_style(status: str) -> str:
    return "green" if status in ("complete", "imported") else "yellow"


def _notes(notes: Sequence[str]) -> Iterable[RenderableType]:
    if notes:
        yield ""
    for note in notes:
        yield Text(f"note: {note}", style="yellow")


def _sections(digest: Summary) -> Iterable[RenderableType]:
    if digest.breakdown is not None:
        yield from section(_breakdown_title(digest.breakdown), _breakdown_table(digest.breakdown))
    if digest.step_time_ns is not None:
        yield from section(_typical_title(digest), _typical_table(digest))
    if digest.exposed is not None:
        exposed = [owner for owner in digest.exposed.owners if owner.exposed_ns > 0]
        if exposed:
            title = f"Waited for most, per typical step of rank {digest.exposed.rank}"
            yield from section(title, _owners_table(exposed[:MOST_EXPOSED]))
    if digest.memory.peak is not None:
        yield from section(_peak_title(digest.memory), _peak_table(digest.memory))
    if len(digest.ranks) > 1:
        yield from section(_ranks_title(digest.ranks), _ranks_table(digest.ranks[:MOST_RANKS]))
    differing = [verdict for verdict in digest.rank_verdicts if verdict.differs]
    if differing:
        title = (
            f"Ranks that something else limits ({len(differing)} of {len(digest.rank_verdicts)})"
        )
        yield from section(title, Group(*map(_rank_verdict, differing[:MOST_DIFFERING])))
    if digest.plan_check is not None:
        yield from section("Declared against observed", _plan_check(digest.plan_check))


def _rank_verdict(verdict: RankVerdict) -> Text:
    host = f" ({verdict.host})" if verdict.host else ""
    return Text(f"rank {verdict.rank}{host}: {verdict.sentence}")


def _plan_check(check: PlanCheck) -> RenderableType:
    lines = [Text(check.sentence, style="yellow" if check.is_consistent is False else "")]
    for finding in check.findings[:MOST_FINDINGS]:
        names = ", ".join(format_unit(fqn) for fqn in finding.fqns[:MOST_NAMED])
        if len(finding.fqns) > MOST_NAMED:
            names += f" and {len(finding.fqns) - MOST_NAMED} more"
        rule = f" [{finding.rule}]" if finding.rule else ""
        lines.append(Text(f"  {names}: {finding.sentence}{rule}" if names else finding.sentence))
    return Group(*lines)


def _breakdown_title(breakdown: StepBreakdown) -> str:
    return f"Typical step of rank {breakdown.rank} (mean over {len(breakdown.steps)} steps)"


def _breakdown_table(breakdown: StepBreakdown) -> Table:
    table = new_table("", "", "", "")
    table.columns[3].justify = "left"
    for part in breakdown.parts:
        if part.duration_ns == 0:
            continue
        name = f"{part.name}_ns"
        is_exposed = part.name.startswith("exposed")
        table.add_row(
            find_metric(name).label,
            format_metric(name, part.duration_ns),
            format_ratio(part.ratio),
            Text(_bar(part.ratio, "▒" if is_exposed else "█")),
        )
    table.add_row("= step", format_metric("step_time_ns", breakdown.step_time_ns), "", "")
    if breakdown.between_ns:
        label, value = find_metric("between_ns").label, breakdown.between_ns
        table.add_row(Text(f"({label})"), format_metric("between_ns", value), "", "")
    return table


def _bar(ratio: float, block: str) -> str:
    return block * round(ratio * _BAR_WIDTH) or "▏"


def _typical_title(digest: Summary) -> str:
    if digest.num_timed_steps == 1:
        return f"The one timed step of rank {digest.median_rank}"
    return f"Typical step of {digest.num_timed_steps} timed steps of rank {digest.median_rank}"


def _typical_table(digest: Summary) -> Table:
    table = new_table("", "", "")
    table.columns[2].justify = "left"
    times = digest.step_time_ns
    spread = ""
    if times is not None:
        low, high = (format_metric("step_time_ns", value) for value in (times.p10, times.p90))
        spread = f"p10 {low}, p90 {high}"
    table.add_row(
        find_metric("step_time_ns").label,
        format_metric("step_time_ns", times.typical if times else None),
        spread,
    )
    for name in ("communication_ns", "exposed_ns", "floor_ns", "overlap_ratio"):
        table.add_row(find_metric(name).label, format_metric(name, getattr(digest, name)), "")
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        value = getattr(digest, name)
        table.add_row(find_metric(name).label, format_metric(name, value), _of_device(digest, name))
    if digest.loss is not None:
        first, last = (
            format_metric("loss", value) for value in (digest.loss.first, digest.loss.last)
        )
        table.add_row(find_metric("loss").label, last, f"from {first}")
    return table


def _of_device(digest: Summary, name: str) -> str:
    memory = digest.memory
    if name != "peak_reserved_bytes":
        return ""
    if memory.device_ratio is None:
        return "no allocator reserves memory on CPU" if digest.identity.device_type == "cpu" else ""
    return f"{format_ratio(memory.device_ratio)} of {format_bytes(memory.device_bytes)}"


def _owners_table(owners: Sequence[ExposedOwner]) -> Table:
    table = new_table("unit", "collective", "phase", "n", "in flight", "exposed", "floor", names=3)
    for owner in owners:
        table.add_row(
            owner_name(owner),
            format_kind(owner.kind),
            owner.phase,
            format_metric("count_per_step", owner.count_per_step),
            format_metric("communication_ns", owner.duration_ns),
            format_metric("exposed_ns", owner.exposed_ns),
            format_metric("floor_ns", owner.floor_ns) if owner.floor_ns else "",
        )
    return table


def _peak_title(memory: Memory) -> str:
    peak = memory.peak
    if peak is None:
        return ""
    return (
        f"What fills {format_bytes(peak.bytes)} at the peak of memory step {peak.step}, "
        f"rank {peak.rank}, in {peak.phase}"
    )


def _peak_table(memory: Memory) -> Table:
    table = new_table("category", "", "owner", "")
    table.columns[2].justify = "left"
    categories: Sequence[CategoryBytes] = memory.peak.categories if memory.peak else ()
    owners = memory.peak.owners if memory.peak else ()
    for row in range(max(min(len(owners), MOST_EXPOSED), len(categories))):
        category = categories[row] if row < len(categories) else None
        owner = owners[row] if row < min(len(owners), MOST_EXPOSED) else None
        table.add_row(
            category.category.replace("_", " ") if category else "",
            format_bytes(category.bytes) if category else "",
            unit_name(owner.fqn) if owner else "",
            format_bytes(owner.bytes) if owner else "",
        )
    return table


def _ranks_title(ranks: Sequence[RankOverlap]) -> str:
    shown = f", the first {MOST_RANKS} of {len(ranks)}" if len(ranks) > MOST_RANKS else ""
    return f"Ranks (typical step of each{shown})"


def _ranks_table(ranks: Sequence[RankOverlap]) -> Table:
    table = new_table("rank", "host", "step time", "communication", "exposed", "overlap", names=2)
    for row in ranks:
        table.add_row(
            str(row.rank),
            Text(row.host),
            format_metric("step_time_ns", row.step_time_ns),
            format_metric("communication_ns", row.communication_ns),
            format_metric("exposed_ns", row.exposed_ns),
            format_metric("overlap_ratio", row.overlap_ratio),
        )
    return table


def _provenance(digest: Summary) -> Text:
    obtained = digest.provenance
    if obtained is None:
        return dim(digest.left_out.sentence)
    by_method: dict[str, list[str]] = {}
    for group, method in obtained.methods.items():
        by_method.setdefault(method, []).append(format_kind(group))
    times = "; ".join(
        f"{format_method(method)}: {', '.join(groups)}" for method, groups in by_method.items()
    )
    lines = [f"{', '.join(obtained.sources).capitalize()} run. {digest.left_out.sentence}"]
    if times:
        lines.append(f"Times by method. {times}.")
    if obtained.memory:
        lines.append(f"Memory counted by the {format_method(obtained.memory)}.")
    return dim("\n".join(lines))


def _collectives_table(units: Sequence[UnitCost]) -> Table:
    table = new_table(
        "unit", "collective", "n", "message", "duration", "exposed", "bus bandwidth", names=2
    )
    for unit in units:
        name: Text | str = Text(format_unit(unit.fqn))
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            collective: UnitCollective = getattr(unit, kind)
            if collective.count_per_step == 0 and kind == "all_reduce":
                continue
            table.add_row(name, format_kind(kind), *_collective_cells(collective))
            name = ""
    return table


def _collective_cells(collective: UnitCollective) -> Iterable[str]:
    for name in ("count_per_step", "bytes", "duration_ns", "exposed_ns", "bus_bytes_per_s"):
        yield format_metric(name, getattr(collective, name))


def _compute_table(units: Sequence[UnitCost]) -> Table:
    table = new_table("unit", "params", "forward", "backward", "recompute", "copies", "prefetched")
    for unit in units:
        table.add_row(
            Text(format_unit(unit.fqn)),
            format_metric("num_parameters", unit.num_parameters),
            format_metric("forward_ns", unit.forward_ns),
            format_metric("backward_ns", unit.backward_ns),
            format_metric("recompute_ns", unit.recompute_ns) if unit.recompute_ns else MISSING,
            format_metric("copies_ns", unit.copies_ns),
            format_metric("prefetched_per_step", unit.prefetched_per_step),
        )
    return table


def _units_footer(costs: UnitCosts) -> str:
    if costs.rank is None:
        return "No step counts yet, so nothing is timed."
    return (
        f"Typical step of {costs.num_steps} timed steps of rank {costs.rank}. n: per step. "
        "duration: mean of one collective; exposed: of all of them in a step. forward and "
        f"backward hold nested units. bus bandwidth: {find_metric('bus_bytes_per_s').definition}."
    )
