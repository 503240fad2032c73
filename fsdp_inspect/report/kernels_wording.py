"""Word and render the kernels of profiled steps."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.kernels import KernelCost, Kernels
from fsdp_inspect.formatting import format_ns, format_numbers, format_ratio
from fsdp_inspect.report.layout import dim, render_table
from fsdp_inspect.trace.kernels import KernelKind

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
        tables += [
            "",
            Text(spec.title, style="bold"),
            render_table(spec.with_values(costs[:most]), costs[:most]),
        ]
    return Group(*map(Text, word_kernels(found)), *tables, "", dim(_footer(found)))


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
    small = _small(found.kinds)
    if small is not None:
        lines.append(small)
    if found.unknown_ns:
        lines.append(
            f"The names of {format_ns(found.unknown_ns)} of compute do not show a kind: they are "
            f"listed as {KernelKind.OTHER.label}."
        )
    return lines


def _small(kinds: Sequence[KernelCost]) -> str | None:
    computing = [cost for cost in kinds if cost.compute_ratio is not None]
    count = sum(cost.count for cost in computing)
    small = sum(cost.count * (cost.small_ratio or 0.0) for cost in computing)
    if not count or computing[0].small_ratio is None:
        return None
    return (
        f"{format_ratio(small / count)} of {count:,.0f} a step are small: they run for less than "
        "6 µs, which a host needs to launch one."
    )


def _footer(found: Kernels) -> str:
    rest = "the device runs nothing" if found.on_device else "no operator runs"
    return (
        f"Times are per step, under the profiler, which slows the host. Between kernels, {rest} "
        f"for {format_ns(found.gap_ns)}."
    )
