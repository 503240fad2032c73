"""Define the process of the GPU script and its model: one process, rank 0 of many.

The other ranks are emulated (`fsdp_inspect.emulation`), because two NCCL ranks can share a GPU only
since NCCL 2.30. Everything except the network is real: FSDP2's scheduling, the kernels, the
allocator, the streams and events.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp_inspect import Recorder
from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.spinning import CYCLES_NOTE
from instrumented_trainer.runtime import Runtime, process_group
from tests.gpu.outcome import Judge
from tests.studies.benchmarks.workload import Workload

NO_DEVICE = "torch sees no CUDA device on this machine"
NEEDS_CUDA = "it needs a CUDA device, and this call ran on the CPU."

ONE_NODE = "h100-nvlink,world_size=8"
EIGHT_NODES = "h200-ib400,world_size=64"

_LARGE = {"preset": "llama-1b", "num_layers": 8, "seq_len": 1024, "batch_size": 2}
"""Blocks of 61 M parameters in bfloat16: kernels and messages as in real training."""
_SMALL = {"preset": "tiny", "num_layers": 4, "seq_len": 16, "batch_size": 1}


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a step."""

    device: Literal["cuda", "cpu"]
    quick: bool
    """Whether this is a quick trial of the script: little work, and noisy numbers are not
    judged."""
    scratch: Path
    """The step's own folder, which is deleted at the end of the script."""
    limit_s: float
    """The time limit of the step."""

    @property
    def is_cuda(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.device == "cuda"

    @property
    def kept(self) -> Path:
        """The folder for files that the script packs and keeps."""
        return self.scratch / "kept"

    @property
    def judge(self) -> Judge:
        """The judge that makes rows."""
        return Judge(is_quick=self.quick)

    @property
    def model(self) -> dict[str, Any]:
        """The default settings of the trainer."""
        return dict(_SMALL if self.quick else _LARGE)

    @property
    def place(self) -> str:
        """The device, for the sentence about the method of a number."""
        return torch.cuda.get_device_name(0) if self.is_cuda else "CPU"

    def to_json(self) -> str:
        """The setting as JSON, for the process that runs the step."""
        return json.dumps({**asdict(self), "scratch": str(self.scratch)})

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """Read a setting that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "scratch": Path(fields["scratch"])})


@contextmanager
def emulated_training(setting: Setting, emulation: str, **settings: Any) -> Iterator[Workload]:
    """A sharded model in training, as rank 0 of emulated ranks.

    Args:
        setting: The setting of the step.
        emulation: The value of `--emulate`.
        settings: Settings of the trainer that replace those of `setting.model`.

    Yields:
        The model, and counters of peaks that start with it.
    """
    specification = parse_specification(emulation)
    device = torch.device("cuda", 0) if setting.is_cuda else torch.device("cpu")
    runtime = Runtime(0, 0, specification.world_size, device, specification)
    _free_what_is_left(setting)
    with process_group(runtime):
        workload = Workload.build(runtime, **{**setting.model, **settings})
        if setting.is_cuda:
            torch.cuda.reset_peak_memory_stats()  # building is not a part of a step's peak
        yield workload


def _free_what_is_left(setting: Setting) -> None:
    """Collect garbage: FSDP's modules refer to each other, so an earlier model would stay."""
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()


def make_recorder(workload: Workload, folder: Path, **options: Any) -> Recorder:
    """A silent recorder on the workload; by default each step in detail, and no memory step."""
    return Recorder(
        workload.model,
        optimizer=workload.optimizer,
        path=folder,
        **{"memory_steps": (), "print_verdict": False, "overhead": None, **options},
    )


def expect_healthy(recorder: Recorder) -> None:
    """Reject a recording that lost data.

    Raises:
        RuntimeError: The recording stopped or had a problem.
    """
    # Transfers that are timed in cycles are recorded normally; see `costs` for their time.
    lost = [problem for problem in recorder.problems if not problem.startswith(CYCLES_NOTE)]
    if lost or not recorder.is_recording:
        raise RuntimeError(f"The recorder did not record all of it: {lost}")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that torch was built with; requires a CUDA build."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


def synchronize(setting: Setting) -> None:
    """Wait for the device."""
    if setting.is_cuda:
        torch.cuda.synchronize()
