"""Read the statements of a source file that call `fully_shard`, and the lines to remove."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from fsdp_inspect.recording.environment import mask_secrets
from fsdp_inspect.trace.training_code import ShardingCall, UserStatement

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
