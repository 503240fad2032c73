"""Recognise communication and kinds of compute by names: of kernels, copies and operators.

Names are the last evidence, after metadata and operators. A kernel communicates if its own name has
the name of a library that only communicates, or the name of a collective. Template arguments and
function arguments do not count: a matrix product may take a communicator. A kernel that multiplies
matrices or computes attention counts as compute, also if it communicates meanwhile.
"""

import re
import sys
from functools import lru_cache

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.kernels import KernelKind

_LIBRARIES = re.compile(
    # NCCL and its relatives: RCCL (AMD), MSCCL, MSCCL++, oneCCL and xCCL (Intel), HCCL (Habana,
    # Ascend), MCCL, ECCL; CNCL (Cambricon), BKCL (Kunlun), hcom (Ascend).
    r"(?<![a-z])(?:(?!rocclr)[a-z]{0,6}ccl(?!u)|cncl|bkcl|hcom)"
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
_COMPUTE_KINDS = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (
            r"multi_tensor_apply|fused_?(?:adam|sgd|lamb|adagrad)|aten::_(?:foreach|fused)_",
            KernelKind.OPTIMIZER,
        ),
        (
            r"flash_(?:attn|fwd|bwd)|fmha|attention|attn|cutlass\w*_?(?:fwd|bwd)_kernel_sm",
            KernelKind.ATTENTION,
        ),
        (
            r"gemm|gemv|splitk|matmul|cublas|cutlass|nvjet|^triton_(?:tem|mm|bmm)_|convolution"
            r"|wgrad|dgrad|implicit_con|xmma|winograd|Cijk_|::(?:_?addmm|mm|bmm|baddbmm|mv|addmv"
            r"|linear|mkldnn_linear|_scaled_mm|_grouped_mm|dot)(?![a-z])",
            KernelKind.MATRIX_PRODUCT,
        ),
        (
            r"(?:layer|rms|batch|group|instance)_?norm|GammaBeta|bn_fw|bn_bw",
            KernelKind.NORMALISATION,
        ),
        (
            r"direct_copy|CatArrayBatchedCopy|(?:split_with_sizes|chunk_cat|batch)\w*(?:copy|cat)"
            r"|chunk_cat|memcpy|memset|rocclr_(?:copy|fill)|fsdp::|::(?:copy_|cat|clone|_to_copy|contiguous|fill_|zero_"
            r"|stack|split_with_sizes_copy|index_select)(?![a-z])|copy_kernel|transpose",
            KernelKind.COPY,
        ),
        (
            r"elementwise|pointwise|^triton_(?:poi|per|red)_|reduce_kernel|softmax|dropout|nll_loss"
            r"|cross_?entropy|embedding|index|gather|scatter|sort|topk|scan|cumsum|distribution|arange"
            r"|::(?:add|sub|mul|div|pow|exp|log|sqrt|rsqrt|neg|abs|gelu|silu|relu|tanh|sigmoid|where"
            r"|sum|mean|std|var|max|min|amax|amin|argmax|argmin|lerp|addcmul|addcdiv|clamp|threshold"
            r"|masked|eq|ne|lt|gt|le|ge|bitwise|logical|normal|uniform|bernoulli|cos|sin|square"
            r"|norm|linalg|log_softmax|mse_loss|nonzero|item|_local_scalar|tril|triu|rsub"
            r"|reciprocal|isfinite|isnan|isinf|sign|glu|hardtanh|elu|leaky|erf|floor|round|ceil)",
            KernelKind.ELEMENTWISE,
        ),
    )
)
"""Patterns of whole names, with template arguments; the first match counts. Reductions, losses and
indexing count as elementwise, because memory bandwidth limits them too."""
_USER_LINE = re.compile(r"([^<>]+\.py)\((\d+)\): ")
_INSTALLED = ("site-packages/", "dist-packages/", "lib/python")
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


@lru_cache(maxsize=4096)
def compute_kind_of(name: str) -> KernelKind:
    """The kind of compute of a kernel or operator; OTHER: the name shows none."""
    return next(
        (kind for pattern, kind in _COMPUTE_KINDS if pattern.search(name)), KernelKind.OTHER
    )


@lru_cache(maxsize=1 << 16)
def user_line(name: str) -> str:
    """The line of a Python function of a trace, `file:line`; empty: of a library."""
    found = _USER_LINE.match(name)
    if found is None:
        return ""
    file = found[1].replace("\\", "/")
    top = file.removeprefix("./").partition("/")[0].removesuffix(".py")
    is_library = any(part in file for part in _INSTALLED)
    if is_library or top in ("torch", "fsdp_inspect") or top in sys.stdlib_module_names:
        return ""
    return f"{file}:{found[2]}"


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
