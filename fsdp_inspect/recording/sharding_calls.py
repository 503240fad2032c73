"""Record which line of code calls `fully_shard`, and read the source lines around these calls.

[Note: Noting the calls]
Every `fully_shard` call initializes one `FSDPState`. `note_sharding_calls` wraps that method once
in each process. It therefore sees all calls of the script and of frameworks. The launcher installs
it when the script imports FSDP, and importing `fsdp_inspect.Recorder` installs it too. A note costs
about 30 µs for each call. A model that was sharded earlier has no notes, so its lines are unknown.
The wrap stays until the process ends, because further models may be sharded at any time.

Source lines are read when the recorder attaches, on rank 0 only.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from fsdp_inspect.recording.code_places import FRAMEWORKS, package_of, read_variables
from fsdp_inspect.recording.environment import mask_secrets
from fsdp_inspect.recording.process_life import begin_sharding, end_sharding
from fsdp_inspect.trace.run import ShardingCall, SourceLines, UserStatement

if TYPE_CHECKING:
    from torch import nn

    from fsdp_inspect.recording.torch_api.fsdp2 import FSDPState


_FUNCTIONS = ("fully_shard", "replicate")
_CONTEXT_LINES = 3
_MOST_LINES = 200
"""The highest number of recorded source lines of a run."""


@dataclass(slots=True)
class _Place:
    """A line of code that called."""

    function: str
    file: str
    line: int
    package: str
    outer_packages: tuple[str, ...]
    user: tuple[str, int, str] | None
    """File and line of the user's code that led to a call of a package, and its variable."""
    settings: dict[str, Any] = field(default_factory=dict)


_places: WeakKeyDictionary[FSDPState, _Place] = WeakKeyDictionary()


def note_sharding_calls() -> None:
    """Note the lines that call `fully_shard`; does nothing at a second call."""
    from fsdp_inspect.recording.torch_api.fsdp2 import FSDPParamGroup, FSDPState

    original = FSDPState.init
    if getattr(original, "notes_calls", False):
        return

    def init(state: FSDPState, modules: Any, *args: Any, **kwargs: Any) -> None:
        begin_sharding()
        original(state, modules, *args, **kwargs)
        try:
            place = _find_place(sys._getframe(1), modules)
            if place is not None:
                _places[state] = place
        except Exception:  # the line stays unknown
            return

    init.notes_calls = True  # type: ignore[attr-defined]
    FSDPState.init = init  # type: ignore[assignment, method-assign]
    make_group = FSDPParamGroup.__init__

    @functools.wraps(make_group)
    def shard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        make_group(group, *args, **kwargs)  # shards the parameters
        end_sharding()

    FSDPParamGroup.__init__ = shard  # type: ignore[assignment, method-assign]


@dataclass(frozen=True, slots=True)
class NotedCalls:
    """The calls that sharded a model, with the user's source lines around them."""

    calls: list[ShardingCall]
    sources: list[SourceLines]
    frameworks: list[str]
    settings: dict[str, Any]


def read_noted_calls(model: nn.Module, *, with_source: bool = True) -> NotedCalls:
    """Read the calls that sharded a model; no calls if any of its units was not noted.

    Args:
        model: The recorded model.
        with_source: Whether to read source lines.
    """
    from fsdp_inspect.recording.torch_api.fsdp2 import find_states

    units: dict[tuple[str, int], list[str]] = {}
    places: dict[tuple[str, int], _Place] = {}
    noted = [(handle, _places.get(handle.state)) for handle in find_states(model)]
    if any(place is None for _, place in noted):
        return NotedCalls([], [], [], {})
    order = {id(state): at for at, state in enumerate(_places.keys())}
    for handle, place in sorted(noted, key=lambda pair: order[id(pair[0].state)]):
        assert place is not None
        key = (place.file, place.line)
        units.setdefault(key, []).append(handle.name)
        places.setdefault(key, place)
    calls = [_describe(place, units[key]) for key, place in places.items()]
    calls = _read_statements(calls) if with_source else calls
    around = [each for place in places.values() for each in (place.package, *place.outer_packages)]
    return NotedCalls(
        [_relative(call) for call in calls],
        _source_lines(calls) if with_source else [],
        [each for each in dict.fromkeys(around) if each],
        next((each.settings for each in places.values() if each.settings), {}),
    )


# --- at the call


def _find_place(frame: FrameType | None, modules: Sequence[Any]) -> _Place | None:
    """The innermost frame outside torch; for a frame of a package, also the user's frame."""
    function, caller, packages = "fully_shard", None, []
    settings: dict[str, Any] = {}
    while frame is not None:
        package = package_of(frame)
        name = frame.f_code.co_name
        if package == "torch" and name in _FUNCTIONS and caller is None:
            function = name
        elif package == "fsdp_inspect" and caller is None:
            function = "apply_plan"
        elif package is not None and package != "torch":
            if caller is None:
                caller, where = frame, package
            elif package:
                packages.append(package)
            settings = settings or _settings_of(frame, package)
            if not package:
                break
        frame = frame.f_back
    if caller is None:
        return None
    user = None
    if where and frame is not None:
        user = (frame.f_code.co_filename, frame.f_lineno, _variable_of(frame, modules[0]))
    outer = tuple(packages) or _packages_around(caller)
    return _Place(
        function, caller.f_code.co_filename, caller.f_lineno, where, outer, user, settings
    )


def _packages_around(frame: FrameType | None) -> tuple[str, ...]:
    """The frameworks that called the user's code, innermost first."""
    found = []
    while frame is not None:
        package = package_of(frame)
        if package in FRAMEWORKS and package not in found:
            found.append(package)
        frame = frame.f_back
    return tuple(found)


def _variable_of(frame: FrameType, module: Any) -> str:
    return read_variables(
        frame, lambda found: next((name for name, each in found.items() if each is module), "")
    )


def _settings_of(frame: FrameType, package: str) -> dict[str, Any]:
    """The settings of a framework that are visible in one of its frames."""
    if package == "accelerate":
        owner = read_variables(frame, lambda found: found.get("self"))
        plugin = getattr(getattr(owner, "state", None), "fsdp_plugin", None)
        return {} if plugin is None else _accelerate_settings(plugin)
    return {}


def _accelerate_settings(plugin: Any) -> dict[str, Any]:
    names = ("fsdp_version", "reshard_after_forward", "activation_checkpointing", "min_num_params")
    found = {name: getattr(plugin, name, None) for name in names}
    classes = getattr(plugin, "transformer_cls_names_to_wrap", None)
    found["transformer_cls_names_to_wrap"] = None if classes is None else list(classes)
    return {
        name: value
        for name, value in found.items()
        if value is not None and isinstance(value, (bool, int, str, list))
    }


# --- when the recorder attaches


def _describe(place: _Place, units: list[str]) -> ShardingCall:
    user = None
    if place.user is not None:
        file, line, variable = place.user
        user = UserStatement(file=file, line=line, end_line=line, model=variable)
    return ShardingCall(
        function=place.function,
        file=place.file,
        line=place.line,
        units=units,
        package=place.package,
        user=user,
    )


def _read_statements(calls: Sequence[ShardingCall]) -> list[ShardingCall]:
    """Add the data that the source shows about each statement."""
    own: dict[str, list[ShardingCall]] = {}
    for call in calls:
        if not call.package:
            own.setdefault(call.file, []).append(call)
    read = {
        (each.file, each.line): each
        for file, group in own.items()
        for each in read_calls(_text_of(file), group)
    }
    found = [read.get((call.file, call.line), call) for call in calls]
    return [
        call
        if call.user is None
        else call.model_copy(
            update={"user": read_user_statement(_text_of(call.user.file), call.user)}
        )
        for call in found
    ]


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _source_lines(calls: Sequence[ShardingCall]) -> list[SourceLines]:
    """The lines around the statements of the user's code, with secrets masked."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for call in calls:
        if not call.package:
            first, last = call.removed_from or call.line, call.removed_to or call.line
            spans.setdefault(call.file, []).append((first, max(last, call.end_line)))
        elif call.user is not None:
            user = call.user
            spans.setdefault(user.file, []).append((user.line, user.end_line))
            if user.made_at:
                spans[user.file].append((user.made_at, user.made_at))
    found, left = [], _MOST_LINES
    for file, known in spans.items():
        lines = _text_of(file).splitlines()
        for first, last in _merge(known, len(lines)):
            taken = lines[first - 1 : last][:left]
            left -= len(taken)
            if taken:
                masked = [mask_secrets(line) for line in taken]
                found.append(SourceLines(file=_shown(file), first_line=first, lines=masked))
    return found


def _merge(spans: Sequence[tuple[int, int]], num_lines: int) -> Iterator[tuple[int, int]]:
    """The spans with the lines around them; overlapping spans are joined."""
    merged: list[list[int]] = []
    for first, last in sorted(spans):
        low, high = max(first - _CONTEXT_LINES, 1), min(last + _CONTEXT_LINES, num_lines)
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return ((first, last) for first, last in merged)


def _relative(call: ShardingCall) -> ShardingCall:
    user = call.user
    if user is not None:
        user = user.model_copy(update={"file": _shown(user.file)})
    return call.model_copy(update={"file": _shown(call.file, call.package), "user": user})


_START = Path.cwd()
"""The working directory before the script can change it."""


def _shown(file: str, package: str = "") -> str:
    """A path relative to the package or to the working directory, if it is below it."""
    path = Path(os.path.normpath(Path(file).absolute()))  # links are not resolved
    if package and package in path.parts:
        return Path(*path.parts[path.parts.index(package) :]).as_posix()
    return path.relative_to(_START).as_posix() if path.is_relative_to(_START) else str(path)


# --- Read the statements of a source file that call `fully_shard`, and the lines to remove.

_BLOCKS = ("body", "orelse", "finalbody")
_CLAUSES = ("handlers", "cases")
"""Fields of a statement that are not statements but contain statements."""


class _StatementPlace(NamedTuple):
    """A statement with its position in the tree."""

    statement: ast.stmt
    block: list[ast.stmt]
    """The list of statements that contains it."""
    owner: ast.AST
    """The node that owns the list."""


_Parents: TypeAlias = dict[int, _StatementPlace]
"""The place of each statement, by the statement's `id`."""


def read_calls(text: str, calls: Sequence[ShardingCall]) -> list[ShardingCall]:
    """Add arguments and lines to calls in one file; calls that cannot be read stay unchanged.

    Args:
        text: The source of the file.
        calls: The calls in this file.
    """
    tree = _parse(text)
    if tree is None:
        return list(calls)
    parents = _blocks(tree)
    found = {call.line: _statement_of(parents, call) for call in calls}
    sharding = {id(statement) for statement in found.values() if statement is not None}
    lines = text.split("\n")
    return [_read(call, found[call.line], sharding, parents, lines) for call in calls]


def read_user_statement(text: str, user: UserStatement) -> UserStatement:
    """Add the lines and variables of the statement around a line of the user's code.

    Args:
        text: The source of the file.
        user: The line, and the variable that holds the model.
    """
    tree = _parse(text)
    if tree is None:
        return user
    parents = _blocks(tree)
    statement = _statement_at(parents, user.line)
    if statement is None or not isinstance(statement, ast.Assign | ast.Expr):
        return user
    block = parents[id(statement)].block
    made = [
        each.end_lineno or 0
        for each in block[: block.index(statement)]
        if isinstance(each, ast.Assign) and user.model in map(ast.unparse, each.targets)
    ]
    return user.model_copy(
        update={
            "line": statement.lineno,
            "end_line": statement.end_lineno or statement.lineno,
            "model_after": _assigned(statement, user.model),
            "made_at": made[-1] if made else 0,
        }
    )


def _assigned(statement: ast.stmt, model: str) -> str:
    """The target of the model in an assignment: `model, optimizer = prepare(model, optimizer)`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return ""
    target, arguments = statement.targets[0], statement.value.args
    places = [at for at, each in enumerate(arguments) if ast.unparse(each) == model]
    if not places:
        return ""
    if isinstance(target, ast.Tuple) and len(target.elts) == len(arguments):
        return ast.unparse(target.elts[places[0]])
    return ast.unparse(target) if len(arguments) == 1 else ""


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def _statement_of(parents: _Parents, call: ShardingCall) -> ast.stmt | None:
    """The statement at a line, if it is `f(x)` or `x = f(x)` alone."""
    statement = _statement_at(parents, call.line)
    if isinstance(statement, ast.Expr) and _is_call(statement.value, call.function):
        return statement
    if not isinstance(statement, ast.Assign) or not _is_call(statement.value, call.function):
        return None
    assert isinstance(statement.value, ast.Call)
    argument = ast.unparse(statement.value.args[0])
    return statement if [ast.unparse(each) for each in statement.targets] == [argument] else None


def _is_call(node: ast.expr, function: str) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    return ast.unparse(node.func).rpartition(".")[2] == function


def _statement_at(parents: _Parents, line: int) -> ast.stmt | None:
    """The innermost statement that contains a line."""
    around = [
        place.statement
        for place in parents.values()
        if place.statement.lineno <= line <= (place.statement.end_lineno or 0)
    ]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)


def _blocks(tree: ast.Module) -> _Parents:
    """The place of each statement, from outer to inner statements.

    It visits statements only: a file has about ten times as many expressions.
    """
    found: _Parents = {}
    owners: list[ast.AST] = [tree]
    for owner in owners:  # the list grows during the loop
        for block in _lists_of(owner, _BLOCKS):
            for statement in block:
                found[id(statement)] = _StatementPlace(statement, block, owner)
            owners += block
        for clauses in _lists_of(owner, _CLAUSES):
            owners += clauses
    return found


def _lists_of(owner: ast.AST, names: Sequence[str]) -> Iterator[list[Any]]:
    for name in names:
        part = getattr(owner, name, None)
        if isinstance(part, list):
            yield part


def _read(
    call: ShardingCall,
    statement: ast.stmt | None,
    sharding: set[int],
    parents: _Parents,
    lines: Sequence[str],
) -> ShardingCall:
    if not isinstance(statement, ast.Expr | ast.Assign):
        return call
    node = statement.value
    assert isinstance(node, ast.Call)
    removed, is_whole_block = _removed(statement, sharding, parents)
    return call.model_copy(
        update={
            "argument": _text(lines, node.args[0]),
            "keywords": {each.arg or "**": _text(lines, each.value) for each in node.keywords},
            "first_line": statement.lineno,
            "end_line": statement.end_lineno or statement.lineno,
            "removed_from": removed.lineno,
            "removed_to": removed.end_lineno or removed.lineno,
            "leaves_block_empty": is_whole_block,
        }
    )


def _text(lines: Sequence[str], node: ast.expr) -> str:
    """The source of an expression, with secrets masked.

    `ast.get_source_segment` splits the whole file again for each expression.
    """
    if node.end_lineno is None:
        return mask_secrets(ast.unparse(node))
    # Columns count bytes of UTF-8.
    part = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return mask_secrets(b"\n".join(part).decode())


def _removed(
    statement: ast.stmt,
    sharding: set[int],
    parents: _Parents,
) -> tuple[ast.stmt, bool]:
    """The outermost loop with sharding calls only, and whether its removal empties its block."""
    _, block, owner = parents[id(statement)]
    while all(_only_shards(each, sharding) for each in block):
        if not isinstance(owner, ast.For) or owner.orelse:
            return statement, True
        statement = owner
        _, block, owner = parents[id(owner)]
    return statement, False


def _only_shards(statement: ast.stmt, sharding: set[int]) -> bool:
    if isinstance(statement, ast.For):
        return not statement.orelse and all(_only_shards(each, sharding) for each in statement.body)
    return id(statement) in sharding
