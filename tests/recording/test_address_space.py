"""Under a limit of the address space, the recorder loads Arrow without the pool of 1 GiB."""

import resource
import subprocess
import sys

import pytest

PRINTS = """
import os, fsdp_inspect.store
import pyarrow as pa
table = pa.table({"column": list(range(1000))})
pa.ipc.new_stream(pa.BufferOutputStream(), table.schema).write_table(table)
[size] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")]
print(pa.default_memory_pool().backend_name, int(size) >> 10, os.environ.get(NAME))
""".replace("NAME", repr("ARROW_DEFAULT_MEMORY_POOL"))


@pytest.mark.skipif(sys.platform != "linux", reason="The size is read from /proc.")
@pytest.mark.parametrize("limit", [2 << 30, resource.RLIM_INFINITY])
def test_little_space_is_reserved_under_a_limit_only(limit: int) -> None:
    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=restrict,
    )  # fmt: skip
    pool, size, variable = done.stdout.split()
    is_limited = limit != resource.RLIM_INFINITY
    assert (pool == "system") is is_limited
    assert (int(size) < 1024) is is_limited
    assert variable == "None"
