"""Under a limit of the address space, Arrow's pool and the heaps of threads reserve little."""

import resource
import subprocess
import sys

import pytest

PRINTS = """
import os, threading, fsdp_inspect.store
import pyarrow as pa

def megabytes():
    [size] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")]
    return int(size) >> 10

table = pa.table({"column": list(range(1000))})
pa.ipc.new_stream(pa.BufferOutputStream(), table.schema).write_table(table)
before, barrier = megabytes(), threading.Barrier(5)

def allocate():
    kept = [bytes(1000) for _ in range(1000)]
    barrier.wait()
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
barrier.wait()
print(before, megabytes() - before, os.environ.get("ARROW_DEFAULT_MEMORY_POOL"))
barrier.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="The size is read from /proc.")
@pytest.mark.parametrize("limit", [2 << 30, resource.RLIM_INFINITY])
def test_little_space_is_reserved_under_a_limit_only(limit: int) -> None:
    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=restrict,
    )  # fmt: skip
    before, threads, variable = done.stdout.split()
    is_limited = limit != resource.RLIM_INFINITY
    assert (int(before) < 1024) is is_limited
    assert (int(threads) < 150) is is_limited  # without a limit, 64 MiB of heap for each
    assert variable == "None"
