"""Run a module on a virtual clock, which only fixed durations advance.

    python -m tests.validation.virtual_time MODULE ARGS

For emulated runs with computing of fixed length on CPU: whatever sleeps until a time is there at
once, and reading the clock takes a tenth of a microsecond, so that two moments are never one. The
code that runs is the real one; what it takes to run is left out.
"""

from __future__ import annotations

import runpy
import sys
import time

READING_NS = 100


class VirtualClock:
    """Stands for `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.now_ns = time.perf_counter_ns()

    def read(self) -> int:
        """The time, which passes with each reading."""
        self.now_ns += READING_NS
        return self.now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """It is that time now, or was before."""
        self.now_ns = max(self.now_ns, deadline_ns)


def main() -> None:
    """Run the module that the command line names."""
    clock = VirtualClock()
    # Before anything binds the functions by name.
    time.perf_counter_ns = clock.read
    from fsdp_inspect.emulation import network

    network.sleep_until = clock.sleep_until
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
