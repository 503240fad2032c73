"""Spins last the requested time on a simulated GPU whose clock rate varies."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._utils as cuda_utils

from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.emulation.spinning import (
    CYCLES_NOTE,
    SPIN_KERNEL,
    SPIN_PTX,
    CudaSpinBackend,
    make_spin,
)

MS = 1_000_000


class FakeGpu:
    """A GPU with a stream of virtual time, a throttling clock, and a ticking timer."""

    def __init__(self, *, tick_ns: int = 1_000, load_error: Exception | None = None) -> None:
        self.now_ns = 123_456
        self.cycles_per_ns = 1.98
        self.tick_ns = tick_ns
        self.load_error = load_error
        self.launched: list[tuple[int, int]] = []

    def load_timer_kernel(self) -> Callable[[int, int, Any], None]:
        if self.load_error is not None:
            raise self.load_error
        return self._spin_by_timer

    def _spin_by_timer(self, seconds: int, nanoseconds: int, stream: Any) -> None:
        assert ctypes.c_int(seconds).value == seconds
        assert ctypes.c_int(nanoseconds).value == nanoseconds
        self.launched.append((seconds, nanoseconds))
        begin = self.now_ns // self.tick_ns
        ticks = -(-(1_000_000_000 * seconds + nanoseconds) // self.tick_ns)
        self.now_ns = (begin + ticks) * self.tick_ns

    def spin_cycles(self, cycles: int, stream: Any) -> None:
        self.now_ns += round(cycles / self.cycles_per_ns)

    def measure_ns(self, enqueue: Callable[[Any], None]) -> float:
        before = self.now_ns
        enqueue(None)
        return self.now_ns - before


def spin_after_throttling(gpu: FakeGpu, duration_ns: int) -> tuple[float, list[str]]:
    notes: list[str] = []
    spin = make_spin(gpu, notes.append)
    gpu.cycles_per_ns = 1.2
    return gpu.measure_ns(lambda stream: spin(duration_ns, stream)), notes


@pytest.mark.parametrize("duration_ns", [20_000, 7 * MS, 4_500 * MS])
def test_a_spin_keeps_its_time_on_a_gpu_that_lowers_its_clock(duration_ns: int) -> None:
    measured_ns, notes = spin_after_throttling(FakeGpu(), duration_ns)
    assert measured_ns == pytest.approx(duration_ns, abs=1_000)
    assert notes == []


def test_durations_beyond_a_32_bit_integer_are_passed_in_two_parts() -> None:
    gpu = FakeGpu()
    spin_after_throttling(gpu, 4_500 * MS)
    assert gpu.launched[-1] == (4, 500 * MS)


def test_without_the_kernel_cycles_are_counted_and_a_note_says_so() -> None:
    gpu = FakeGpu(load_error=RuntimeError("CUDA error: a PTX JIT compilation failed\nsecond line"))
    measured_ns, [note] = spin_after_throttling(gpu, 6 * MS)
    assert measured_ns == pytest.approx(6 * MS * 1.98 / 1.2, rel=0.01)
    assert note == (
        f"{CYCLES_NOTE}: CUDA error: a PTX JIT compilation failed. If the GPU lowers its clock "
        "under load, transfers last longer than the network model computes."
    )


def test_cycles_are_calibrated_on_the_clock_of_the_moment() -> None:
    gpu = FakeGpu(load_error=OSError())
    notes: list[str] = []
    spin = make_spin(gpu, notes.append)
    assert gpu.measure_ns(lambda stream: spin(6 * MS, stream)) == pytest.approx(6 * MS, rel=0.001)
    assert notes[0].startswith(f"{CYCLES_NOTE}: OSError.")


def test_a_timer_that_ticks_too_seldom_is_not_used() -> None:
    gpu = FakeGpu(tick_ns=32 * MS)
    _, [note] = spin_after_throttling(gpu, 6 * MS)
    assert note.startswith(f"{CYCLES_NOTE}: a spin of 2 ms by the GPU's timer lasted 32 ms.")


def test_a_note_reaches_recordings_that_are_attached_before_and_after_it() -> None:
    earlier: list[str] = []
    later: list[str] = []
    with emulate(parse_specification("world_size=2,bandwidth=1GB/s")) as emulation:
        emulation.send_notes(earlier.append)
        emulation.note("The timer is not used.")
        emulation.note("The timer is not used.")
        emulation.send_notes(later.append)
    assert earlier == later == ["The timer is not used."]


class FakeDriver:
    """The driver's calls that torch makes for a PTX module."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launches: list[tuple[int, int, int | None]] = []

    def cuModuleLoadData(self, module: Any, ptx: bytes) -> int:
        self.loaded.append(ptx)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        return 0 if name == SPIN_KERNEL.encode() else 500

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> int:
        grid_and_block, (_, stream, parameters, _) = arguments[:6], arguments[6:]
        assert grid_and_block == (1, 1, 1, 1, 1, 1)
        values = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint32))[0] for i in range(2)]
        self.launches.append((*values, stream.value))
        return 0


class FakeStream:
    _as_parameter_ = ctypes.c_void_p(77)
    queries = 0

    def query(self) -> bool:
        self.queries += 1
        return True

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_torch_hands_the_kernel_and_its_arguments_to_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs torch's own launcher, `_cuda_load_module` and `_CudaKernel`, on a driver that logs."""
    driver, stream = FakeDriver(), FakeStream()
    monkeypatch.setattr(cuda_utils, "_get_gpu_runtime_library", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: stream)
    launch = CudaSpinBackend(torch.device("cuda", 0)).load_timer_kernel()
    launch(4, 500 * MS, stream)
    launch(0, 999_999_999, stream)
    assert driver.loaded == [SPIN_PTX.encode()]
    assert driver.launches == [(4, 500 * MS, 77), (0, 999_999_999, 77)]
    assert stream.queries == 1


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas, of the CUDA toolkit")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_assembles(tmp_path: Path, target: str) -> None:
    source = tmp_path / "spin.ptx"
    source.write_text(SPIN_PTX)
    command = ["ptxas", f"-arch={target}", str(source), "-o", str(tmp_path / "spin.cubin")]
    subprocess.run(command, check=True)
