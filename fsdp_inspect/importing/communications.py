"""Find the events of a trace that communicate: kernels on a device, gloo's work on a CPU.

A kernel is recognised by its metadata, then by the operator that it is linked to, then by its name.
Names come last, because they change with each version of NCCL and RCCL, and some are generic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kernel_names import is_communication_kernel, is_peer_copy, kind_of
from fsdp_inspect.importing.kineto_events import Category, EventColumns, KinetoTrace
from fsdp_inspect.importing.messages import (
    NOTHING,
    CollectiveMessage,
    GroupKey,
    GroupNames,
    dtype_code_of_name,
    message_bytes_of,
)
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import Rows

Int64Array = NDArray[np.int64]

_PARAMETERS_OPERATOR = "record_param_comms"
_OPERATOR_PREFIXES = ("c10d::", "nccl:", "rccl:", "ucc:")
_GLOO = "gloo:"
_GLOO_NAMES = {
    EventKind.ALL_GATHER: "gloo:all_gather",
    EventKind.REDUCE_SCATTER: "gloo:all_reduce",
    EventKind.ALL_REDUCE: "gloo:all_reduce",
    EventKind.BROADCAST: "gloo:broadcast",
    EventKind.ALL_TO_ALL: "gloo:all_to_all",
    EventKind.BARRIER: "gloo:barrier",
}
"""gloo's annotation for the work of each kind: gloo runs a reduce-scatter as an all-reduce."""


@dataclass(frozen=True, slots=True)
class Issues(Rows):
    """The threads and times at which the host issued device events; arrays of shape (n,)."""

    thread: NDArray[np.int32]
    """-1: unknown."""
    time_ns: Int64Array
    """The event's own start if the issue is unknown."""


@dataclass(frozen=True, slots=True)
class Communications:
    """All communication of a rank; arrays of shape (n,), by issue."""

    kind: NDArray[np.int8]
    bytes: Int64Array
    """Bytes of the full message; -1: unknown."""
    dtype: NDArray[np.int8]
    group: tuple[GroupKey | None, ...]
    thread: NDArray[np.int32]
    """The host thread that issued it; -1: unknown."""
    issue_ns: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array

    def __len__(self) -> int:
        return len(self.kind)


def find_issues(trace: KinetoTrace, events: EventColumns) -> Issues:
    """Find the launch of each device event: by correlation, else by the operator linked to it.

    Args:
        trace: The whole trace.
        events: Kernels or copies of the trace.
    """
    launches, operators = trace.events[Category.LAUNCH], trace.events[Category.OPERATOR]
    thread = np.full(len(events), NOTHING, dtype=np.int32)
    time_ns = events.start_ns.copy()
    for host, ids, wanted in (
        (launches, launches.correlation, events.correlation),
        (operators, operators.external, events.external),
    ):
        place = _find_ids(ids, wanted)
        found = (thread == NOTHING) & (place != NOWHERE)
        thread[found] = host.thread[place[found]]
        time_ns[found] = host.start_ns[place[found]]
    return Issues(thread, time_ns)


def with_peer_copies(trace: KinetoTrace) -> KinetoTrace:
    """The same trace with copies between devices as kernels: they communicate.

    Copy engines run collectives as such copies, and symmetric memory uses them.
    """
    copies = trace.events[Category.MEMORY_COPY]
    return trace.with_kernels(_by_name(trace, is_peer_copy)[copies.name])


def find_communication_kernels(trace: KinetoTrace) -> NDArray[np.bool_]:
    """Mask of the kernels that communicate. Shape (number of kernels,)."""
    kernels, operators = trace.events[Category.KERNEL], trace.events[Category.OPERATOR]
    named = _by_name(trace, lambda name: is_communication_kernel(name) or is_peer_copy(name))
    found = named[kernels.name]
    found[list(trace.messages[Category.KERNEL])] = True
    parameters = operators.where(
        _by_name(trace, lambda name: name == _PARAMETERS_OPERATOR)[operators.name]
    )
    is_linked = _find_ids(parameters.external, kernels.external) != NOWHERE
    return np.asarray(found | is_linked, dtype=bool)


def describe_kernels(
    trace: KinetoTrace, chosen: Int64Array, issues: Issues, groups: GroupNames
) -> Communications:
    """Describe the communication of the chosen kernels.

    Args:
        trace: The whole trace.
        chosen: Shape (n,): indices of kernels.
        issues: The issues of the chosen kernels.
        groups: The rank's process groups; groups that only messages name are added.
    """
    kernels = trace.events[Category.KERNEL].where(chosen)
    own, around = trace.messages[Category.KERNEL], _messages_around(trace, kernels, issues)
    messages, kinds = [], []
    for position, kernel in enumerate(chosen.tolist()):
        operator, operator_message = around[position]
        message = own.get(kernel) or operator_message or CollectiveMessage()
        name = trace.names[kernels.name[position]]
        kinds.append(_kind((message.collective, operator, name)))
        messages.append(message)
    return _ordered(kinds, messages, groups, issues, kernels.start_ns, kernels.end_ns)


@lru_cache(maxsize=4096)
def _kind(names: tuple[str | None, ...]) -> EventKind:
    """The kind according to the first name that contains one."""
    kinds = [kind_of(name) for name in names if name]
    known = [kind for kind in kinds if kind is not EventKind.OTHER_COLLECTIVE]
    return known[0] if known else EventKind.OTHER_COLLECTIVE


def _messages_around(
    trace: KinetoTrace, kernels: EventColumns, issues: Issues
) -> list[tuple[str | None, CollectiveMessage | None]]:
    """The operator that issued each kernel, and the message in the operator's arguments.

    `record_param_comms` has the most fields; the `c10d::` operator around it has the tensors.
    """
    around: list[tuple[str | None, CollectiveMessage | None]] = [(None, None)] * len(kernels)
    for category, prefixes in (
        (Category.ANNOTATION, _OPERATOR_PREFIXES),
        (Category.OPERATOR, _OPERATOR_PREFIXES),
        (Category.OPERATOR, (_PARAMETERS_OPERATOR,)),
    ):
        host, places = _named(trace, category, prefixes)
        found = HostRanges.of(host).innermost(issues.thread, issues.time_ns)
        for position in np.flatnonzero(found != NOWHERE).tolist():
            event = found[position]
            before, known = around[position]
            message = trace.messages[category].get(int(places[event]))
            name = trace.names[host.name[event]]
            around[position] = (
                before if name == _PARAMETERS_OPERATOR else name,
                _richer(message, known),
            )
    return around


def _richer(
    new: CollectiveMessage | None, known: CollectiveMessage | None
) -> CollectiveMessage | None:
    """The message with more information about its size; the new one if both have the same."""
    if new is None or (known is not None and _size_information(known) > _size_information(new)):
        return known
    return new


def _size_information(message: CollectiveMessage) -> int:
    """Rank of the information that a message has about its size."""
    if message.elements is not None:
        return 3
    return sum(count > 0 for count in message.input_elements[:2])


def find_gloo(trace: KinetoTrace, groups: GroupNames) -> Communications:
    """Find gloo's communication: each `c10d::` operator with the work that it started.

    The operator has the message and the thread. gloo's annotation, on a separate thread, has the
    times of the work. They share no id, but gloo works in the order of issue.
    """
    operators, places = _named(trace, Category.OPERATOR, ("c10d::",))
    order = np.argsort(operators.start_ns, kind="stable")
    operators, places = operators.where(order), places[order]
    works = _GlooWorks(trace)
    messages, kinds, ran, issued = [], [], [], []
    for position in range(len(operators)):
        kind = kind_of(trace.names[operators.name[position]])
        work = works.take(kind, int(operators.start_ns[position]))
        if work is None:
            continue
        own = trace.messages[Category.OPERATOR].get(int(places[position]), CollectiveMessage())
        has_size = message_bytes_of(own, kind) != NOTHING
        messages.append(own if has_size else works.message_of(work))
        kinds.append(kind)
        ran.append(work)
        issued.append(position)
    operators = operators.where(np.array(issued, dtype=np.int64))
    annotations = trace.events[Category.ANNOTATION].where(np.array(ran, dtype=np.int64))
    issues = Issues(operators.thread, operators.start_ns)
    return _ordered(kinds, messages, groups, issues, annotations.start_ns, annotations.end_ns)


def gloo_threads(trace: KinetoTrace) -> NDArray[np.int32]:
    """The threads on which gloo runs its work."""
    return np.unique(_named(trace, Category.ANNOTATION, (_GLOO,))[0].thread)


class _GlooWorks:
    """gloo's annotations; each is matched once, in order."""

    def __init__(self, trace: KinetoTrace) -> None:
        self._messages = trace.messages[Category.ANNOTATION]
        self._start_ns = trace.events[Category.ANNOTATION].start_ns
        self._waiting: dict[str, list[int]] = {}
        annotations, places = _named(trace, Category.ANNOTATION, (_GLOO,))
        for position in np.argsort(annotations.start_ns, kind="stable")[::-1].tolist():
            name = trace.names[annotations.name[position]]
            self._waiting.setdefault(name, []).append(int(places[position]))

    def take(self, kind: EventKind, issue_ns: int) -> int | None:
        """The next annotation of a kind that started after the issue; None without one."""
        waiting = self._waiting.get(_GLOO_NAMES.get(kind, ""), [])
        while waiting and self._start_ns[waiting[-1]] < issue_ns:
            waiting.pop()  # issued before the start of the trace
        return waiting.pop() if waiting else None

    def message_of(self, annotation: int) -> CollectiveMessage:
        """The message in its arguments, which list the input tensors of one rank."""
        return self._messages.get(annotation, CollectiveMessage())


def _ordered(
    kinds: list[EventKind],
    messages: list[CollectiveMessage],
    groups: GroupNames,
    issues: Issues,
    start_ns: Int64Array,
    end_ns: Int64Array,
) -> Communications:
    order = np.lexsort((start_ns, issues.time_ns))
    # Equal messages are one object (MessageReader), so each object is described once.
    pairs = list(zip(map(id, messages), kinds, strict=True))
    places = {pair: place for place, pair in enumerate(pairs)}
    facts = {pair: _describe(messages[at], kinds[at], groups) for pair, at in places.items()}
    described = [facts[pairs[at]] for at in order.tolist()]
    return Communications(
        kind=np.array(kinds, dtype=np.int8)[order],
        bytes=np.array([one.bytes for one in described], dtype=np.int64),
        dtype=np.array([one.dtype for one in described], dtype=np.int8),
        group=tuple(one.group for one in described),
        thread=issues.thread[order],
        issue_ns=issues.time_ns[order],
        start_ns=start_ns[order],
        end_ns=end_ns[order],
    )


@dataclass(frozen=True, slots=True)
class _Described:
    """A message in the codes of the run."""

    bytes: int
    dtype: int
    group: GroupKey | None


def _describe(message: CollectiveMessage, kind: EventKind, groups: GroupNames) -> _Described:
    key = groups.key_of(message)
    return _Described(
        bytes=message_bytes_of(_with_group_size(message, key), kind),
        dtype=dtype_code_of_name(message.dtype),
        group=key,
    )


def _with_group_size(message: CollectiveMessage, key: GroupKey | None) -> CollectiveMessage:
    if message.group_size is not None or key is None:
        return message
    return CollectiveMessage(
        collective=message.collective,
        elements=message.elements,
        sent_elements=message.sent_elements,
        dtype=message.dtype,
        group_size=key.size or None,
        input_elements=message.input_elements,
    )


def _named(
    trace: KinetoTrace, category: Category, prefixes: tuple[str, ...]
) -> tuple[EventColumns, Int64Array]:
    """The events of a category whose names have one of the prefixes, and their indices in it."""
    events = trace.events[category]
    places = np.flatnonzero(_by_name(trace, lambda name: name.startswith(prefixes))[events.name])
    return events.where(places), places


def _by_name(trace: KinetoTrace, test: Callable[[str], bool]) -> NDArray[np.bool_]:
    return np.fromiter(map(test, trace.names), dtype=bool, count=len(trace.names))


def _find_ids(ids: Int64Array, wanted: Int64Array) -> Int64Array:
    """The first index of each wanted id; -1 for missing and invalid ids."""
    if len(ids) == 0:
        return np.full(len(wanted), NOWHERE, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
    found = order[place]
    return np.where((wanted != NOTHING) & (ids[found] == wanted), found, NOWHERE)
