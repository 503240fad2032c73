"""Define what stops a rank's host, by line, and the size of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from fsdp_inspect.formatting import find_spans
from fsdp_inspect.trace.codes import HOST_STOPS, NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.records import Amount, Index, Record

STOP_NAMES = {kind: kind.label.replace("_", " ") for kind in HOST_STOPS}
COLLECTION = STOP_NAMES[EventKind.GARBAGE_COLLECTION]
COLLECT_CALL = "gc.collect()"
"""The reason of a collection for which the script asks."""
COMPILATION = STOP_NAMES[EventKind.COMPILATION]
GRAPH_CAPTURE = STOP_NAMES[EventKind.GRAPH_CAPTURE]
DEVICE_ALLOCATION = STOP_NAMES[EventKind.DEVICE_ALLOCATION]
KERNEL_LOADING = STOP_NAMES[EventKind.KERNEL_LOADING]
BOOLEAN_MASK = "boolean mask"
PRINTED = "printing a tensor"
PAGEABLE_COPY = "copy from pageable memory"
LEAST_FAULTS_PER_S = 50.0
"""From this rate of major page faults, a process spends its time on them. Each takes 0.1 ms (a fast
SSD) to 10 ms."""
LEAST_SWAP_BYTES = 64 << 20
"""Less swapped-out memory of a process, or a smaller change of it, is not worth a sentence."""
MOST_STOPS = 200
"""Lines of one rank that are kept, each with its kind of call."""
_LAST_CORE = 1 << 14
"""Linux numbers at most 8,192 cores."""
MOST_BREAKS = 50
MOST_BATCHES = 256
"""Steps whose batches are kept: the last ones."""

Text = Annotated[str, Field(max_length=1000)]


class HostStop(Record):
    """Calls of one kind at one line: they read a tensor's value, or stop Python."""

    what: Text
    """`.item()`, `.cpu()`, `BOOLEAN_MASK`, ..., or one of `STOP_NAMES`."""
    place: Text = ""
    """The user's line, `file:line`; empty: unknown."""
    phase: Annotated[int, Field(ge=0, le=int(max(Phase)))] = int(Phase.OUTSIDE)
    unit: Annotated[int, Field(ge=NO_UNIT)] = NO_UNIT
    """The innermost unit on the host's stack; -1: none."""
    count: Amount
    num_steps: Amount
    """The steps with at least one of them."""
    duration_ns: Amount
    """Time inside the calls."""
    idle_ns: Amount | None = None
    """Time after the calls in which the device has no work; None: unknown."""
    reason: Text = ""
    """Of a compilation: the guard that failed; of a collection: `COLLECT_CALL`, or empty."""


class GraphBreak(Record):
    """A line at which torch.compile ended a graph, so that Python runs between two graphs."""

    place: Text = ""
    """The user's line, `file:line`; empty: unknown."""
    reason: Text = ""


class BatchWork(Record):
    """The inputs of the model in one step, over its microbatches."""

    step: Index
    size: Amount
    """Tokens: elements of the first input of whole numbers; of other inputs, samples."""
    is_tokens: bool
    used: Amount | None = None
    """Elements that an attention mask on the host selects; None: there is no such mask."""
    longest: Amount = 0
    """The longest sequence; 0: inputs of one dimension."""


class HostActivity(Record):
    """What a rank's host did besides computing, in its timed and detailed steps."""

    num_steps: Amount = 0
    num_read_steps: Amount = 0
    """The steps of these in which reads of values were watched."""
    stops: list[HostStop] = Field(default_factory=list)
    graph_breaks: list[GraphBreak] = Field(default_factory=list)
    """In the order in which torch.compile met them."""
    sees_reads: bool = False
    """Whether reads of values were watched: not under torch.compile."""
    batches: list[BatchWork] = Field(default_factory=list)
    num_threads: Amount = 0
    """Threads of torch's operators; 0: unknown."""
    num_cores: Amount = 0
    """Cores on which the process may run; 0: unknown."""
    cores: Text = ""
    """The numbers of these cores, as Linux writes them: `0-3,8`. Empty: unknown."""
    core_nodes: list[Index] = Field(default_factory=list)
    """The NUMA nodes of these cores; empty: unknown."""
    device_node: Index | None = None
    """The NUMA node of the rank's GPU; None: unknown, or no GPU."""

    @property
    def core_numbers(self) -> frozenset[int]:
        """The cores on which the process may run; empty: unknown."""
        return parse_cores(self.cores)

    def with_units(self, numbers: Sequence[int]) -> HostActivity:
        """The same with other numbers of the units; `numbers` has one for each old number."""
        stops = [
            stop.model_copy(update={"unit": numbers[stop.unit] if stop.unit >= 0 else NO_UNIT})
            for stop in self.stops
        ]
        return self.model_copy(update={"stops": stops})


def parse_cores(text: str) -> frozenset[int]:
    """The numbers in a list of Linux, `0-3,8`; empty if it is no such list."""
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, *rest = part.split("-")
        last = rest[0] if len(rest) == 1 else first if not rest else ""
        if not (first.isdigit() and last.isdigit()) or int(last) > _LAST_CORE:
            return frozenset()
        numbers.update(range(int(first), int(last) + 1))
    return frozenset(numbers)


def write_cores(numbers: Iterable[int]) -> str:
    """Numbers as Linux writes them: `0-3,8`."""
    spans = find_spans(numbers)
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
