"""Edit the user's `fully_shard` calls so that they make another plan.

There are two ways. Simple changes edit the calls: another value of `reshard_after_forward`, lines
for prefetch, asynchronous gathers. For any other plan, `apply_plan` replaces the calls. A call
whose statement is unknown, or whose settings no plan can express, is not edited.
"""

import ast
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import PurePath

from fsdp_inspect.advice.snippets import list_names, prefetch_lines, relative_name
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import ShardingCall, SourceLines, TrainingCode

# --- Write a unified diff of source files of which a run contains only some lines.

_UNKNOWN, _MASKED = "\0", "***"


@dataclass(frozen=True, slots=True)
class Edit:
    """New lines in place of the lines `first` to `last`; `last` = `first` - 1 inserts them."""

    file: str
    first: int
    last: int
    lines: tuple[str, ...]


def write_diff(sources: Sequence[SourceLines], edits: Sequence[Edit]) -> str:
    """A diff that `patch -p0` and `git apply -p0` apply.

    Returns:
        Empty if a line of the diff is not in the run, or is there with a masked secret.
    """
    files = dict.fromkeys(edit.file for edit in edits)
    lines = [line for file in files for line in _diff(file, sources, edits)]
    is_known = not any(_UNKNOWN in line or _MASKED in line for line in lines)
    return "\n".join(lines) if is_known else ""


def lines_of(sources: Sequence[SourceLines], file: str, first: int, last: int) -> list[str] | None:
    """Consecutive lines of a file; None if the run does not contain all of them."""
    known = _known(file, sources)
    numbers = range(first, last + 1)
    return [known[at] for at in numbers] if all(at in known for at in numbers) else None


def _diff(file: str, sources: Sequence[SourceLines], edits: Sequence[Edit]) -> Iterator[str]:
    known = _known(file, sources)
    own = sorted((edit for edit in edits if edit.file == file), key=lambda edit: edit.first)
    length = max([*known, *(edit.last for edit in own)], default=0)
    old = [known.get(at, f"{_UNKNOWN}{at}") for at in range(1, length + 1)]
    new, at = list[str](), 1
    for edit in own:
        new += [*old[at - 1 : edit.first - 1], *edit.lines]
        at = edit.last + 1
    # `patch` refuses absolute paths.
    name = PurePath(file).name if PurePath(file).is_absolute() else file
    yield from unified_diff(old, [*new, *old[at - 1 :]], name, name, lineterm="")


def _known(file: str, sources: Sequence[SourceLines]) -> dict[int, str]:
    return {
        each.first_line + at: line
        for each in sources
        if each.file == file
        for at, line in enumerate(each.lines)
    }


_RESHARD = "reshard_after_forward"
_NOT_IN_PLANS = frozenset({"shard_placement_fn", "ignored_params", "dp_mesh_dims"})
_DEPTHS = ("forward_prefetch", "backward_prefetch")


@dataclass(frozen=True, slots=True)
class Change:
    """A plan and the recorded one, with names of the recorded model."""

    before: Plan
    after: Plan
    without: Collection[str] = ()
    """Units without parameters, which prefetch skips."""
    plan_file: str = "plan.toml"
    names_placement: bool = False
    """Whether the recorded calls pass a `shard_placement_fn`, which a plan does not contain."""

    @property
    def joins_roots(self) -> bool:
        """Whether the outermost units differ, so that the plan applies to the whole model only."""
        return set(self.before.fsdp_roots) != set(self.after.fsdp_roots)

    def within(self, module: str) -> "Change":
        """The change inside one module of the recorded model, with names relative to it."""
        inner = [name for name in self.without if name.startswith(f"{module}.")]
        return Change(
            self.before.within(module),
            self.after.within(module),
            _relative(inner, module),
            self.plan_file,
            self.names_placement,
        )


def is_readable(calls: Sequence[ShardingCall]) -> bool:
    """Whether every call is a statement of the user's own code."""
    return bool(calls) and all(
        call.argument and not call.package and call.function in ("fully_shard", "replicate")
        for call in calls
    )


def edit_own_calls(code: TrainingCode, change: Change) -> list[Edit] | None:
    """Edits of the calls for a simple change; None: it is not simple."""
    if not _is_simple(change):
        return None
    edits, later = list[Edit](), list[str]()
    for call in code.calls:
        changed = [name for name in call.units if _reshard(change, name)]
        values = {change.after.unit(name).reshard_after_forward for name in changed}
        if not changed:
            continue
        edited = None
        if len(changed) == len(call.units) and len(values) == 1:
            edited = _with_keyword(call, code.sources, repr(next(iter(values))))
        if edited is not None:
            edits.append(Edit(call.file, call.first_line, call.end_line, edited))
        elif all(isinstance(value, bool) for value in values):
            later += changed
        else:
            return None
    if not list(lines_after(change, later)):
        return edits
    places = find_root_places(code.calls, change)
    if len(places) != 1:
        return None
    prefix, root = places[0]
    later = [name for name in later if name.startswith(prefix)]
    inner = change.within(prefix) if len(root.units) > 1 else change
    if inner is not change:
        later, prefix = _relative(later, prefix), ""
    lines = [line.replace("MODEL", root.argument) for line in lines_after(inner, later, prefix)]
    indent = _indent_at(root.file, root.first_line, code.sources)
    return _add_lines(edits, root, _indented(lines, indent))


def lines_after(change: Change, kept: Sequence[str] = (), prefix: str = "") -> Iterator[str]:
    """Lines after the calls: prefetch, asynchronous gathers, and `kept` units. MODEL is the model.

    Args:
        change: A simple change.
        kept: Units whose calls do not state their new `reshard_after_forward`.
        prefix: The module of the recorded model that MODEL is.
    """
    for value in (False, True):
        names = [
            change.after.unit(name).modules[0]
            for name in kept
            if change.after.unit(name).reshard_after_forward is value
        ]
        if names:
            yield f"for name in {list_names(_relative(names, prefix))}:"
            yield f"    MODEL.get_submodule(name).set_reshard_after_forward({value}, recurse=False)"
    gathers = {unit.unshard_async_op for unit in change.after.units}
    if gathers != {unit.unshard_async_op for unit in change.before.units}:
        yield f"MODEL._set_unshard_async_op({next(iter(gathers))})"
    before, after, model = change.before, change.after, {"model": "MODEL", "prefix": prefix}
    if after.forward_prefetch != before.forward_prefetch:
        yield from prefetch_lines(after, "forward", change.without, **model)
    if after.backward_prefetch != before.backward_prefetch:
        yield from prefetch_lines(after, "backward", change.without, **model)


def replace_calls(code: TrainingCode, change: Change) -> list[Edit] | None:
    """Edits that put `apply_plan` in place of the calls; None: it would lose a setting."""
    lost = any(_NOT_IN_PLANS & set(call.keywords) for call in code.calls)
    roots = find_root_places(code.calls, change)
    if lost or change.before.notes or not roots:
        return None
    edits = list[Edit]()
    places = {(call.file, call.line): prefix for prefix, call in roots}
    for first, last, calls in _removals(code.calls):
        file, lines = calls[0].file, list[str]()
        for call in calls:
            if (call.file, call.line) in places:
                prefix = places[call.file, call.line]
                lines += apply_lines(
                    change, call.argument, mesh_of_calls(code.calls, call, change), prefix
                )
        if not lines and all(call.leaves_block_empty for call in calls):
            lines = ["pass"]
        indent = _indent_at(file, first, code.sources)
        edits.append(Edit(file, first, last, tuple(_indented(lines, indent))))
    return edits


def apply_lines(change: Change, model: str, mesh: str, prefix: str = "") -> list[str]:
    """Lines that apply the plan to a module of the recorded model."""
    part = f".within({_quoted(prefix)})" if prefix else ""
    arguments = f"{model}, plan{f', {mesh}' if mesh else ''}"
    if change.names_placement:
        arguments += ", shard_placement_fn=shard_placement_fn"
    return [
        *(["# shard_placement_fn: as in the calls that this replaces"] * change.names_placement),
        "import fsdp_inspect",
        f"plan = fsdp_inspect.Plan.load({_quoted(change.plan_file)}){part}",
        f"fsdp_inspect.apply_plan({arguments})",
    ]


def find_root_calls(calls: Sequence[ShardingCall], plan: Plan) -> dict[str, ShardingCall]:
    """The call of each outermost unit, by its module; empty if one of them has several modules."""
    roots = {}
    for call in calls:
        for name in call.units:
            if name in plan.fsdp_roots:
                roots[name] = call
    if any(", " in name for name in roots) or len(roots) != len(plan.fsdp_roots):
        return {}
    return roots


def find_root_places(
    calls: Sequence[ShardingCall], change: Change
) -> list[tuple[str, ShardingCall]]:
    """Each call of outermost units, with the module of which it applies the plan.

    A helper may shard several models by one call. Their plans must then be equal, and the plan of
    the first one serves all. Empty: the calls are unknown, such plans differ, or the plan joins
    outermost units.
    """
    if change.joins_roots:
        return []
    places: dict[tuple[str, int], list[tuple[str, ShardingCall]]] = {}
    for prefix, call in find_root_calls(calls, change.before).items():
        places.setdefault((call.file, call.line), []).append((prefix, call))
    for found in places.values():
        (first, call), *others = found
        if len(call.units) != len(found):
            return []
        own = change.after.within(first)
        if any(change.after.within(prefix) != own for prefix, _ in others):
            return []
    return [found[0] for found in places.values()]


# --- which changes are simple


def changes_only(change: Change, of_plan: Iterable[str], of_units: Iterable[str]) -> bool:
    """Whether the plans have the same units and differ in the given settings at most."""
    before, after = change.before, change.after
    if before.unit_names != after.unit_names:
        return False
    units = tuple(
        unit.model_copy(update={name: getattr(after.unit(unit.name), name) for name in of_units})
        for unit in before.units
    )
    same = {name: getattr(after, name) for name in of_plan}
    return before.model_copy(update={**same, "units": units}) == after


def is_later(change: Change) -> bool:
    """Whether lines after the `fully_shard` calls alone make the change."""
    of_plan = (*_DEPTHS, "accumulation")
    return changes_only(change, of_plan, ("unshard_async_op",)) and _can_follow(change)


def _is_simple(change: Change) -> bool:
    """Whether `reshard_after_forward` and lines after the calls make the change."""
    of_plan = (*_DEPTHS, "accumulation", "notes")
    return changes_only(change, of_plan, (_RESHARD, "unshard_async_op")) and _can_follow(change)


def _can_follow(change: Change) -> bool:
    """Whether code after the calls can set the depths of prefetch and the asynchronous gathers."""
    depths = [(getattr(change.before, name), getattr(change.after, name)) for name in _DEPTHS]
    is_plain = all(old == new or (old == 0 and isinstance(new, int)) for old, new in depths)
    return is_plain and len({unit.unshard_async_op for unit in change.after.units}) == 1


def _reshard(change: Change, name: str) -> bool:
    old, new = (plan.unit(name).reshard_after_forward for plan in (change.before, change.after))
    return old is not new and old != new


# --- the text of the edits


def _with_keyword(
    call: ShardingCall, sources: Sequence[SourceLines], value: str
) -> tuple[str, ...] | None:
    """The statement with another `reshard_after_forward`; None: an unpacked mapping may set it."""
    lines = lines_of(sources, call.file, call.first_line, call.end_line)
    if lines is None or "**" in call.keywords or value == "None":
        return None
    text = textwrap.dedent("\n".join(lines))
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    statement = ast.parse(text).body[0]
    assert isinstance(statement, ast.Expr | ast.Assign)
    node = statement.value
    assert isinstance(node, ast.Call)
    given = next((each.value for each in node.keywords if each.arg == _RESHARD), None)
    rows = text.splitlines()
    if given is not None:
        start, end = (given.lineno, given.col_offset), (given.end_lineno, given.end_col_offset)
        new = value
    else:
        last = max((*node.args, *(k.value for k in node.keywords)), key=_end)
        start = end = _end(last)
        new = f", {_RESHARD}={value}"
    if start[0] != end[0]:
        return None
    row = rows[start[0] - 1].encode()
    rows[start[0] - 1] = (row[: start[1]] + new.encode() + row[end[1] :]).decode()
    return tuple(f"{indent}{row}" if row else row for row in rows)


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _add_lines(edits: list[Edit], call: ShardingCall, lines: Sequence[str]) -> list[Edit]:
    """Add lines after a call, also if the call itself is edited."""
    for at, edit in enumerate(edits):
        if (edit.file, edit.first) == (call.file, call.first_line):
            more = Edit(edit.file, edit.first, edit.last, (*edit.lines, *lines))
            return [*edits[:at], more, *edits[at + 1 :]]
    return [*edits, Edit(call.file, call.end_line + 1, call.end_line, tuple(lines))]


def _removals(calls: Sequence[ShardingCall]) -> Iterator[tuple[int, int, list[ShardingCall]]]:
    """The lines to remove, with the calls in them; a loop with several calls is one part."""
    spans: dict[tuple[str, int, int], list[ShardingCall]] = {}
    for call in calls:
        spans.setdefault((call.file, call.removed_from, call.removed_to), []).append(call)
    for (_, first, last), inside in spans.items():
        yield first, last, inside


def mesh_of_calls(calls: Sequence[ShardingCall], root: ShardingCall, change: Change) -> str:
    """The mesh of the calls as written; empty: the default mesh, or the plan has another one."""
    if change.before.mesh != change.after.mesh:
        return ""
    texts = dict.fromkeys(filter(None, map(_mesh_of, (root, *calls))))
    has_own = any(unit.mesh for unit in change.after.units)
    return f"[{', '.join(texts)}]" if has_own and len(texts) > 1 else _mesh_of(root)


def _mesh_of(call: ShardingCall) -> str:
    if "mesh" in call.keywords:
        return call.keywords["mesh"]
    unpacked = call.keywords.get("**", "")
    return f'{unpacked}.get("mesh")' if unpacked.isidentifier() else ""


def _indent_at(file: str, line: int, sources: Sequence[SourceLines]) -> str:
    found = lines_of(sources, file, line, line) or [""]
    return found[0][: len(found[0]) - len(found[0].lstrip())]


def _indented(lines: Sequence[str], indent: str) -> list[str]:
    return [f"{indent}{line}" if line else line for line in lines]


def edit_after(
    sources: Sequence[SourceLines], file: str, first: int, last: int, lines: Sequence[str]
) -> Edit:
    """Insert lines after a statement, whose lines are `first` to `last`, with its indentation."""
    new = _indented(lines, _indent_at(file, first, sources))
    return Edit(file, last + 1, last, tuple(new))


def _relative(names: Sequence[str], prefix: str) -> list[str]:
    return [relative_name(name, prefix) for name in names]


def _quoted(text: str) -> str:
    return f'"{text}"' if '"' not in text and "\\" not in text else repr(text)
