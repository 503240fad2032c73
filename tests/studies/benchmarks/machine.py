"""Describe the measured machine and its load."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from fsdp_inspect.formatting import format_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the time of a measurement."""

    date: str
    """The time in UTC, to the minute."""
    cpu: str
    num_cpus: int
    """Logical processors that this process may use."""
    memory_bytes: int
    system: str
    python: str
    torch: str
    gpu: str
    """The name of the GPU; empty if none was used."""
    load: float
    """Runnable processes over the minute before the measurement began."""

    @property
    def sentence(self) -> str:
        """All fields in one sentence, for people."""
        gpu = f", {self.gpu}" if self.gpu else ""
        return (
            f"Measured on {self.date} UTC: {self.cpu}, {self.num_cpus} logical CPUs, "
            f"{format_bytes(self.memory_bytes)} memory{gpu}, {self.system}, Python {self.python}, "
            f"torch {self.torch}; load {self.load:.1f} when it began."
        )


def describe_machine(gpu: str = "") -> Machine:
    """Describe this machine now."""
    import torch

    return Machine(
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        cpu=_cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(psutil.virtual_memory().total),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        gpu=gpu,
        load=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
