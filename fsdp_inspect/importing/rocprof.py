"""Convert the JSON of rocprofv3 to the events of a torch.profiler trace.

`rocprofv3 --output-format json` writes a file for each process of a training on AMD GPUs. Kernels,
copies and calls of HIP have the same facts as in a trace of torch.profiler, with hardware queues
as streams. ROCTx ranges (`--marker-trace`) stand for operators and annotations, as torch writes
them under `torch.autograd.profiler.emit_nvtx`. The file has the whole life of its process, so an
import needs marked steps. Source: ROCm/rocprofiler-sdk, rocprofv3-schema.json and generateJSON.cpp.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.trace_file import CANNOT_DECODE, ImportLimits, read_blocks
from fsdp_inspect.importing.trace_sources import MARKS_KEY, NOTES_KEY, make_event, name_range

_NOTE = (
    "The trace is the JSON of rocprofv3. Operators, ranges and steps are its ROCTx ranges; it has "
    "no sizes and no process groups of collectives."
)

_MAX_BYTES = 4 << 30

Event = dict[str, Any]


class _Handle(msgspec.Struct):
    handle: int


class _Correlation(msgspec.Struct):
    internal: int


class _Dispatch(msgspec.Struct):
    agent_id: _Handle
    queue_id: _Handle
    kernel_id: int


class _Record(msgspec.Struct):
    """A record of any kind; fields of other kinds are empty."""

    start_timestamp: int
    end_timestamp: int
    correlation_id: _Correlation
    kind: int = 0
    operation: int = 0
    thread_id: int = 0
    dispatch_info: _Dispatch | None = None
    dst_agent_id: _Handle | None = None
    src_agent_id: _Handle | None = None


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Record] = []
    hip_api: list[_Record] = []
    marker_api: list[_Record] = []
    memory_copy: list[_Record] = []


class _Symbol(msgspec.Struct):
    kernel_id: int
    formatted_kernel_name: str = ""


class _Agent(msgspec.Struct):
    id: _Handle
    gpu_index: int = -1
    product_name: str = ""


class _Kind(msgspec.Struct):
    operations: list[str] = []


class _Marker(msgspec.Struct):
    key: int
    value: str


class _Strings(msgspec.Struct):
    buffer_records: list[_Kind] = []
    marker_api: list[_Marker] = []


class _Node(msgspec.Struct):
    hostname: str = ""


class _Metadata(msgspec.Struct):
    pid: int
    node: _Node = msgspec.field(default_factory=_Node)


class _Process(msgspec.Struct):
    metadata: _Metadata
    buffer_records: _Records
    strings: _Strings = msgspec.field(default_factory=_Strings)
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []


class _File(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


class RocprofJson:
    """One file; see `trace_sources.TraceSource`."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            content = bytearray()
            for block in read_blocks(path, ImportLimits()):
                content += block
                if len(content) > _MAX_BYTES:
                    raise ImportingError(
                        f"{path.name} unpacks to more than {format_bytes(_MAX_BYTES)}, and is read "
                        "at once. Expected a recording of a few steps. Profile a part of the "
                        "training with rocprofv3 --collection-period."
                    )
            read = msgspec.json.decode(content, type=_File).processes
        except CANNOT_DECODE as error:
            raise ImportingError(
                f"{path.name} cannot be read: {error}. Expected a complete file of "
                "rocprofv3 --output-format json. Profile again."
            ) from error
        self._processes: dict[int, _Process] = {}
        self._doubled: set[int] = set()
        free = count(max((each.metadata.pid for each in read), default=0) + 1)
        for each in read:
            number = each.metadata.pid
            if _device_of(each) is None:
                continue
            if number in self._processes:
                self._doubled.add(number)
                number = next(free)
            self._processes[number] = each

    def list_processes(self) -> list[int]:
        """The processes that ran kernels, by their first device, then their number."""
        if not self._processes:
            raise ImportingError(
                f"{self._name} has no kernels. Expected kernel_dispatch records. Profile with "
                "rocprofv3 --kernel-trace --hip-trace --marker-trace --output-format json."
            )
        return sorted(self._processes, key=lambda pid: (_device_of(self._processes[pid]), pid))

    def read_events(self, process: int) -> Iterator[Event]:
        """The events of one process."""
        one = self._processes[process]
        symbols = {each.kernel_id: each.formatted_kernel_name for each in one.kernel_symbols}
        devices = {each.id.handle: each.gpu_index for each in one.agents}
        markers = {each.key: each.value for each in one.strings.marker_api}
        kinds = [each.operations for each in one.strings.buffer_records]
        for record in one.buffer_records.kernel_dispatch:
            if (info := record.dispatch_info) is not None:
                name = symbols.get(info.kernel_id) or "unknown kernel"
                device = devices.get(info.agent_id.handle, 0)
                yield _event("kernel", name, record, device, info.queue_id.handle)
        for record in one.buffer_records.memory_copy:
            device = max(
                devices.get(agent.handle, 0) if agent is not None else 0
                for agent in (record.src_agent_id, record.dst_agent_id)
            )
            way = _operation(kinds, record).removeprefix("MEMORY_COPY_").split("_TO_")
            name = f"Memcpy {'to'.join(each[:1] for each in way)}"
            yield _event("gpu_memcpy", name, record, device, "copies")
        for record in one.buffer_records.hip_api:
            yield _event("cuda_runtime", _operation(kinds, record), record, process)
        for record in one.buffer_records.marker_api:
            marker = markers.get(record.correlation_id.internal)
            if marker and record.end_timestamp > record.start_timestamp:
                yield _event(*name_range(marker), record, process)

    def read_other_values(self, process: int) -> Event:
        """The host, the device and the notes."""
        one = self._processes[process]
        names = {each.gpu_index: each.product_name for each in one.agents}
        return {
            "host_name": one.metadata.node.hostname,
            "deviceProperties": [{"name": names.get(_device_of(one) or 0, "")}],
            NOTES_KEY: [
                _NOTE,
                *(
                    f"Several processes of {self._name} have the number {number}, as on several "
                    "nodes. Each is a rank; all but the first have a free number here."
                    for number in sorted(self._doubled)
                ),
            ],
            MARKS_KEY: True,
        }


def _device_of(process: _Process) -> int | None:
    """The device that ran most kernels; None: there is no kernel."""
    devices = {each.id.handle: each.gpu_index for each in process.agents}
    counts = Counter(
        devices.get(each.dispatch_info.agent_id.handle, 0)
        for each in process.buffer_records.kernel_dispatch
        if each.dispatch_info is not None
    )
    return max(counts, key=counts.__getitem__) if counts else None


def _operation(kinds: list[list[str]], record: _Record) -> str:
    names = kinds[record.kind] if 0 <= record.kind < len(kinds) else []
    return names[record.operation] if 0 <= record.operation < len(names) else "unknown call"


def _event(
    category: str, name: str, record: _Record, process: int, thread: int | str | None = None
) -> Event:
    span = record.start_timestamp, record.end_timestamp
    thread = record.thread_id if thread is None else thread
    return make_event(category, name, span, process, thread, record.correlation_id.internal)
