"""Keep a CUDA stream busy for a given time: a kernel reads the GPU's timer, or counts cycles.

[Note: Spinning for a time]
`torch.cuda._sleep` counts cycles of the multiprocessor's clock, which varies with load, power and
temperature: a spin calibrated on an idle GPU lasts longer on a busy one. The kernel below reads
`%globaltimer` instead, which counts nanoseconds at any clock rate. Its resolution is that of the
timer, about 1 us.

The kernel is written in PTX, which the driver translates when it loads the module. NVRTC
(`torch.cuda._compile_kernel`, torch 2.13) is no alternative: it needs the headers of a CUDA
toolkit (`CUDA_HOME`), which machines with torch's own wheels do not have.

The timer is checked once against CUDA events. If the kernel cannot be loaded or its spin has the
wrong length, `torch.cuda._sleep` replaces it, calibrated once after a warm-up, and a note reports
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

from fsdp_inspect.recording.torch_api.cuda import load_cuda_module, sleep_cycles

SPIN_KERNEL = "fsdp_inspect_spin"

SPIN_PTX = """\
.version 6.0
.target sm_60
.address_size 64

.visible .entry fsdp_inspect_spin(.param .u32 seconds, .param .u32 nanoseconds)
{
    .reg .pred  %p;
    .reg .b32   %r<3>;
    .reg .b64   %rd<6>;

    mov.u64         %rd1, %globaltimer;
    ld.param.u32    %r1, [seconds];
    ld.param.u32    %r2, [nanoseconds];
    mul.wide.u32    %rd2, %r1, 1000000000;
    cvt.u64.u32     %rd3, %r2;
    add.s64         %rd2, %rd2, %rd3;
SPIN:
    mov.u64         %rd4, %globaltimer;
    sub.s64         %rd5, %rd4, %rd1;
    setp.lt.u64     %p, %rd5, %rd2;
    @%p bra         SPIN;
    ret;
}
"""

CYCLES_NOTE = "Emulated transfers on the GPU are timed in clock cycles, not by the GPU's timer"
"""Start of the note that explains why the timer is not used."""

_NS_PER_S = 1_000_000_000
_CHECKED_NS = 2_000_000
_TOLERANCE = 0.05
_REPEATS = 5
_WARM_UP_CYCLES = 200_000_000
_CALIBRATION_CYCLES = 20_000_000

Spin = Callable[[int, Any], None]
"""Keeps a stream busy for a number of ns."""


class SpinBackend(Protocol):
    """The GPU operations that spinning needs; tests replace it by a GPU with a varying clock."""

    def load_timer_kernel(self) -> Callable[[int, int, Any], None]:
        """The kernel of `SPIN_PTX`: call it with seconds, nanoseconds below 1e9 and the stream.

        Raises:
            Exception: The kernel cannot be loaded.
        """
        ...

    def spin_cycles(self, cycles: int, stream: Any) -> None:
        """Keep a stream busy for a number of cycles of the multiprocessor's clock."""
        ...

    def measure_ns(self, enqueue: Callable[[Any], None]) -> float:
        """Measure the device time of the work that `enqueue` puts on a stream, and wait for it."""
        ...


def make_spin(backend: SpinBackend, note: Callable[[str], None]) -> Spin:
    """Choose the best way to spin on a GPU.

    Args:
        backend: The GPU.
        note: Takes one sentence if the GPU's timer cannot be used.
    """
    try:
        spin = _timer_spin(backend)
    except Exception as error:  # fall back after any error of the driver or of torch's private API
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        note(
            f"{CYCLES_NOTE}: {reason}. If the GPU lowers its clock under load, transfers last "
            "longer than the network model computes."
        )
        return _cycle_spin(backend)
    return spin


def _timer_spin(backend: SpinBackend) -> Spin:
    launch = backend.load_timer_kernel()

    def spin(duration_ns: int, stream: Any) -> None:
        # The time has two parts, because torch passes integers to a kernel with 32 bits.
        launch(*divmod(duration_ns, _NS_PER_S), stream)

    times = [backend.measure_ns(lambda stream: spin(_CHECKED_NS, stream)) for _ in range(_REPEATS)]
    measured_ns = median(times)
    if abs(measured_ns / _CHECKED_NS - 1) > _TOLERANCE:
        raise RuntimeError(
            f"a spin of {_CHECKED_NS / 1e6:g} ms by the GPU's timer lasted {measured_ns / 1e6:.3g} "
            "ms"
        )
    return spin


def _cycle_spin(backend: SpinBackend) -> Spin:
    backend.measure_ns(lambda stream: backend.spin_cycles(_WARM_UP_CYCLES, stream))
    times = [
        backend.measure_ns(lambda stream: backend.spin_cycles(_CALIBRATION_CYCLES, stream))
        for _ in range(_REPEATS)
    ]
    cycles_per_ns = _CALIBRATION_CYCLES / median(times)

    def spin(duration_ns: int, stream: Any) -> None:
        backend.spin_cycles(round(duration_ns * cycles_per_ns), stream)

    return spin


class CudaSpinBackend:
    """`SpinBackend` on `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def load_timer_kernel(self) -> Callable[[int, int, Any], None]:
        """Let the driver translate `SPIN_PTX` for the device."""
        if torch.version.hip is not None:
            raise RuntimeError("ROCm does not load PTX")
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # makes the context current for the driver's calls
            module: Any = load_cuda_module(SPIN_PTX, [SPIN_KERNEL])
        kernel = module[SPIN_KERNEL]
        threads = threading.local()

        def launch(seconds: int, nanoseconds: int, stream: Any) -> None:
            if not hasattr(threads, "has_context"):
                # torch launches through the driver. Unlike the runtime, the driver does not make a
                # device's context current in a new thread, such as autograd's.
                stream.query()
                threads.has_context = True
            kernel(args=[seconds, nanoseconds], stream=stream)

        return launch

    def spin_cycles(self, cycles: int, stream: Any) -> None:
        """`torch.cuda._sleep` on the stream."""
        with torch.cuda.stream(stream):
            sleep_cycles(cycles)

    def measure_ns(self, enqueue: Callable[[Any], None]) -> float:
        """Time the work between two events on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(stream)
        enqueue(stream)
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6
