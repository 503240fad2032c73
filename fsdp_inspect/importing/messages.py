"""Convert a trace's names of collectives, dtypes and process groups to the codes of a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fsdp_inspect.importing.message_fields import NOTHING, CollectiveMessage
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventKind

_KINDS = (
    ("allgather", EventKind.ALL_GATHER),
    ("reducescatter", EventKind.REDUCE_SCATTER),
    ("allreduce", EventKind.ALL_REDUCE),
    ("alltoall", EventKind.ALL_TO_ALL),
    ("broadcast", EventKind.BROADCAST),
    ("barrier", EventKind.BARRIER),
    ("sendrecv", EventKind.POINT_TO_POINT),
    ("send", EventKind.POINT_TO_POINT),
    ("recv", EventKind.POINT_TO_POINT),
    ("crossdevicereduce", EventKind.ALL_REDUCE),
    ("epdispatch", EventKind.ALL_TO_ALL),
    ("epcombine", EventKind.ALL_TO_ALL),
    ("epinternode", EventKind.ALL_TO_ALL),
    ("epintranode", EventKind.ALL_TO_ALL),
    ("memcpyptop", EventKind.POINT_TO_POINT),
    ("memcpypeer", EventKind.POINT_TO_POINT),
    ("signal", EventKind.POINT_TO_POINT),
)
"""Text in the name of a collective (a kernel, an operator, its metadata). The first match counts,
because the name of a reduce-scatter kernel may also contain `sum`."""

_COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|rocshmem|\bhccl"
    # DeepEP, the expert parallelism of DeepSeek: `deep_ep::internode::dispatch`, `dpsk::ep::...`.
    r"|deep_?ep::|dpsk::ep::"
    # Kernels that reduce over peers' memory: vLLM, TensorRT-LLM, torch's symmetric memory.
    r"|cross_device_reduce|(?:one|two)_?shot_?all_?reduce|multimem_\w*(?:reduce|gather)"
    r"|symmetric_memory|symm_mem|custom_?all_?reduce",
    re.IGNORECASE,
)
"""Libraries and kernels that communicate; RCCL runs some of its collectives with MSCCL."""
_PEER_COPY = re.compile(r"Memcpy PtoP|Memcpy Peer", re.IGNORECASE)
"""Copies between devices: collectives on copy engines, and symmetric memory."""
_NOT_LETTERS = re.compile(r"[^a-z]")

_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    "byte": "uint8",
    "unsigned char": "uint8",
    "char": "int8",
    "signed char": "int8",
    "short": "int16",
    "short int": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "bool": "bool",
    "complexfloat": "complex64",
}
"""Dtype names in torch's traces (ScalarType names and C++ types), in lower case."""

_UNKNOWN_DTYPE = 0
_NO_DESCRIPTION = frozenset({"", "undefined", "default_pg"})


def is_communication_kernel(name: str) -> bool:
    """Whether this is the name of a communication kernel: `ncclDevKernel_...`, `mscclKernel_`."""
    return _COMMUNICATION_KERNEL.search(_without_arguments(name)) is not None


def _without_arguments(name: str) -> str:
    return name.replace("(anonymous namespace)::", "").partition("(")[0]


def is_peer_copy(name: str) -> bool:
    """Whether this is the name of a copy between devices: `Memcpy PtoP (Device -> Device)`."""
    return _PEER_COPY.match(name) is not None


@lru_cache(maxsize=4096)
def kind_of(name: str) -> EventKind:
    """The kind of collective of a name: `_allgather_base`, `ncclKernel_AllReduce_RING_LL`."""
    letters = _NOT_LETTERS.sub("", _without_arguments(name).lower())
    for part, kind in _KINDS:
        if part in letters:
            return kind
    return EventKind.OTHER_COLLECTIVE


@lru_cache(maxsize=256)
def dtype_code_of_name(name: str | None) -> int:
    """Index into `codes.DTYPES`; 0 if unknown."""
    plain = (name or "").lower().removeprefix("c10::")
    known = _DTYPES.get(plain, plain)
    return DTYPES.index(known) if known in DTYPES else _UNKNOWN_DTYPE


def message_bytes_of(message: CollectiveMessage, kind: EventKind) -> int:
    """Bytes of the full message; -1 if the trace does not contain its size.

    With metadata, the full message is the larger of input and output. Operators without metadata
    have only inputs, and the largest input is the message. An all-gather that lists only one rank's
    input counts it once for each rank of the group.
    """
    code = dtype_code_of_name(message.dtype)
    if code == _UNKNOWN_DTYPE:
        return NOTHING
    size = ITEMSIZE[DTYPES[code]]
    if message.elements is not None:
        return message.elements * size
    largest = max(message.input_elements, default=0)
    if largest == 0:
        return NOTHING
    if kind is EventKind.ALL_GATHER and len(message.input_elements) < 2:
        return largest * message.group_size * size if message.group_size else NOTHING
    return largest * size


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key by which process groups of different ranks are one group of the run.

    Each rank has its own shard group with its own name. These groups share their size and the name
    of the mesh dimension, if there is one.
    """

    name: str
    size: int


@dataclass
class GroupNames:
    """The process groups of one rank, by the name that its messages use."""

    described: dict[str, tuple[GroupKey, tuple[int, ...]]] = field(default_factory=dict)
    world_size: int = 0
    only: GroupKey | None = None
    """The only group of the process, if the trace lists exactly one group."""

    @classmethod
    def of(cls, distributed: Mapping[str, Any]) -> "GroupNames":
        """Read the groups of `distributedInfo`, where each field may be missing."""
        groups = cls()
        size = distributed.get("world_size")
        groups.world_size = size if isinstance(size, int) and 0 < size < 1 << 24 else 0
        listed = distributed.get("pg_config")
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and isinstance(one.get("pg_name"), (str, int)):
                groups._add_listed(one)
        if len(groups.described) == 1 and distributed.get("pg_count", 1) == 1:
            groups.only = next(iter(groups.described.values()))[0]
        return groups

    def key_of(self, message: CollectiveMessage) -> GroupKey | None:
        """The group that a message names; the only one of the process if it names none."""
        if message.group_name is None:
            return self.only
        known = self.described.get(message.group_name)
        if known is None:
            self._add(
                message.group_name,
                message.group_description or "",
                message.group_ranks or (),
                message.group_size or 0,
            )
            known = self.described[message.group_name]
        return known[0]

    def ranks_of(self, key: GroupKey) -> tuple[int, ...]:
        """The group's ranks; empty if the trace abbreviates the list."""
        return next((ranks for one, ranks in self.described.values() if one == key), ())

    def _add_listed(self, one: Mapping[str, Any]) -> None:
        ranks = one.get("ranks")
        sound = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
        size = one.get("pg_size")
        self._add(
            str(one["pg_name"]),
            str(one.get("pg_desc", "")),
            tuple(ranks) if isinstance(ranks, list) and sound else (),
            size if isinstance(size, int) else 0,
        )

    def _add(self, name: str, description: str, ranks: tuple[int, ...], size: int) -> None:
        size = len(ranks) or size
        if not ranks and size and size == self.world_size:
            ranks = tuple(range(size))
        plain = name if description in _NO_DESCRIPTION else description
        self.described[name] = (GroupKey(plain, size), ranks)
