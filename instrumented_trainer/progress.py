"""Show the progress of a training: a progress bar on a terminal, otherwise one line per step.

Only rank 0 prints.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_inspect.formatting import format_bytes, format_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The reported numbers of one step."""

    step: int
    """The number of the step, from 1."""
    num_steps: int
    loss: float | None
    """Mean loss over ranks and microbatches, before the step; None if it is meaningless."""
    learning_rate: float
    gradient_norm: float | None
    """The gradient norm over all ranks, before clipping; None without clipping."""
    step_time_ns: int
    num_tokens: int
    """The number of tokens of all ranks."""
    memory_bytes: int
    """The memory of this rank: see `read_memory`."""
    memory_kind: str


class Reporter(Protocol):
    """Prints the progress of a run."""

    def step(self, report: StepReport) -> None:
        """Report a completed step."""

    def say(self, text: str) -> None:
        """Print a line."""

    def close(self) -> None:
        """End the report after the last step."""


def make_reporter(num_steps: int, first_step: int, *, is_first: bool) -> Reporter:
    """A progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""
    if not is_first:
        return _Silence()
    if sys.stdout.isatty():
        return _Bar(num_steps, first_step)
    return _Lines()


def read_memory(device: torch.device) -> tuple[int, str]:
    """This rank's memory in bytes, and the name of the measured quantity.

    CUDA: the peak that torch's allocator has allocated. CPU: the current resident set of the
    process, which includes the interpreter and its libraries.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "peak allocated"
    return int(psutil.Process().memory_info().rss), "resident"


def describe_step(report: StepReport) -> str:
    """Format one step as text."""
    parts = [
        *([f"loss {report.loss:.4f}"] if report.loss is not None else []),
        f"lr {report.learning_rate:.2e}",
        *([f"grad norm {report.gradient_norm:.2f}"] if report.gradient_norm is not None else []),
        format_ns(report.step_time_ns),
        f"{report.num_tokens / report.step_time_ns * 1e9:,.0f} tokens/s",
        f"{format_bytes(report.memory_bytes)} {report.memory_kind}",
    ]
    return "  ".join(parts)


class _Silence:
    def step(self, report: StepReport) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    def step(self, report: StepReport) -> None:
        width = len(str(report.num_steps))
        self.say(f"step {report.step:>{width}}/{report.num_steps}  {describe_step(report)}")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None: ...


class _Bar:
    # Runs without rich's refresh thread, because drawing would take time from the measured steps.
    def __init__(self, num_steps: int, first_step: int) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step)
        self._progress.start()

    def step(self, report: StepReport) -> None:
        self._progress.update(
            self._task, completed=report.step, description=describe_step(report), refresh=True
        )

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
