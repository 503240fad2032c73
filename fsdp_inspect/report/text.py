"""Render the summary, units, parts, numerics and phases of a run for a terminal of 80 columns.

Names from the run (units, hosts, commands) are plain text, never rich markup.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.breakdown import DIMENSIONS, PartTime, StepBreakdown
from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.analysis.gather_distances import GatherDistances
from fsdp_inspect.analysis.host_stops import HostStops
from fsdp_inspect.analysis.kernels import KernelCost, Kernels
from fsdp_inspect.analysis.lifetime import LifePhase, Lifetime, PhaseTime
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import Memory
from fsdp_inspect.analysis.nccl_times import NcclTimes
from fsdp_inspect.analysis.numerics import DtypeUse, Numerics
from fsdp_inspect.analysis.plan_check.check import PlanCheck
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.analysis.step_times import RankOverlap
from fsdp_inspect.analysis.stragglers.ranks import Ranks
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.throughput import Throughput
from fsdp_inspect.analysis.units import UnitCosts
from fsdp_inspect.analysis.verdict import RankVerdict, Verdict
from fsdp_inspect.analysis.verdict.facts import PHASES_BY_NAME
from fsdp_inspect.formatting import (
    capitalize,
    format_bytes,
    format_ns,
    format_numbers,
    format_owner,
    format_ranks,
    format_ratio,
    format_steps,
    format_unit,
    listed,
    name_run,
    plural,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.diagnosis_pictures import render_drift
from fsdp_inspect.report.layout import bar, dim, indented, new_table, render_table, section
from fsdp_inspect.report.wording import (
    NO_COMMUNICATION,
    causes_table,
    describe_contents,
    describe_run,
    describe_typical,
    format_kind,
    format_method,
    format_metric,
    name_owner,
)
from fsdp_inspect.trace.kernels import KernelKind

LEAST_STOP_RATIO = 0.01
"""Lines that stop a host for a smaller fraction of the step are left out."""
MOST_EXPOSED = 5
"""The most owners of exposed communication in a summary."""
MOST_RANKS = 16
"""The most ranks in a summary."""
MOST_DIFFERING = 5
"""The most ranks with a different verdict in a summary."""
MOST_FINDINGS = 5
"""The most findings about the plan in a summary."""
MOST_NAMED = 3
"""The most units that a finding names."""
_OWNER_COLUMNS = ("unit", "collective", "phase", "duration_ns", "exposed_ns", "cause_floor_ns")
_RANK_COLUMNS = ("rank", "host", "step_time_ns", "communication_ns", "exposed_ns", "overlap_ratio")
_COLLECTIVE_COLUMNS = (
    "unit",
    "collective",
    "count_per_step",
    "bytes",
    "duration_ns",
    "exposed_ns",
    "bus_bytes_per_s",
)
_COMPUTE_COLUMNS = (
    "unit",
    "num_parameters",
    "forward_ns",
    "backward_ns",
    "recompute_ns",
    "copies_ns",
    "prefetched_per_step",
)


def render_summary(summary: Summary, *, run: str = "RUN") -> RenderableType:
    """Render a run: verdict, breakdown, exposed units, memory, ranks and provenance.

    Args:
        summary: The summary.
        run: The run in commands.
    """
    return Group(
        _headline(summary),
        "",
        render_verdict(summary.verdict, run=run),
        *_notes(summary.notes),
        *_sections(summary),
        "",
        _provenance(summary),
    )


def render_first_lines(
    summary: Summary, sections: Sequence[str], *, run: str = "RUN"
) -> RenderableType:
    """Render the lines of a run that matter first: verdict, parts, three waits, the peak.

    Args:
        summary: The summary.
        sections: The names of the sections, which the last line lists.
        run: The run in commands.
    """
    lines: list[RenderableType] = [
        _headline(summary),
        "",
        render_verdict(summary.verdict, run=run),
        *_notes(summary.notes),
    ]
    if summary.breakdown is not None:
        lines += section(_breakdown_title(summary), parts_table(summary.breakdown))
        lines += _contents(summary)
    lines += ["", *_largest_waits(summary)]
    if summary.memory.peak is not None:
        lines.append(Text(_peak_title(summary.memory)))
    first, *others = sections
    command = name_run("fsdp-inspect show RUN", run)
    lines.append(dim(f"More: `{command} {first}`, or {', '.join(others)} in its place."))
    return Group(*lines)


def _largest_waits(summary: Summary) -> Iterable[Text]:
    """One line: the most exposed collectives."""
    owners = [] if summary.exposed is None else summary.exposed.owners
    exposed = [owner for owner in owners if owner.exposed_ns > 0][:MOST_NAMED]
    if exposed:
        waits = ", ".join(
            f"{name_owner(owner)} {format_kind(owner.kind)}{_in(owner.phase)} "
            f"{format_ns(owner.exposed_ns)}"
            for owner in exposed
        )
        yield Text(f"Largest waits, sum per step: {waits}.")


def _in(phase: str) -> str:
    """` in backward`; empty outside of passes."""
    return f" in {phase}" if phase in PHASES_BY_NAME else ""


def render_verdict(verdict: Verdict, *, run: str = "RUN") -> RenderableType:
    """Render the limit of the step, the reason, and what to try next."""
    lines: list[RenderableType] = [Text(verdict.sentence, style="bold")]
    for line in filter(None, (verdict.largest_part, f"Why: {verdict.why}")):
        lines.append(indented(line))
    for number, step in enumerate(verdict.next_steps):
        word = "Next" if number == 0 else "Or"
        lines.append(indented(f"{word}: {name_run(step, run)}"))
    return Group(*lines)


def render_numerics(found: Numerics) -> RenderableType:
    """Render the numerics of each unit in the last numerics step that most ranks recorded."""
    steps = plural(len(found.steps), "numerics step")
    return Group(
        Text(f"{Numerics.TABLE.title}, step {found.step}", style="bold"),
        render_table(Numerics.TABLE, found.rows()),
        *map(Text, _missing_numerics(found)),
        *section(DtypeUse.TABLE.title, render_table(DtypeUse.TABLE, found.dtypes)),
        *map(Text, _other_dtypes(found)),
        dim(
            f"{steps} on {format_ranks(found.ranks)}. Gradient: its norm over the whole unit. "
            "Update: norm of the update / norm of the parameters. Output: largest magnitude. Lost: "
            "updates that changed no stored value / updates that should change one, median over "
            f"the steps; over all units {format_ratio(found.lost_ratio)}. Stored, states: dtypes. "
            "Measured."
        ),
    )


def _missing_numerics(found: Numerics) -> Iterable[str]:
    """State the ranks and the steps whose numerics are missing, and the effect."""
    if found.missing_ranks:
        yield (
            f"The numerics of step {found.step} are missing for "
            f"{format_ranks(found.missing_ranks)}. The norms of units that these ranks share are "
            "unknown (-); the other numbers are those of the other ranks."
        )
    others = [step for step in found.incomplete_steps if step != found.step]
    if others:
        yield (
            f"The numerics of {format_steps(others)} are missing for some ranks: values that were "
            "not finite there may be unknown."
        )


def _other_dtypes(found: Numerics) -> Iterable[str]:
    for each in found.other_dtypes:
        units = plural(len(each.units), "unit")
        names = ", ".join(format_owner(unit) for unit in each.units[:3])
        yield (
            f"The {each.place} of {units} ({names}{', ...' if len(each.units) > 3 else ''}) "
            f"is {each.actual}, but {each.declared} is declared."
        )


def render_units(costs: UnitCosts) -> RenderableType:
    """Render the collectives of each unit, then its compute and copies."""
    if not costs.units:
        return Text("The run has no units. `fsdp-inspect show RUN` shows its notes.")
    return Group(
        Text("Collectives of each unit", style="bold"),
        render_table(UnitCosts.COLLECTIVES, costs.collectives(), *_COLLECTIVE_COLUMNS),
        *section(
            "Compute and copies of each unit",
            render_table(UnitCosts.TABLE, costs.units, *_COMPUTE_COLUMNS),
        ),
        *(_distances(costs.distances) if costs.distances is not None else ()),
        "",
        dim(_units_footer(costs)),
    )


def _distances(distances: GatherDistances) -> Iterable[RenderableType]:
    table = render_table(UnitCosts.DISTANCES, distances.units)
    yield from section(UnitCosts.DISTANCES.title, table)
    yield from map(Text, describe_distances(distances))


def _headline(summary: Summary) -> RenderableType:
    title = Text(summary.run_id, style="bold")
    style = "green" if summary.status in ("complete", "imported") else "yellow"
    title.append(f"  {summary.status}", style=style)
    return Group(title, Text(describe_run(summary)))


def _long_stops(summary: Summary) -> Iterable[RenderableType]:
    """The lines that stop a host for a hundredth of the step."""
    if summary.stops is None or summary.breakdown is None:
        return
    if breaks := summary.stops.graph_breaks:
        yield from section(HostStops.BREAKS.title, render_table(HostStops.BREAKS, breaks))
    least_ns = LEAST_STOP_RATIO * summary.breakdown.step_time_ns
    long = [stop for stop in summary.stops.stops if stop.duration_ns >= least_ns]
    if long:
        table = render_table(HostStops.TABLE.with_values(long), long[:MOST_EXPOSED])
        yield from section(HostStops.TABLE.title, table)


def _notes(notes: Sequence[str]) -> Iterable[RenderableType]:
    if notes:
        yield ""
    for note in notes:
        yield Text(f"note: {note}", style="yellow")


def _sections(summary: Summary) -> Iterable[RenderableType]:
    if summary.breakdown is not None:
        yield from section(_breakdown_title(summary), parts_table(summary.breakdown))
        yield from _contents(summary)
    if summary.step_time_ns is not None:
        yield from section(_numbers_title(summary), _numbers_table(summary))
    if summary.drift is not None and (summary.drift.changes or summary.drift.long_steps):
        yield from section("Changes of the step time", *render_drift(summary.drift))
    if summary.exposed is not None:
        exposed = [owner for owner in summary.exposed.owners if owner.exposed_ns > 0]
        if exposed:
            title = f"Largest waits of rank {summary.exposed.rank}, per step"
            table = render_table(RankWaits.TABLE, exposed[:MOST_EXPOSED], *_OWNER_COLUMNS)
            yield from section(title, table)
    yield from _long_stops(summary)
    if summary.memory.peak is not None:
        yield from section(_peak_title(summary.memory), *_peak_tables(summary.memory))
    if len(summary.ranks) > 1:
        table = render_table(Ranks.TABLE, summary.ranks[:MOST_RANKS], *_RANK_COLUMNS)
        yield from section(_ranks_title(summary.ranks), table)
    differing = [verdict for verdict in summary.rank_verdicts if verdict.differs]
    if differing:
        title = f"Ranks with another limit ({len(differing)} of {len(summary.rank_verdicts)})"
        yield from section(title, Group(*map(_rank_verdict, differing[:MOST_DIFFERING])))
    if summary.plan_check is not None:
        yield from section("Declared and observed plan", _plan_check(summary.plan_check))


def _rank_verdict(verdict: RankVerdict) -> Text:
    host = f" ({verdict.host})" if verdict.host else ""
    return Text(f"rank {verdict.rank}{host}: {verdict.sentence}")


def _plan_check(check: PlanCheck) -> RenderableType:
    lines = [Text(check.sentence, style="yellow" if check.is_consistent is False else "")]
    for finding in check.findings[:MOST_FINDINGS]:
        names = listed([format_unit(fqn) for fqn in finding.fqns], MOST_NAMED)
        rule = f" [{finding.rule}]" if finding.rule else ""
        lines.append(Text(f"  {names}: {finding.sentence}{rule}" if names else finding.sentence))
    return Group(*lines)


def _breakdown_title(summary: Summary) -> str:
    rank = summary.breakdown.rank if summary.breakdown else summary.median_rank
    return f"Typical step of rank {rank} ({describe_typical(summary)})"


def _numbers_title(summary: Summary) -> str:
    if summary.num_timed_steps == 1:
        return f"Key numbers of rank {summary.median_rank} (1 timed step)"
    return f"Key numbers of rank {summary.median_rank} ({summary.num_timed_steps} timed steps)"


def _numbers_table(summary: Summary) -> Table:
    table = new_table("", "", "")
    table.columns[2].justify = "left"
    times = summary.step_time_ns
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
        table.add_row(find_metric(name).label, format_metric(name, getattr(summary, name)), "")
    if summary.breakdown is not None and summary.breakdown.host_behind_ns:
        behind = format_metric("host_behind_ns", summary.breakdown.host_behind_ns)
        origin = "upper bound of the device's idle time"
        table.add_row(find_metric("host_behind_ns").label, behind, origin)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        value = getattr(summary, name)
        table.add_row(
            find_metric(name).label, format_metric(name, value), _of_device(summary, name)
        )
    if summary.loss is not None:
        first, last = (
            format_metric("loss", value) for value in (summary.loss.first, summary.loss.last)
        )
        name = summary.loss.name
        origin = f"from {first}" + ("" if name == "loss" else f", logged as {name}")
        table.add_row(find_metric("loss").label, last, origin)
    for name, value, origin in list_throughput(summary.throughput):
        table.add_row(find_metric(name).label, format_metric(name, value), origin)
    if summary.goodput_ratio is not None:
        table.add_row(
            find_metric("goodput_ratio").label,
            format_metric("goodput_ratio", summary.goodput_ratio),
            summary.goodput_basis,
        )
    return table


def _of_device(summary: Summary, name: str) -> str:
    memory = summary.memory
    if name != "peak_reserved_bytes":
        return ""
    if memory.device_ratio is None:
        return "missing on CPU" if summary.identity.device_type == "cpu" else ""
    return f"{format_ratio(memory.device_ratio)} of {format_bytes(memory.device_bytes)}"


def _peak_title(memory: Memory) -> str:
    peak = memory.peak
    if peak is None:
        return ""
    return (
        f"Memory at the peak: {format_bytes(peak.bytes)} in {peak.phase}, "
        f"memory step {peak.step}, rank {peak.rank}"
    )


def _peak_tables(memory: Memory) -> Iterable[RenderableType]:
    if memory.peak is None:
        return
    yield render_table(MemoryOverview.CATEGORIES, memory.peak.categories)
    if memory.peak.owners:
        owners = memory.peak.owners[:MOST_EXPOSED]
        yield render_table(MemoryOverview.TABLE, owners, "unit", "bytes", "main_category")


def _ranks_title(ranks: Sequence[RankOverlap]) -> str:
    shown = f", the first {MOST_RANKS} of {len(ranks)}" if len(ranks) > MOST_RANKS else ""
    return f"Typical step of each rank{shown}"


def _provenance(summary: Summary) -> Text:
    obtained = summary.provenance
    if obtained is None:
        return dim(summary.left_out.sentence)
    by_method: dict[str, list[str]] = {}
    for group, method in obtained.methods.items():
        by_method.setdefault(method, []).append(format_kind(group))
    times = "; ".join(
        f"{format_method(method)}: {', '.join(groups)}" for method, groups in by_method.items()
    )
    lines = [f"{', '.join(obtained.sources).capitalize()} run. {summary.left_out.sentence}"]
    if summary.recorder_sentence is not None:
        lines.append(summary.recorder_sentence)
    if times:
        lines.append(f"Times by method. {times}.")
    if obtained.memory:
        lines.append(f"Memory counted by the {format_method(obtained.memory)}.")
    return dim("\n".join(lines))


def describe_distances(distances: GatherDistances) -> list[str]:
    """Describe the measured distances of ZeRO-3 and the settings that limit them."""
    lines = []
    if distances.longest_prefetch is not None:
        lines.append(
            f"Gathers are issued up to {distances.longest_prefetch:,} parameters ahead"
            f"{_setting(distances, 'prefetch_bucket_size')}."
        )
    if distances.longest_kept is not None:
        lines.append(
            f"Parameters stay gathered over at most {distances.longest_kept:,} other parameters"
            f"{_setting(distances, 'max_reuse_distance')}."
        )
    if distances.shortest_released is not None:
        lines.append(
            "Parameters are gathered again after at least "
            f"{distances.shortest_released:,} other parameters"
            f"{_setting(distances, 'max_reuse_distance')}."
        )
    return lines


def _setting(distances: GatherDistances, name: str) -> str:
    value = distances.settings.get(name)
    return f" ({name}: {int(value):,})" if value and value.isdecimal() else ""


def _units_footer(costs: UnitCosts) -> str:
    if costs.rank is None:
        return "The run has no timed step, so times are missing."
    return (
        f"Typical step of rank {costs.rank}, from {costs.num_steps} timed steps. n: collectives "
        "per step, mean over all timed steps. duration: of one collective on this rank, with its "
        "wait for the last rank; the section `exposed` has the transfers alone. exposed: per "
        "typical step. forward and backward include nested units and the waits for them. "
        f"bus: {find_metric('bus_bytes_per_s').definition}."
    )


# --- List the known numbers of a run's throughput.


def list_throughput(found: Throughput | None) -> Iterator[tuple[str, float, str]]:
    """Yield the name of each known metric, its value and its origin."""
    if found is None:
        return
    planned = found.planned_energy_j_per_step
    beside = "" if planned is None else f"; a plan assumes {planned:,.4g} J, the GPU's limit"
    for name, value, origin in (
        ("tokens_per_s", found.tokens_per_s, found.tokens_origin),
        ("mfu_ratio", found.mfu_ratio, found.mfu_origin),
        ("device_utilisation_ratio", found.device_utilisation_ratio, "measured with NVML"),
        (
            "energy_j_per_step",
            found.energy_j_per_step,
            f"power of the GPU of rank {found.rank}{beside}",
        ),
        (
            "energy_j_per_token",
            found.energy_j_per_token,
            f"all GPUs, if each takes the power of that of rank {found.rank}",
        ),
        (
            "cpu_energy_j_per_step",
            found.cpu_energy_j_per_step,
            f"power of all CPUs of the host of rank {found.rank}",
        ),
    ):
        if value is not None:
            yield name, value, origin


# --- Render the parts of a step, which add up to it, and the causes of its exposed waits.


def render_breakdown(found: BreakdownCauses) -> RenderableType:
    """Render the parts of a step and the causes of its exposed waits."""
    shown = found.shown
    if shown is None:
        return Group(
            Text("The breakdown is unknown: the run has no timed step.", style="bold"),
            dim(found.left_out),
        )
    return Group(
        Text(_headline_of_step(found, shown), style="bold"),
        _describe_parts(found, shown),
        *section(_title(found, shown), parts_table(shown)),
        *_indented(
            describe_contents(shown, found.stop_ratios, in_kernel_trace=found.source == "imported")
        ),
        *dimension_section(shown),
        *_causes(found),
        "",
        dim(_footer(found)),
    )


def _headline_of_step(found: BreakdownCauses, shown: StepBreakdown) -> str:
    step = "Typical step" if found.is_typical else f"Step {shown.closest_step}"
    return f"{step} of rank {shown.rank}: {format_metric('step_time_ns', shown.step_time_ns)}."


def _describe_parts(found: BreakdownCauses, shown: StepBreakdown) -> RenderableType:
    """The exposed time and the largest part, below the headline."""
    details = "No communication is exposed."
    if shown.exposed_ns is None:
        details = f"Exposed communication is unknown: {NO_COMMUNICATION}"
    if shown.exposed_ns:
        exposed = format_metric("exposed_ns", shown.exposed_ns)
        details = f"Exposed communication: {exposed} ({format_ratio(found.exposed_ratio)})."
    if found.largest is not None:
        label = find_metric(f"{found.largest.name}_ns").label
        longest = format_metric("step_time_ns", found.largest.duration_ns)
        details += f" Largest part: {label}, {longest}."
    return indented(details)


def _title(found: BreakdownCauses, shown: StepBreakdown) -> str:
    if found.is_typical:
        return f"Parts of the typical step (mean over {plural(len(shown.steps), 'step')})"
    return "Parts of the step"


def parts_table(shown: StepBreakdown) -> RenderableType:
    """Render the parts of a step, with a bar each; they add up to the step."""
    parts = [part for part in shown.parts if part.duration_ns]
    totals = [("= step", format_metric("step_time_ns", shown.step_time_ns), "100%")]
    if shown.between_ns:
        label = find_metric("between_ns").label
        totals.append((f"({label})", format_metric("between_ns", shown.between_ns), ""))
    return render_table(
        BreakdownCauses.TABLE,
        parts,
        *("part", "duration_ns", "ratio"),
        bar_of=_bar_of_part,
        totals=totals,
    )


def dimension_section(shown: StepBreakdown) -> Iterator[RenderableType]:
    """Render communication by mesh dimension; nothing for a mesh of one dimension."""
    if len(shown.dimensions) < 2:
        return
    columns = ["dimension", "exposed_ns", "step_ratio", "count_per_step", "bytes_per_step"]
    if any(set(row.names) - {row.dimension} for row in shown.dimensions):
        columns.append("names")
    if any(row.is_inferred for row in shown.dimensions):
        columns.append("is_inferred")
    exposed = format_metric("exposed_ns", shown.exposed_ns)
    table = render_table(DIMENSIONS, shown.dimensions, *columns, totals=[("= exposed", exposed)])
    yield from section("Communication by mesh dimension", table)


def _contents(summary: Summary) -> Iterator[RenderableType]:
    step, stops = summary.breakdown, summary.stops.ratios if summary.stops else {}
    if step is not None:
        words = describe_contents(step, stops, in_kernel_trace=summary.is_kernel_trace)
        yield from _indented(words)


def _indented(sentence: str) -> Iterator[RenderableType]:
    if sentence:
        yield indented(sentence)


def _bar_of_part(part: PartTime) -> Text:
    return bar(part.ratio, "▒" if part.name.startswith("exposed") else "█")


def _causes(found: BreakdownCauses) -> Iterator[RenderableType]:
    if found.causes_ns:
        title = "Causes of the exposed communication"
        yield from section(title, causes_table(found.causes_ns))


def _footer(found: BreakdownCauses) -> str:
    sentence = f"{found.source.capitalize()} run {found.run_id}. {found.left_out}"
    return f"{sentence} {found.arrivals.sentence}" if found.arrivals else sentence


# --- Render the phases of a run.


def render_lifetime(life: Lifetime) -> RenderableType:
    """Render the goodput, the phases with their host memory, and lost or unknown parts."""
    return Group(
        Text(describe_goodput(life), style="bold"),
        indented(_describe_attempts(life)),
        *section(
            f"Phases of rank {life.rank}",
            render_table(
                Lifetime.TABLE,
                list(_phase_rows(life)),
                *("phase", "duration_ns", "wall_ratio", "process_peak_bytes", "host_peak_bytes"),
                bar_of=_bar_of_phase,
                totals=[("= wall time", format_metric("wall_ns", life.wall_ns), "100%", "", "")],
            ),
        ),
        "",
        *(dim(note) for note in life.notes),
        dim("process, host: highest known memory of the process and of its host in the phase."),
    )


def describe_goodput(life: Lifetime) -> str:
    """The goodput in one sentence."""
    goodput = format_metric("goodput_ratio", life.goodput_ratio)
    return f"Goodput: {goodput} {life.goodput_basis}."


def _describe_attempts(life: Lifetime) -> str:
    details = capitalize(life.progress)
    if life.background_checkpoint_ns:
        written = format_ns(life.background_checkpoint_ns)
        details += f". Checkpoints were written in the background for {written}"
    return f"{details}."


def _phase_rows(life: Lifetime) -> Iterator[PhaseTime]:
    """The phases, with the parts of the training below it."""
    for phase in life.phases:
        yield phase
        if phase.phase == LifePhase.TRAINING:
            parts = (part for part in life.training_parts if part.duration_ns)
            yield from (replace(part, phase=f"  {part.phase}") for part in parts)


def _bar_of_phase(phase: PhaseTime) -> Text:
    return bar(phase.wall_ratio, "▒" if phase.phase.startswith(" ") else "█")


# --- Word and render the kernels of profiled steps.


MOST_GROUPS = 12
MOST_NAMES = 10


def render_kernels(found: Kernels) -> RenderableType:
    """Render the kernels by kind, then by unit and phase, then the longest ones."""
    tables: list[RenderableType] = []
    for spec, costs, most in (
        (Kernels.KINDS, found.kinds, len(found.kinds)),
        (Kernels.TABLE, found.groups, MOST_GROUPS),
        (Kernels.NAMES, found.names, MOST_NAMES),
    ):
        tables += section(spec.title, render_table(spec.with_values(costs[:most]), costs[:most]))
    return Group(*map(Text, word_kernels(found)), *tables, "", dim(_kernels_footer(found)))


_NCCL_COLUMNS = ("collective", "count", "bytes", "nccl_ns", "recorded_ns", "bus_bytes_per_s")


def render_nccl(found: NcclTimes) -> RenderableType:
    """Render NCCL's own times by unit and by communicator, and the reasons of unmatched ones."""
    tables: list[RenderableType] = [Text(found.sentence)]
    for spec, rows, *names in (
        (NcclTimes.TABLE, found.units, "unit", *_NCCL_COLUMNS),
        (NcclTimes.COMMUNICATORS, found.communicators, "communicator", *_NCCL_COLUMNS[:2],
         "matched", "nccl_ns", "bus_bytes_per_s"),
    ):  # fmt: skip
        if rows:
            tables += section(spec.title, render_table(spec, rows, *names))
    notes = [
        f"{row.communicator}, {row.kind.replace('_', '-')}, not matched: {row.reason}."
        for row in found.communicators
        if row.reason
    ]
    return Group(*tables, "", *map(dim, [*notes, *found.notes]))


def word_kernels(found: Kernels) -> list[str]:
    """The headline, the share of the peak, and the remainder without a kind."""
    work = "kernels" if found.on_device else "operators"
    lines = [
        f"Rank {found.rank}, steps {format_numbers(found.steps)}: {work} compute for "
        f"{format_ns(found.compute_ns)} of {format_ns(found.step_ns)} a step."
    ]
    if found.peak_ratio is not None:
        lines.append(
            f"The step reaches {format_ratio(found.peak_ratio)} of the peak ({found.peak_source})."
        )
    small = _small_kernels(found.kinds)
    if small is not None:
        lines.append(small)
    if found.unknown_ns:
        lines.append(
            f"The names of {format_ns(found.unknown_ns)} of compute do not show a kind: they are "
            f"listed as {KernelKind.OTHER.label}."
        )
    return lines


def _small_kernels(kinds: Sequence[KernelCost]) -> str | None:
    computing = [cost for cost in kinds if cost.compute_ratio is not None]
    count = sum(cost.count for cost in computing)
    small = sum(cost.count * (cost.small_ratio or 0.0) for cost in computing)
    if not count or computing[0].small_ratio is None:
        return None
    return (
        f"{format_ratio(small / count)} of {count:,.0f} a step are small: they run for less than "
        "6 µs, which a host needs to launch one."
    )


def _kernels_footer(found: Kernels) -> str:
    rest = "the device runs nothing" if found.on_device else "no operator runs"
    return (
        f"Times are per step, under the profiler, which slows the host. Between kernels, {rest} "
        f"for {format_ns(found.gap_ns)}."
    )
