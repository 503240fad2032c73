"""Compile regions on fake tensors, so that they save for backward what torch's compiler saves.

[Note: compiled regions]
`torch.compile` traces a region and partitions the graph of its forward and backward. The partition
decides which tensors are saved for backward. It is the same for the backend `inductor` and for
`aot_eager_decomp_partition`, which runs the two graphs without generating code. The latter works on
fake tensors. `tests/emulation/forecast/test_compiled_regions.py` compares the saved bytes by torch
version.

Inside a region each operator allocates its result. The generated code of `inductor` fuses operators
and has fewer buffers, so the memory inside a region is counted too high.
"""

import warnings
from contextlib import ExitStack

import torch

from fsdp_inspect.error_text import causes_of
from fsdp_inspect.recording.torch_api.autograd import (
    compiler_error,
    forget_compiled_code,
    list_own_functions,
)

_BACKEND = "aot_eager_decomp_partition"
COMPILED = (
    "Compiled regions save for backward what torch's compiler saves. Inside a region, buffers are "
    "counted without the compiler's fusion, so memory is counted too high there."
)
NOT_COMPILED = (
    "torch.compile failed on fake tensors ({}). Its regions run as eager code here: tensors that "
    "the compiler would fuse away, or recompute in backward, are counted."
)


def compile_without_fusion(undo: ExitStack) -> None:
    """Compile regions without generating code, until `undo` is closed.

    Compiled code of this process is forgotten before and after: it is counted towards torch's limit
    of compilations, and the sizes of an earlier forecast would become symbols.
    """
    forget_compiled_code()
    list_own_functions()
    undo.callback(forget_compiled_code)
    undo.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", module=r"torch\.")  # such as graph breaks at our hooks
    undo.enter_context(torch.compiler.set_stance("default", force_backend=_BACKEND))


def find_compiler_error(error: BaseException) -> BaseException | None:
    """The error of torch's compiler in a chain of causes; None: there is none."""
    of_compiler = compiler_error()
    return next((each for each in causes_of(error) if isinstance(each, of_compiler)), None)
