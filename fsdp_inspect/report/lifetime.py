"""Render the phases of a run for a terminal of 80 columns."""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.lifetime import LifePhase, Lifetime, PhaseTime
from fsdp_inspect.formatting import format_ns, plural
from fsdp_inspect.report.layout import bar, dim, indented, render_table, section
from fsdp_inspect.report.wording import format_metric


def render_lifetime(digest: Lifetime) -> RenderableType:
    """Render the goodput, the phases with their host memory, and lost or unknown parts."""
    return Group(
        Text(describe_goodput(digest), style="bold"),
        indented(_details(digest)),
        *section(
            f"Phases of rank {digest.rank}",
            render_table(
                Lifetime.TABLE,
                list(_rows(digest)),
                *("phase", "duration_ns", "wall_ratio", "process_peak_bytes", "host_peak_bytes"),
                bar_of=_bar_of,
                totals=[("= wall time", format_metric("wall_ns", digest.wall_ns), "100%", "", "")],
            ),
        ),
        "",
        *(dim(note) for note in digest.notes),
        dim("process, host: highest known memory of the process and of its host in the phase."),
    )


def describe_goodput(digest: Lifetime) -> str:
    """The goodput in one sentence."""
    goodput = format_metric("goodput_ratio", digest.goodput_ratio)
    return f"Goodput: {goodput} of {format_metric('wall_ns', digest.wall_ns)}."


def _details(digest: Lifetime) -> str:
    steps = plural(digest.num_steps, "completed step")
    attempts = plural(digest.num_attempts, "attempt")
    details = f"{steps} in {attempts}"
    if digest.num_lost_steps:
        details += f", {digest.num_lost_steps} lost at a restart"
    if digest.background_checkpoint_ns:
        written = format_ns(digest.background_checkpoint_ns)
        details += f". Checkpoints were written in the background for {written}"
    return f"{details}."


def _rows(digest: Lifetime) -> Iterator[PhaseTime]:
    """The phases, with the parts of the training below it."""
    for phase in digest.phases:
        yield phase
        if phase.phase == LifePhase.TRAINING:
            parts = (part for part in digest.training_parts if part.duration_ns)
            yield from (replace(part, phase=f"  {part.phase}") for part in parts)


def _bar_of(phase: PhaseTime) -> Text:
    return bar(phase.wall_ratio, "▒" if phase.phase.startswith(" ") else "█")
