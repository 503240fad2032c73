"""Read the trace of the profiled steps of a recorded run."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect.importing.kineto_events import read_trace
from fsdp_inspect.importing.rank_trace import read_kernels
from fsdp_inspect.importing.trace_file import ImportLimits
from fsdp_inspect.trace.kernels import KernelRecord


def read_profile(content: bytes, units: Sequence[str]) -> KernelRecord:
    """The kernels of the profiled steps.

    Args:
        content: The trace, gzipped.
        units: The names of the run's units, by index.

    Raises:
        ImportingError: The trace is damaged, or not of the recorder.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json.gz"
        path.write_bytes(content)
        return read_kernels(read_trace(path, ImportLimits()), units)
