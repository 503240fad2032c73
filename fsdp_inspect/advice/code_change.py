"""Write a change of the plan as a change of the code and the launch line of the recorded run.

In order of preference: settings of the framework that shards the model, edits of the user's own
calls, `apply_plan` in place of these calls, and a sentence that says where to insert the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.advice.call_edits import (
    Change,
    apply_lines,
    edit_own_calls,
    find_root_calls,
    is_readable,
    lines_after,
    replace_calls,
)
from fsdp_inspect.advice.framework_settings import (
    FrameworkSettings,
    express_in_settings,
    switch_off_wrapping,
    title_of_framework,
)
from fsdp_inspect.advice.launch_line import TRAINER, write_launch_line
from fsdp_inspect.advice.source_diff import Edit, lines_of, write_diff
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.training_code import ShardingCall, UserStatement

_MOST_PLACES = 3


@dataclass(frozen=True, slots=True)
class CodeChange:
    """The change of a recorded run's code and launch that makes a change of the plan."""

    where: str
    """A description of the change and its position, in one or two sentences."""
    diff: str
    """A unified diff of the user's files, for `patch -p0`; empty: none can be written."""
    settings: str
    """Settings of a framework that make the change; empty: none."""
    lines: str
    """Lines to insert by hand, if there is no diff and no setting."""
    launch: str
    """The recorded launch line with the change applied."""
    plan_file: str
    """The plan file that the changed code reads; empty: it reads none."""

    @property
    def text(self) -> str:
        """The diff, the settings and the lines."""
        return "\n".join(filter(None, (self.diff, self.settings, self.lines)))

    @property
    def changed_lines(self) -> tuple[str, ...]:
        """The text without the unchanged lines of the diff."""
        changed = [line for line in self.diff.splitlines() if line[:1] in "+-"]
        return (*changed, *self.settings.splitlines(), *self.lines.splitlines())


def write_code_change(manifest: RunManifest, change: Change) -> CodeChange:
    """The change of the code that makes another plan of a recorded run.

    Args:
        manifest: The manifest of the run.
        change: The plans before and after.
    """
    code = manifest.code
    if TRAINER in (*manifest.command, *code.launch):
        return _finish(manifest, change, "The trainer applies the plan of its option --plan.")
    if not code.calls:
        lines = apply_lines(change, "model", "mesh")
        return _finish(manifest, change, _say_unknown(manifest), lines=lines)
    if any(call.function == "apply_plan" for call in code.calls):
        where = f"The script already applies a plan in {_places(code.calls)}. Load this plan there."
        return _finish(manifest, change, where, lines=_load_line(change))
    if any(call.package for call in code.calls):
        return _change_framework(manifest, change)
    return _change_own_calls(manifest, change)


def _change_own_calls(manifest: RunManifest, change: Change) -> CodeChange:
    code = manifest.code
    calls = f"the calls in {_places(code.calls)}"
    if is_readable(code.calls):
        edits = edit_own_calls(code, change)
        diff = write_diff(code.sources, edits) if edits else ""
        if diff:
            where = f"The diff changes {calls}, or adds lines after them."
            return _finish(manifest, change, where, diff=diff, needs_plan_file=False)
        edits = replace_calls(code, change)
        diff = write_diff(code.sources, edits) if edits else ""
        if diff:
            where = f"The diff replaces {calls} with the plan file."
            return _finish(manifest, change, where, diff=diff)
    roots = find_root_calls(code.calls, change.before)
    model = next(iter(roots.values())).argument if len(roots) == 1 else ""
    prefix = next(iter(roots), "") if len(roots) == 1 else ""
    lines = apply_lines(change, model or "model", "mesh", prefix)
    where = f"Replace {calls} with these lines. {_say_no_diff(manifest)}"
    return _finish(manifest, change, where, lines=lines)


def _change_framework(manifest: RunManifest, change: Change) -> CodeChange:
    code, call = manifest.code, _outer_call(manifest.code.calls)
    title = title_of_framework(call.package)
    settings = express_in_settings(code.frameworks, code.settings, change)
    if settings is not None:
        where = f"{title} makes this change by its own settings."
        return _finish(
            manifest,
            change,
            where,
            settings=settings,
            needs_plan_file=False,
        )
    shards = f"{title} shards the model in {call.file}:{call.line}"
    user = call.user
    after = list(lines_after(change)) if _is_later(change) else []
    if user is None:
        lines = after or apply_lines(change, "model", "")
        how = "Add these lines after its calls" if after else "Replace its calls with these lines"
        return _finish(
            manifest, change, f"{shards}. {how}.", lines=_named(lines), needs_plan_file=not after
        )
    shards += f", called from {user.file}:{user.line}"
    if after:
        return _after_statement(manifest, change, shards, user, after)
    if call.package == "accelerate":
        return _before_accelerate(manifest, change, shards, user)
    lines = apply_lines(change, user.model or "model", "")
    where = f"{shards}. No setting makes this change. Build the model unsharded and apply the plan."
    return _finish(manifest, change, where, lines=lines)


def _outer_call(calls: Sequence[ShardingCall]) -> ShardingCall:
    """The call of a package for the whole model, else the first call of a package."""
    of_packages = [call for call in calls if call.package]
    whole = [call for call in of_packages if call.user is not None and call.user.model]
    return (whole or of_packages)[0]


def _is_later(change: Change) -> bool:
    """Whether lines after the `fully_shard` calls alone make the change."""
    before, after = change.before, change.after
    names = ("forward_prefetch", "backward_prefetch", "accumulation")
    same = {name: getattr(after, name) for name in names}
    units = before.units
    if before.unit_names == after.unit_names:
        units = tuple(
            unit.model_copy(update={"unshard_async_op": after.unit(unit.name).unshard_async_op})
            for unit in before.units
        )
    is_same = before.model_copy(update={**same, "units": units}) == after
    is_plain = all(
        getattr(before, name) == getattr(after, name)
        or (getattr(before, name) == 0 and isinstance(getattr(after, name), int))
        for name in names[:2]
    )
    return is_same and is_plain and len({unit.unshard_async_op for unit in after.units}) == 1


def _after_statement(
    manifest: RunManifest, change: Change, shards: str, user: UserStatement, lines: Sequence[str]
) -> CodeChange:
    diff = ""
    if user.model_after:
        found = lines_of(manifest.code.sources, user.file, user.line, user.line) or [""]
        indent = found[0][: len(found[0]) - len(found[0].lstrip())]
        new = tuple(f"{indent}{line}" for line in _named(lines, user.model_after))
        edit = Edit(user.file, user.end_line + 1, user.end_line, new)
        diff = write_diff(manifest.code.sources, [edit])
    where = f"{shards}. The lines follow this statement."
    if not diff:
        where = f"{shards}. Run these lines after the model is sharded and before it trains."
    return _finish(
        manifest,
        change,
        where,
        diff=diff,
        lines=() if diff else _named(lines),
        needs_plan_file=False,
    )


def _before_accelerate(
    manifest: RunManifest, change: Change, shards: str, user: UserStatement
) -> CodeChange:
    """Accelerate keeps the sharding of a model that is already sharded."""
    lines = apply_lines(change, user.model or "model", "")
    diff = ""
    if user.model and user.made_at:
        found = lines_of(manifest.code.sources, user.file, user.made_at, user.made_at) or [""]
        indent = found[0][: len(found[0]) - len(found[0].lstrip())]
        new = tuple(f"{indent}{line}" for line in lines)
        edit = Edit(user.file, user.made_at + 1, user.made_at, new)
        diff = write_diff(manifest.code.sources, [edit])
    where = (
        f"{shards}. It keeps a model that is already sharded, so apply the plan after the model "
        "is built and before its optimizer, and switch off its own wrapping."
    )
    return _finish(
        manifest,
        change,
        where,
        diff=diff,
        settings=switch_off_wrapping(manifest.code.frameworks),
        lines=() if diff else lines,
    )


# --- the parts


def _finish(  # noqa: PLR0913 - the parts of one change
    manifest: RunManifest,
    change: Change,
    where: str,
    *,
    diff: str = "",
    settings: FrameworkSettings | None = None,
    lines: Sequence[str] = (),
    needs_plan_file: bool = True,
) -> CodeChange:
    if change.before.accumulation != change.after.accumulation:
        where += " The training loop must also reduce gradients as the plan states."
    launch = write_launch_line(
        manifest,
        change.plan_file,
        options=settings.options if settings else None,
        starter_options=settings.starter_options if settings else None,
        reads_plan=needs_plan_file,
    )
    words = settings.lines if settings else ""
    plan_file = change.plan_file if needs_plan_file else ""
    return CodeChange(where, diff, words, "\n".join(lines), launch, plan_file)


def _places(calls: Sequence[ShardingCall]) -> str:
    """`train.py, lines 22 and 23`."""
    lines: dict[str, list[int]] = {}
    for call in calls:
        lines.setdefault(call.file, []).append(call.line)
    return "; ".join(_lines_of_file(file, found) for file, found in lines.items())


def _lines_of_file(file: str, lines: Sequence[int]) -> str:
    numbers = [str(line) for line in sorted(set(lines))]
    if len(numbers) > _MOST_PLACES:
        numbers = [*numbers[:_MOST_PLACES], f"{len(numbers) - _MOST_PLACES} more"]
    words = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    return f"{file}, line{'s' * (len(numbers) > 1)} {words}"


def _load_line(change: Change) -> list[str]:
    return [f'fsdp_inspect.Plan.load("{change.plan_file}")']


def _named(lines: Sequence[str], model: str = "model") -> list[str]:
    return [line.replace("MODEL", model) for line in lines]


def _say_unknown(manifest: RunManifest) -> str:
    words = "Replace your fully_shard calls with these lines. Their place in the code is unknown"
    if manifest.code.launch:
        return f"{words}, because the model was sharded before the script imported the recorder."
    return f"{words}, because the run does not contain it."


def _say_no_diff(manifest: RunManifest) -> str:
    if not manifest.code.sources:
        return "The run contains no source lines, so there is no diff."
    return "No diff can be written for these calls."
