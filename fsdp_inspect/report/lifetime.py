"""Render the phases of a run for a terminal of 80 columns."""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.lifetime import LifePhase, Lifetime, PhaseTime
from fsdp_inspect.formatting import format_ns, plural
from fsdp_inspect.report.layout import bar, dim, indented, render_table, section
from fsdp_inspect.report.wording import format_metric


def render_lifetime(life: Lifetime) -> RenderableType:
    """Render the goodput, the phases with their host memory, and lost or unknown parts."""
    return Group(
        Text(describe_goodput(life), style="bold"),
        indented(_details(life)),
        *section(
            f"Phases of rank {life.rank}",
            render_table(
                Lifetime.TABLE,
                list(_rows(life)),
                *("phase", "duration_ns", "wall_ratio", "process_peak_bytes", "host_peak_bytes"),
                bar_of=_bar_of,
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
    return f"Goodput: {goodput} of {format_metric('wall_ns', life.wall_ns)}."


def _details(life: Lifetime) -> str:
    steps = plural(life.num_steps, "completed step")
    attempts = plural(life.num_attempts, "attempt")
    details = f"{steps} in {attempts}"
    if life.num_lost_steps:
        details += f", {life.num_lost_steps} lost at a restart"
    if life.background_checkpoint_ns:
        written = format_ns(life.background_checkpoint_ns)
        details += f". Checkpoints were written in the background for {written}"
    return f"{details}."


def _rows(life: Lifetime) -> Iterator[PhaseTime]:
    """The phases, with the parts of the training below it."""
    for phase in life.phases:
        yield phase
        if phase.phase == LifePhase.TRAINING:
            parts = (part for part in life.training_parts if part.duration_ns)
            yield from (replace(part, phase=f"  {part.phase}") for part in parts)


def _bar_of(phase: PhaseTime) -> Text:
    return bar(phase.wall_ratio, "▒" if phase.phase.startswith(" ") else "█")
