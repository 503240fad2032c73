"""Only `recording/torch_api` names private objects of torch and DeepSpeed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fsdp_inspect", "instrumented_trainer")
HOME = ROOT / "fsdp_inspect/recording/torch_api"
LIBRARIES = ("torch", "deepspeed")
READERS = ("attrgetter", "delattr", "getattr", "hasattr", "set_attribute", "setattr")
"""Functions that take the name of an attribute as text."""
OTHERS = ("argparse", "mlflow", "os", "runpy", "sys", "threading")
"""Modules whose private names have nothing to do with torch."""
OPERATORS = ("torch.ops.", "_aten.")
"""Operators of the dispatcher have private names in their public schemas."""
ALLOWED = {
    "_exit",  # a function of os
    "_attn_implementation",  # a configuration of Transformers
    "ShardingStrategy._HYBRID_SHARD_ZERO2",  # the value of a public argument
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",  # code for users to paste
}


NAMING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.Call),
    *(ast.Import, ast.ImportFrom, ast.Constant),
)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def nodes_of(code: str) -> list[ast.AST]:
    """The nodes of the kinds that name something."""
    return [each for each in ast.walk(ast.parse(code)) if isinstance(each, NAMING)]


def own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that the code of this project defines."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def private_names(nodes: Iterable[ast.AST], own: set[str]) -> Iterator[tuple[int, str]]:
    """The private names of torch in a file, with their lines."""
    for node in nodes:
        for name in (*named_modules(node), *named_attributes(node, own)):
            yield getattr(node, "lineno", 0), name


def named_modules(node: ast.AST) -> Iterator[str]:
    """Private modules of torch, and private objects of its modules, that a node names."""
    match node:
        case ast.ImportFrom(module=str(module), names=aliases):
            names = [f"{module}.{alias.name}" for alias in aliases]
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.Constant(value=str(text)) if "." in text and not set(text) & set(" \n"):
            names = [text]
        case _:
            names = []
    yield from (each for each in names if each.split(".")[0] in LIBRARIES and is_private(each))


def named_attributes(node: ast.AST, own: set[str]) -> Iterator[str]:
    """Private attributes that a node names, and that this project does not define."""
    match node:
        case ast.Attribute(attr=attribute) if is_private(attribute):
            whole = ast.unparse(node)
            is_other = whole.startswith(OPERATORS) or whole.split(".")[0] in OTHERS
            is_own = attribute in own and not whole.startswith("torch.")
            if not is_other and not is_own:
                yield whole
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=arguments):
            if function in READERS:
                texts = [each.value for each in arguments if isinstance(each, ast.Constant)]
                names = [each for each in texts if isinstance(each, str)]
                yield from (each for each in names if is_private(each) and each not in own)


def test_only_torch_api_names_private_objects_of_torch() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    nodes = {path: nodes_of(path.read_text()) for path in files if HOME not in path.parents}
    own = own_names(chain(*nodes.values()))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, of_file in nodes.items()
        for line, name in private_names(of_file, own)
        if name not in ALLOWED and "_fsdp_inspect" not in name
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from torch._guards import active_fake_mode",
        "from torch.distributed.fsdp import _fully_shard",
        "import torch.utils._pytree",
        "torch._C.f()",
        "group._training_state",
        "getattr(handle, '_ran_pre_backward_hook', False)",
        "module = sys.modules['torch._dynamo.utils']",
        "from deepspeed.runtime.zero._parameters import Group",
    ],
)
def test_the_check_sees(code: str) -> None:
    assert list(private_names(nodes_of(code), own=set()))


@pytest.mark.parametrize(
    "code", ["sys._getframe(1)", "torch.ops.aten._to_copy.default", "self._own", "x.__dict__"]
)
def test_the_check_allows(code: str) -> None:
    assert not list(private_names(nodes_of(code), own={"_own"}))
