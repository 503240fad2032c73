"""How is training going? One line that moves on a terminal, one line a step elsewhere.

Rank 0 speaks, the others are silent.
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
    """What is said about one step."""

    step: int
    """From 1."""
    num_steps: int
    loss: float | None
    """Mean over ranks and microbatches, before the step; None where it means nothing."""
    learning_rate: float
    gradient_norm: float | None
    """Over all ranks, before clipping; None without clipping."""
    step_time_ns: int
    num_tokens: int
    """Of all ranks."""
    memory_bytes: int
    """Of this rank: see `read_memory`."""
    memory_kind: str


class Reporter(Protocol):
    """Where the news of a run goes."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def say(self, text: str) -> None:
        """Something that is worth a line."""

    def close(self) -> None:
        """No more steps come."""


def make_reporter(num_steps: int, first_step: int, *, is_first: bool) -> Reporter:
    """A progress bar on a terminal, plain lines elsewhere, nothing on ranks but the first."""
    if not is_first:
        return _Silence()
    if sys.stdout.isatty():
        return _Bar(num_steps, first_step)
    return _Lines()


def read_memory(device: torch.device) -> tuple[int, str]:
    """Memory of this rank in bytes, and what it counts.

    CUDA: the greatest amount that torch's allocator had handed out. CPU: the process's resident
    set now, which holds the interpreter and its libraries, too.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "peak allocated"
    return int(psutil.Process().memory_info().rss), "resident"


def describe_step(report: StepReport) -> str:
    """One step in words and numbers."""
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
    # Without rich's refresh thread, whose drawing would be a part of the steps it shows.
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
