"""Run a module on a virtual clock, which only fixed durations advance.

    python -m tests.studies.validation.virtual_time [--thread-time] MODULE ARGS

This is for emulated runs with fixed compute times on CPU. A sleep until a time returns immediately,
and reading the clock takes a tenth of a microsecond, so that no two moments are equal. The code is
real, but its run time is left out. The device is not sampled, because waits for a core of the
machine are no part of virtual time.

With `--thread-time`, the clock advances with the CPU time of the main thread and with its sleeps.
Compute is then real, but waits for a core of a busy machine are left out.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time

READING_NS = 100


class VirtualClock:
    """Replaces `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.now_ns = time.perf_counter_ns()

    def read(self) -> int:
        """The time, which advances with each reading."""
        self.now_ns += READING_NS
        return self.now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Advance the clock to a time, unless it has passed."""
        self.now_ns = max(self.now_ns, deadline_ns)


class ThreadClock:
    """Replaces `time.perf_counter_ns` by the CPU time of the main thread, and its sleeps."""

    def __init__(self) -> None:
        self._main = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._slept_ns = time.perf_counter_ns() - time.clock_gettime_ns(self._main)

    def read(self) -> int:
        """The time in which the main thread ran or slept."""
        return time.clock_gettime_ns(self._main) + self._slept_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Sleep until a time. Caches are then as cold as after a real wait."""
        left_ns = deadline_ns - self.read()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
            self._slept_ns += left_ns


def _start_nothing(sampler: object) -> None:
    """Replace the start of the device sampler."""


def install(clock: VirtualClock | ThreadClock) -> None:
    """Replace the clock of the process, before other modules bind the functions by name."""
    time.perf_counter_ns = clock.read
    from fsdp_inspect.emulation import network
    from fsdp_inspect.recording.devices import DeviceSampler

    network.sleep_until = clock.sleep_until
    DeviceSampler.start = _start_nothing  # type: ignore[method-assign]


def main() -> None:
    """Run the module of the command line."""
    is_thread_time = sys.argv[1] == "--thread-time"
    install(ThreadClock() if is_thread_time else VirtualClock())
    del sys.argv[: 1 + is_thread_time]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
