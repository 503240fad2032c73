"""Read the statements of a source file that call `fully_shard`, and what to remove with them."""

import ast
from collections.abc import Iterator, Sequence

from fsdp_inspect.recording.environment import mask_secrets
from fsdp_inspect.trace.training_code import ShardingCall, UserStatement

_BLOCKS = ("body", "orelse", "finalbody")


def read_calls(text: str, calls: Sequence[ShardingCall]) -> list[ShardingCall]:
    """Add arguments and lines to calls in one file; calls that cannot be read stay unchanged.

    Args:
        text: The source of the file.
        calls: The calls in this file.
    """
    tree = _parse(text)
    if tree is None:
        return list(calls)
    found = {call.line: _statement_of(tree, call) for call in calls}
    sharding = {id(statement) for statement in found.values() if statement is not None}
    parents = _blocks(tree)
    return [_read(call, found[call.line], sharding, parents, text) for call in calls]


def read_user_statement(text: str, user: UserStatement) -> UserStatement:
    """Add the lines and variables of the statement around a line of the user's code.

    Args:
        text: The source of the file.
        user: The line, and the variable that holds the model.
    """
    tree = _parse(text)
    statement = None if tree is None else _statement_at(tree, user.line)
    if tree is None or statement is None or not isinstance(statement, ast.Assign | ast.Expr):
        return user
    block, _ = _blocks(tree)[id(statement)]
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
    """The target that takes the model's place in `model, optimizer = prepare(model, optimizer)`."""
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


def _statement_of(tree: ast.Module, call: ShardingCall) -> ast.stmt | None:
    """The statement at a line, if it is `f(x)` or `x = f(x)` alone."""
    statement = _statement_at(tree, call.line)
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


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement that contains a line."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)


def _blocks(tree: ast.Module) -> dict[int, tuple[list[ast.stmt], ast.AST]]:
    """By statement: the list of statements that contains it, and the owner of that list."""
    found = {}
    for owner in ast.walk(tree):
        for block in _lists_of(owner):
            for statement in block:
                found[id(statement)] = (block, owner)
    return found


def _lists_of(owner: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in _BLOCKS:
        block = getattr(owner, name, None)
        if isinstance(block, list):
            yield block


def _read(
    call: ShardingCall,
    statement: ast.stmt | None,
    sharding: set[int],
    parents: dict[int, tuple[list[ast.stmt], ast.AST]],
    text: str,
) -> ShardingCall:
    if not isinstance(statement, ast.Expr | ast.Assign):
        return call
    node = statement.value
    assert isinstance(node, ast.Call)
    removed, is_whole_block = _removed(statement, sharding, parents)
    return call.model_copy(
        update={
            "argument": _text(text, node.args[0]),
            "keywords": {each.arg or "**": _text(text, each.value) for each in node.keywords},
            "first_line": statement.lineno,
            "end_line": statement.end_lineno or statement.lineno,
            "removed_from": removed.lineno,
            "removed_to": removed.end_lineno or removed.lineno,
            "leaves_block_empty": is_whole_block,
        }
    )


def _text(text: str, node: ast.expr) -> str:
    return mask_secrets(ast.get_source_segment(text, node) or ast.unparse(node))


def _removed(
    statement: ast.stmt,
    sharding: set[int],
    parents: dict[int, tuple[list[ast.stmt], ast.AST]],
) -> tuple[ast.stmt, bool]:
    """The outermost loop that contains only sharding calls, and whether its block is then empty."""
    block, owner = parents[id(statement)]
    while all(_only_shards(each, sharding) for each in block):
        if not isinstance(owner, ast.For) or owner.orelse:
            return statement, True
        statement = owner
        block, owner = parents[id(owner)]
    return statement, False


def _only_shards(statement: ast.stmt, sharding: set[int]) -> bool:
    if isinstance(statement, ast.For):
        return not statement.orelse and all(_only_shards(each, sharding) for each in statement.body)
    return id(statement) in sharding
