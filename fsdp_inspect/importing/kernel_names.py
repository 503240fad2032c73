"""Recognise communication by the names of kernels, copies and operators of many libraries.

Names are the last evidence, after metadata and operators. A kernel communicates if its own name has
the name of a library that only communicates, or the name of a collective. Template arguments and
function arguments do not count: a matrix product may take a communicator. A kernel that multiplies
matrices or computes attention counts as compute, also if it communicates meanwhile.
"""

import re
from functools import lru_cache

from fsdp_inspect.trace.codes import EventKind

_LIBRARIES = re.compile(
    # NCCL and its relatives: RCCL (AMD), MSCCL, MSCCL++, oneCCL and xCCL (Intel), HCCL (Habana,
    # Ascend), MCCL, ECCL; CNCL (Cambricon), BKCL (Kunlun), hcom (Ascend).
    r"(?<![a-z])(?:[a-z]{0,6}ccl(?!u)|cncl|bkcl|hcom)"
    r"|(?:nv|roc|i)shmem|nixl"
    # DeepEP and its variants: `deep_ep::internode::dispatch`, `dpsk::ep::...`, `hybrid_ep::...`.
    r"|deep_?ep::(?!layout)|dpsk::ep::|hybrid_ep::(?:dispatch|combine|device_sync|update)"
    # AMD MORI: `mori::moe::EpDispatchIntraNodeKernel`, also without its namespace; its shmem, io.
    r"|(?<![a-z])mori(?:::|_)(?!\w*layout)|(?<![a-z])ep_?(?:dispatch|combine)_?(?:intra|inter|copy|ll|low)"
    # torch's symmetric memory; userbuffers of TransformerEngine; QuickReduce of ROCm.
    r"|symmetric_memory|symm_mem|multimem_|userbuffers|quick_?reduce",
    re.IGNORECASE,
)
"""Libraries whose kernels only communicate."""
_COLLECTIVES = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a_?(?:dispatch|combine)"
    r"|cross_?device_?reduce",
    re.IGNORECASE,
)
_IN_THREADS = re.compile(
    r"(?:warp|block|thread|cta|wave|subgroup)_?(?:all_?reduce|all_?gather)", re.IGNORECASE
)
"""Reductions among the threads of one device: `blockAllReduce`."""
_COMPUTE = re.compile(
    # Kernels that torch.compile generates have the names of all operators around them.
    r"^triton_(?:poi|per|red|tem|for|split_scan|mm|bmm|convolution)_"
    r"|gemm|matmul|attention|attn|fmha",
    re.IGNORECASE,
)
_PEER_COPY = re.compile(r"\b(?:PtoP|P2P|Peer)\b")
"""Copies between devices: collectives on copy engines, and symmetric memory."""

_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"userbuffers\w*gpu(?:rw|mc)ag", EventKind.ALL_GATHER),
        (r"userbuffers\w*gpu(?:rr|mc)rs", EventKind.REDUCE_SCATTER),
        (r"userbuffers\w*suminplace", EventKind.ALL_REDUCE),
        (r"allgather", EventKind.ALL_GATHER),
        (r"reducescatter", EventKind.REDUCE_SCATTER),
        (r"allreduce|crossdevicereduce|quickreduce", EventKind.ALL_REDUCE),
        (r"alltoall|a2a(?:dispatch|combine)", EventKind.ALL_TO_ALL),
        (r"broadcast", EventKind.BROADCAST),
        (r"ep(?:dispatch|combine|internode|intranode)", EventKind.ALL_TO_ALL),
        (r"barrier|devicesync", EventKind.BARRIER),
        (r"send|recv|memcpy(?:ptop|p2p|peer)|signal", EventKind.POINT_TO_POINT),
    )
)
"""Patterns of plain names of collectives (a kernel, an operator, its metadata). The first match
counts, because the name of a reduce-scatter kernel may also contain `sum`."""
_NOT_PLAIN = re.compile(r"[^a-z0-9]")
_MANGLED = re.compile(r"_ZN?K?")
_IDENTIFIER = re.compile(r"L?(\d+)")


@lru_cache(maxsize=4096)
def is_communication_kernel(name: str) -> bool:
    """Whether this is the name of a communication kernel: `ncclDevKernel_...`, `allreduce7`."""
    own = _own_name(name)
    if _COMPUTE.search(own) is not None:
        return False
    if _LIBRARIES.search(own) is not None:
        return True
    return _COLLECTIVES.search(_IN_THREADS.sub("", own)) is not None


def is_peer_copy(name: str) -> bool:
    """Whether this is the name of a copy between devices: `Memcpy PtoP (Device -> Device)`."""
    return "memcpy" in name.lower() and _PEER_COPY.search(name) is not None


@lru_cache(maxsize=4096)
def kind_of(name: str) -> EventKind:
    """The kind of collective of a name: `_allgather_base`, `ncclKernel_AllReduce_RING_LL`."""
    plain = _NOT_PLAIN.sub("", _own_name(name).lower())
    for pattern, kind in _KINDS:
        if pattern.search(plain) is not None:
            return kind
    return EventKind.OTHER_COLLECTIVE


def _own_name(name: str) -> str:
    """The qualified name of a function, without its return type and all arguments."""
    if name.startswith("_Z"):
        return _demangled(name)
    for unnamed in ("(anonymous namespace)::", "<unnamed>::"):
        name = name.replace(unnamed, "")
    plain = name.partition("(")[0]
    return plain.partition("<")[0].removeprefix("void ").strip()


def _demangled(name: str) -> str:
    """The qualified name in a mangled one: `deep_ep::dispatch` in `_ZN7deep_ep8dispatchE...`."""
    start = _MANGLED.match(name)
    place, parts = start.end() if start else 0, []
    while (length := _IDENTIFIER.match(name, place)) is not None:
        place = length.end() + int(length[1])
        parts.append(name[length.end() : place])
    return "::".join(part for part in parts if part != "_GLOBAL__N_1") or name
