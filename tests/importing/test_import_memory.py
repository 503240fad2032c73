"""The memory of an import: far less than its trace, for any number of kept events."""

import subprocess
import sys

_STEPS = 50_000
_OVERHEAD = 60 << 20
"""The memory of one decoded batch of the file, and the growth of the libraries."""
_PER_EVENT = 150
"""Bytes per event; a kernel's row of the run has 75."""
_SCRIPT = """
import sys
from pathlib import Path
from fsdp_inspect.importing.kineto import import_traces
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
before = peak()
import_traces(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak() - before)
"""


def write_dense_trace(path):
    """Write operators, launches and kernels in equal numbers; no two kernels touch."""
    events = []
    for place in range(_STEPS):
        at = 10 * place
        both = f'"ph":"X","pid":1,"tid":11,"ts":{at}.125'
        ids = f'"External id":{place + 1},"correlation":{place + 1}'
        events += [
            f'{{{both},"dur":4.25,"cat":"cpu_op","name":"aten::mul","args":{{{ids}}}}}',
            f'{{{both},"dur":2.25,"cat":"cuda_runtime","name":"launch","args":{{{ids}}}}}',
            f'{{{both},"dur":7.25,"cat":"kernel","name":"gemm","args":{{{ids},"stream":7}}}}',
        ]
    path.write_text('{"traceEvents":[' + ",\n".join(events) + "]}")
    return len(events)


def test_a_dense_trace_needs_little_memory_for_each_event(tmp_path):
    trace = tmp_path / "trace.json"
    num_events = write_dense_trace(trace)
    command = [sys.executable, "-c", _SCRIPT, str(trace), str(tmp_path / "run")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < _OVERHEAD + _PER_EVENT * num_events
