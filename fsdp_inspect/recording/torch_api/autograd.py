"""Ask torch's autograd engine and activation checkpointing."""

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.jit
import torch.nn.utils.clip_grad
import torch.utils.checkpoint
from torch.utils.data import DistributedSampler, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.recording.torch_api.attributes import set_attribute

__all__ = ["LoaderIterator"]

RECOMPUTATION_HOOK = "_recomputation_hook"
"""The class of `torch.utils.checkpoint` in which non-reentrant checkpoints repeat a forward."""

CLIPS = (
    (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
)
"""The functions that clip gradients, by their module: `clip_grad_norm_` calls the first one."""

_NUM_ARGUMENTS = 6
"""Those that torch 2.13 gives: input, target, weight, reduction, ignored, smoothing."""

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; -1: none."""


is_profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch runs on this thread."""


def loss_scale(scaler: torch.amp.GradScaler) -> float:
    """The number by which a scaler multiplies the loss.

    The number on a device is not read, because the host would wait: the first one counts.
    """
    if not scaler.is_enabled():
        return 1.0
    scale = scaler._scale
    if scale is not None and scale.device.type == "cpu":
        return float(scale)
    return float(scaler._init_scale)


def is_shuffled(iterator: Any) -> bool:
    """Whether the sampler of a loader's iterator shuffles."""
    sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, RandomSampler)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each change of a tensor in place."""
    return tensor._version


def versions_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers of which one grows with each change of a tensor in place.

    An operator on a DTensor changes the number of the DTensor only. `tensor.data` has its own.
    """
    return tensor._version, local_part(tensor)._version


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def recomputation_hook() -> Any:
    """The class `RECOMPUTATION_HOOK`; None if torch has none."""
    return getattr(torch.utils.checkpoint, RECOMPUTATION_HOOK, None)


def in_transform() -> bool:
    """Whether a transform of torch.func runs, such as vmap, whose tensors have no values."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def wrap_cross_entropy(
    see: Callable[[torch.Tensor, int, torch.Tensor, bool], None],
) -> Callable[[], None]:
    """Call `see` with the labels, the ignored label and the result of each cross entropy.

    Its last argument is whether the result is a sum, and not a mean.

    The operator below `torch.nn.functional.cross_entropy` is replaced, so that the public function
    stays picklable. TorchScript finds the replacement in its table of operators.

    Returns:
        A function that restores the operator.
    """
    operators: Any = torch._C._nn
    original = getattr(operators, "cross_entropy_loss", None)
    if original is None:
        return lambda: None
    is_sum = {torch.nn._reduction.get_enum(name): name == "sum" for name in ("mean", "sum")}

    def cross_entropy_loss(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        is_plain = len(args) == _NUM_ARGUMENTS and not options and not torch.compiler.is_compiling()
        if is_plain and not in_transform() and args[2] is None and args[3] in is_sum:
            see(args[1], args[4], result, is_sum[args[3]])
        return result

    table: Any = getattr(torch.jit._builtins, "_get_builtin_table", dict)()
    if id(original) in table:
        table[id(cross_entropy_loss)] = table[id(original)]
    restore = set_attribute(operators, "cross_entropy_loss", cross_entropy_loss)

    def undo() -> None:
        restore()
        table.pop(id(cross_entropy_loss), None)

    return undo


# --- Ask torch.compile what it has done in this process, and prepare it for fake tensors.

COMPILER = "torch._dynamo.eval_frame"
"""The module that chooses the code to compile."""
COMPILE_CALLBACKS = "torch._dynamo.callback"
"""The module that calls back around each compilation."""


def keep_from_compiler(package: str) -> None:
    """Let torch.compile run the loaded functions of a package as they are.

    Some of them run between two parts of a compiled function, where it would compile them, too. It
    still traces through those that it meets inside such a part.
    """
    skip = getattr(sys.modules[COMPILER], "skip_code", None)
    if skip is None:  # another version of torch
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for each in list(vars(module).values()):
                for code in _codes_of(each, name):
                    skip(code)


def keep_untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile not trace through a function; it may compile what the function calls."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _codes_of(value: object, module: str) -> Iterator[CodeType]:
    """The code of a function or of the methods of a class, and of the functions inside."""
    if getattr(value, "__module__", None) != module:
        return
    members = vars(value).values() if isinstance(value, type) else (value,)
    functions = (getattr(each, "__func__", getattr(each, "fget", each)) for each in members)
    codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
    while codes:
        code = codes.pop()
        yield code
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]


def uses_compile() -> bool:
    """Whether torch.compile has compiled a frame in this process.

    Functional collectives in a compiled frame are not seen, and a rank whose frame is not compiled
    issues them visibly. The order check leaves them out, so that such ranks do not seem to differ.
    """
    return num_compiled_graphs() > 0 or _count("frames", "total") > 0


def num_compiled_graphs() -> int:
    """The number of graphs that torch.compile has made in this process."""
    return _count("stats", "unique_graphs")


def _count(group: str, name: str) -> int:
    """A counter of the compiler. With `fullgraph=True`, torch 2.13 does not count frames."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters[group][name])


def forget_compiled_code() -> None:
    """Forget the compiled code of this process."""
    torch._dynamo.reset()


def list_own_functions() -> None:
    """Make torch list its own functions, which it does once.

    The list must not contain replacements for a forecast.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


def compiler_error() -> type[BaseException]:
    """The base class of the errors of torch's compiler."""
    return torch._dynamo.exc.TorchDynamoException
