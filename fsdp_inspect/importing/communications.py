"""Which of a trace's events communicate? On a device its kernels, on a CPU what gloo did.

A kernel is recognised by its metadata, then by the operator that it is linked to, and by its name
last: names change with every version of NCCL and RCCL, and some say nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kineto_events import Category, EventColumns, KinetoTrace
from fsdp_inspect.importing.message_fields import NOTHING, CollectiveMessage
from fsdp_inspect.importing.messages import (
    GroupKey,
    GroupNames,
    dtype_code_of_name,
    is_communication_kernel,
    kind_of,
    message_bytes_of,
)
from fsdp_inspect.trace.codes import EventKind

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
"""gloo's own name of what an operator starts: a reduce-scatter is an all-reduce there."""


@dataclass(frozen=True, slots=True)
class Issues:
    """Where and when the host issued device events; arrays of shape (n,)."""

    thread: NDArray[np.int32]
    """-1: unknown."""
    time_ns: Int64Array
    """The event's own start where unknown."""

    def where(self, chosen: NDArray[np.generic]) -> "Issues":
        """Those that a mask or an index array selects."""
        return Issues(self.thread[chosen], self.time_ns[chosen])


@dataclass(frozen=True, slots=True)
class Communications:
    """All communication of a rank; arrays of shape (n,), by issue."""

    kind: NDArray[np.int8]
    bytes: Int64Array
    """Of the full message; -1: unknown."""
    dtype: NDArray[np.int8]
    group: tuple[GroupKey | None, ...]
    thread: NDArray[np.int32]
    """Of the host, where it was issued; -1: unknown."""
    issue_ns: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array

    def __len__(self) -> int:
        return len(self.kind)


def find_issues(trace: KinetoTrace, events: EventColumns) -> Issues:
    """Where the host launched device events: by correlation, else by the operator linked to them.

    Args:
        trace: The whole trace.
        events: Kernels or copies of it.
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


def find_communication_kernels(trace: KinetoTrace) -> NDArray[np.bool_]:
    """Which kernels communicate. Shape (number of kernels,)."""
    kernels, operators = trace.events[Category.KERNEL], trace.events[Category.OPERATOR]
    found = _by_name(trace, is_communication_kernel)[kernels.name]
    found[list(trace.messages[Category.KERNEL])] = True
    parameters = operators.where(
        _by_name(trace, lambda name: name == _PARAMETERS_OPERATOR)[operators.name]
    )
    is_linked = _find_ids(parameters.external, kernels.external) != NOWHERE
    return np.asarray(found | is_linked, dtype=bool)


def describe_kernels(
    trace: KinetoTrace, chosen: Int64Array, issues: Issues, groups: GroupNames
) -> Communications:
    """What the chosen kernels communicate.

    Args:
        trace: The whole trace.
        chosen: Shape (n,): positions among the kernels.
        issues: Of the chosen kernels.
        groups: The rank's process groups; those that only messages name are added.
    """
    kernels = trace.events[Category.KERNEL].where(chosen)
    own, around = trace.messages[Category.KERNEL], _messages_around(trace, kernels, issues)
    messages, kinds = [], []
    for position, kernel in enumerate(chosen.tolist()):
        operator, beside = around[position]
        message = own.get(kernel) or beside or CollectiveMessage()
        name = trace.names[kernels.name[position]]
        kinds.append(_kind((message.collective, operator, name)))
        messages.append(message)
    return _ordered(kinds, messages, groups, issues, kernels.start_ns, kernels.end_ns)


@lru_cache(maxsize=4096)
def _kind(names: tuple[str | None, ...]) -> EventKind:
    """What the first name says that says anything."""
    kinds = [kind_of(name) for name in names if name]
    telling = [kind for kind in kinds if kind is not EventKind.OTHER_COLLECTIVE]
    return telling[0] if telling else EventKind.OTHER_COLLECTIVE


def _messages_around(
    trace: KinetoTrace, kernels: EventColumns, issues: Issues
) -> list[tuple[str | None, CollectiveMessage | None]]:
    """The operator in which each kernel was issued, and what its arguments say.

    `record_param_comms` tells most; the `c10d::` operator around it knows the tensors.
    """
    around: list[tuple[str | None, CollectiveMessage | None]] = [(None, None)] * len(kernels)
    for category, prefixes in (
        (Category.ANNOTATION, _OPERATOR_PREFIXES),
        (Category.OPERATOR, _OPERATOR_PREFIXES),
        (Category.OPERATOR, (_PARAMETERS_OPERATOR,)),
    ):
        host, places = _named(trace, category, prefixes)
        found = _ranges(host).innermost(issues.thread, issues.time_ns)
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
    """The one that tells the full message, in case of doubt the newer one."""
    if new is None or (known is not None and _tells(known) > _tells(new)):
        return known
    return new


def _tells(message: CollectiveMessage) -> int:
    """How much a message says about its size."""
    if message.elements is not None:
        return 3
    return sum(count > 0 for count in message.input_elements[:2])


def find_gloo(trace: KinetoTrace, groups: GroupNames) -> Communications:
    """What gloo communicated: each `c10d::` operator with the work that it started.

    The operator knows the message and the thread; gloo's own annotation, on a thread of its own,
    knows when it ran. They have no id in common, but gloo works in the order of issue.
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
    """The threads on which gloo works."""
    return np.unique(_named(trace, Category.ANNOTATION, (_GLOO,))[0].thread)


class _GlooWorks:
    """gloo's annotations, each given away once, in order."""

    def __init__(self, trace: KinetoTrace) -> None:
        self._messages = trace.messages[Category.ANNOTATION]
        self._start_ns = trace.events[Category.ANNOTATION].start_ns
        self._waiting: dict[str, list[int]] = {}
        annotations, places = _named(trace, Category.ANNOTATION, (_GLOO,))
        for position in np.argsort(annotations.start_ns, kind="stable")[::-1].tolist():
            name = trace.names[annotations.name[position]]
            self._waiting.setdefault(name, []).append(int(places[position]))

    def take(self, kind: EventKind, issue_ns: int) -> int | None:
        """The next annotation of a kind that began after its issue; None if there is none."""
        waiting = self._waiting.get(_GLOO_NAMES.get(kind, ""), [])
        while waiting and self._start_ns[waiting[-1]] < issue_ns:
            waiting.pop()  # issued before the trace began
        return waiting.pop() if waiting else None

    def message_of(self, annotation: int) -> CollectiveMessage:
        """What it says about its tensors: those that one rank gives."""
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
    # Equal messages are one object (MessageReader): each is looked at once, known by its identity.
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
    """What a message says, in the run's words."""

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
        dtype=message.dtype,
        group_size=key.size or None,
        input_elements=message.input_elements,
    )


def _named(
    trace: KinetoTrace, category: Category, prefixes: tuple[str, ...]
) -> tuple[EventColumns, Int64Array]:
    """The events of a category whose names begin so, and their positions in it."""
    events = trace.events[category]
    places = np.flatnonzero(_by_name(trace, lambda name: name.startswith(prefixes))[events.name])
    return events.where(places), places


def _by_name(trace: KinetoTrace, test: Callable[[str], bool]) -> NDArray[np.bool_]:
    return np.fromiter(map(test, trace.names), dtype=bool, count=len(trace.names))


def _ranges(events: EventColumns) -> HostRanges:
    return HostRanges(events.thread, events.start_ns, events.end_ns)


def _find_ids(ids: Int64Array, wanted: Int64Array) -> Int64Array:
    """The first position of each wanted id; -1 for those that are missing, or no id."""
    if len(ids) == 0:
        return np.full(len(wanted), NOWHERE, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
    found = order[place]
    return np.where((wanted != NOTHING) & (ids[found] == wanted), found, NOWHERE)
