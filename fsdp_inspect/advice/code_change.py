"""Write a change of the plan as a change of the code and the launch line of the recorded run.

In order of preference: settings of the framework that shards the model, edits of the user's own
calls, `apply_plan` in place of these calls, and a sentence that says where to insert the plan.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_inspect.advice.call_edits import (
    Change,
    Edit,
    apply_lines,
    changes_only,
    edit_after,
    edit_own_calls,
    find_root_places,
    is_later,
    is_readable,
    lines_after,
    mesh_of_calls,
    replace_calls,
    write_diff,
)
from fsdp_inspect.advice.snippets import sync_lines, wrapper_lines
from fsdp_inspect.formatting import format_count
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN, Plan
from fsdp_inspect.trace.run import RunManifest, ShardingCall, SourceLines, UserStatement

# --- Express a plan in the settings of a framework: Accelerate, Transformers and torchtitan.
#
# Each framework has one setting that a search over plans changes for all blocks:
# `reshard_after_forward`. torchtitan also has the dtypes of messages. Other changes have no
# setting.

_TITLES = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "torchtitan": "torchtitan",
    "transformers": "Transformers",
    "trl": "TRL",
}
_DTYPES = {
    "param_dtype": "--training.mixed_precision_param",
    "reduce_dtype": "--training.mixed_precision_reduce",
}


@dataclass(frozen=True, slots=True)
class FrameworkSettings:
    """The settings that make a change."""

    lines: str
    """The settings as the user writes them; empty: only options of the launch line change."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the script in the launch line."""
    starter_options: dict[str, str] = field(default_factory=dict)
    """Options of the starter, such as `accelerate launch`."""


def title_of_framework(package: str) -> str:
    """The name of a framework in a sentence."""
    return _TITLES.get(package, package)


def express_in_settings(
    frameworks: list[str], settings: dict[str, object], change: Change
) -> FrameworkSettings | None:
    """The settings that make exactly this change; None: no settings do.

    Args:
        frameworks: The packages around the `fully_shard` calls, innermost first.
        settings: The recorded settings of the framework.
        change: The plans before and after.
    """
    if not frameworks:
        return None
    if frameworks[0] == "torchtitan":
        return _torchtitan(change)
    if frameworks[0] == "accelerate":
        return _accelerate(frameworks, settings, change)
    return None


def switch_off_wrapping(frameworks: list[str]) -> FrameworkSettings:
    """The settings with which Accelerate accepts a model that is already sharded.

    Otherwise it looks for the class of the layers, whose name `fully_shard` has changed.
    """
    if "transformers" in frameworks or "trl" in frameworks:
        line = 'TrainingArguments(..., fsdp_config={..., "auto_wrap_policy": "NO_WRAP"})'
        return FrameworkSettings(line)
    return FrameworkSettings(
        "# in the file of `accelerate config`:\n"
        "fsdp_config:\n"
        "  fsdp_auto_wrap_policy: NO_WRAP\n"
        '# or in code: FullyShardedDataParallelPlugin(..., auto_wrap_policy="no_wrap")',
        starter_options={"--fsdp_auto_wrap_policy": "NO_WRAP"},
    )


def _accelerate(
    frameworks: list[str], settings: dict[str, object], change: Change
) -> FrameworkSettings | None:
    old = settings.get("reshard_after_forward", True)
    governed = [
        unit.name
        for unit in change.before.units
        if not unit.is_root and unit.reshard_after_forward == old
    ]
    value = _same_reshard(change, governed)
    if value is None or value == old:
        return None
    word = str(value).lower()
    if "transformers" in frameworks or "trl" in frameworks:
        line = f'TrainingArguments(..., fsdp_config={{..., "reshard_after_forward": {value}}})'
        return FrameworkSettings(line)
    return FrameworkSettings(
        "# in the file of `accelerate config`:\n"
        "fsdp_config:\n"
        f"  fsdp_reshard_after_forward: {word}\n"
        f"# or in code: FullyShardedDataParallelPlugin(..., reshard_after_forward={value})",
        starter_options={"--fsdp_reshard_after_forward": word},
    )


def _torchtitan(change: Change) -> FrameworkSettings | None:
    inner = [unit.name for unit in change.before.units if not unit.is_root]
    value = _same_reshard(change, inner)
    if value is not None:
        policy = "always" if value else "never"
        return FrameworkSettings("", {"--parallelism.fsdp_reshard_after_forward": policy})
    options = _torchtitan_dtypes(change)
    return FrameworkSettings("", options) if options else None


def _torchtitan_dtypes(change: Change) -> dict[str, str]:
    """The options of new dtypes; empty if anything else changes too."""
    options, changed = {}, []
    for name, option in _DTYPES.items():
        values = {getattr(unit, name) for unit in change.after.units}
        if values != {getattr(unit, name) for unit in change.before.units} and len(values) == 1:
            options[option] = str(next(iter(values)))
            changed.append(name)
    return options if changes_only(change, ("accumulation",), changed) else {}


def _same_reshard(change: Change, names: list[str]) -> bool | None:
    """The one new value of these units, if nothing else changes."""
    if change.before.unit_names != change.after.unit_names or not names:
        return None
    values = {change.after.unit(name).reshard_after_forward for name in names}
    value = next(iter(values))
    if len(values) != 1 or not isinstance(value, bool):
        return None
    units = tuple(
        unit.model_copy(update={"reshard_after_forward": value}) if unit.name in names else unit
        for unit in change.before.units
    )
    same = change.before.model_copy(
        update={"units": units, "accumulation": change.after.accumulation}
    )
    return value if same == change.after else None


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


def ran_trainer(manifest: RunManifest) -> bool:
    """Whether the reference trainer ran, whose loop follows the plan."""
    return TRAINER in (*manifest.command, *manifest.code.launch)


def write_code_change(manifest: RunManifest, change: Change) -> CodeChange:
    """The change of the code that makes another plan of a recorded run.

    Args:
        manifest: The manifest of the run.
        change: The plans before and after.
    """
    code = manifest.code
    has_placement = any("shard_placement_fn" in call.keywords for call in code.calls)
    change = replace(change, names_placement=has_placement)
    if change.after.fsdp1 is not None:
        return _change_wrappers(manifest, change)
    if ran_trainer(manifest):
        return _finish(manifest, change, "The trainer applies the plan of its option --plan.")
    if not code.calls:
        lines = _lines_of_models(manifest, change)
        return _finish(manifest, change, _say_unknown(manifest), lines=lines)
    if any(call.function == "apply_plan" for call in code.calls):
        where = f"The script already applies a plan in {_places(code.calls)}. Load this plan there."
        lines = [f'fsdp_inspect.Plan.load("{change.plan_file}")']
        return _finish(manifest, change, where, lines=lines)
    if any(call.package for call in code.calls):
        return _change_framework(manifest, change)
    return _change_own_calls(manifest, change)


def _change_wrappers(manifest: RunManifest, change: Change) -> CodeChange:
    """FSDP1: the arguments of the wrapper, or the options of the trainer of this project."""
    is_trainer = TRAINER in (*manifest.command, *manifest.code.launch)
    options = _options_of_trainer(change) if is_trainer else {}
    settings = FrameworkSettings("", options) if options else None
    where = "Change these arguments of FullyShardedDataParallel, or your framework's settings."
    if settings is not None:
        where = "The trainer has options for this change."
    lines = () if settings else wrapper_lines(change.before, change.after)
    return _finish(manifest, change, where, settings=settings, lines=lines, needs_plan_file=False)


def _options_of_trainer(change: Change) -> dict[str, str]:
    """The options of the trainer that make a change of FSDP1; empty: some parts have none."""
    before, after = change.before, change.after
    others = ("mesh", "checkpointing", "fsdp1", "unit_names")
    if any(getattr(before, name) != getattr(after, name) for name in others):
        return {}
    old, new = _trainer_options(before), _trainer_options(after)
    return {name: value for name, value in new.items() if value != old[name]}


def _trainer_options(plan: Plan) -> dict[str, str]:
    unit = (plan.inner_units or plan.units)[0]
    param_dtype = unit.param_dtype or "float32"
    return {
        "--reshard-after-forward": str(unit.reshard_after_forward is not False).lower(),
        "--forward-prefetch": str(plan.forward_prefetch),
        "--accumulation-sync": plan.accumulation.sync,
        "--param-dtype": param_dtype,
        "--reduce-dtype": unit.reduce_dtype or param_dtype,
    }


def _change_own_calls(manifest: RunManifest, change: Change) -> CodeChange:
    code = manifest.code
    calls = f"the calls in {_places(code.calls)}"
    if is_readable(code.calls):
        edits = edit_own_calls(code, change)
        diff = write_diff(code.sources, edits) if edits else ""
        if edits and diff:
            where = f"{_say_edits(edits)}{_say_own_prefetch(change)}"
            return _finish(manifest, change, where, diff=diff, needs_plan_file=False)
        edits = replace_calls(code, change)
        diff = write_diff(code.sources, edits) if edits else ""
        if diff:
            where = f"The diff replaces {calls} with the plan file.{_say_own_prefetch(change)}"
            return _finish(manifest, change, where, diff=diff)
    where = f"Replace {calls} with these lines. {_say_no_diff(manifest, change)}"
    where += _say_own_prefetch(change)
    return _finish(manifest, change, where, lines=_lines_in_place(manifest, change))


def _say_own_prefetch(change: Change) -> str:
    """A sentence about the script's calls that set another prefetch; empty if it has none."""
    before, after = (
        (plan.forward_prefetch, plan.backward_prefetch) for plan in (change.before, change.after)
    )
    if not any(before) or before == after:
        return ""
    return (
        " Remove the script's own calls of set_modules_to_forward_prefetch and "
        "set_modules_to_backward_prefetch: they set another prefetch than the plan."
    )


def _lines_in_place(manifest: RunManifest, change: Change) -> list[str]:
    """Lines that apply the plan, in the names of the calls that they replace."""
    calls = manifest.code.calls
    places = find_root_places(calls, change)
    if len(places) == 1 and places[0][0] and not places[0][1].argument:
        prefix, call = places[0]  # without the source lines, the name of the module is unknown
        note = f"# model: the module {prefix} of the recorded model, which your calls shard"
        return [note, *apply_lines(change, "model", mesh_of_calls(calls, call, change), prefix)]
    if places and all(call.argument for _, call in places):
        return [
            line
            for prefix, call in places
            for line in apply_lines(
                change, call.argument, mesh_of_calls(calls, call, change), prefix
            )
        ]
    return _lines_of_models(manifest, change)


def _lines_of_models(manifest: RunManifest, change: Change, variable: str = "") -> list[str]:
    """Lines that apply the plan to each model; a note explains a variable that is unknown."""
    mesh = "mesh" if change.after.has_other_dimensions else ""
    notes = ["# mesh: your variable of the data-parallel mesh"] if mesh else []
    if not _has_several(manifest):
        return [*notes, *_named(manifest, apply_lines(change, "MODEL", mesh), variable)]
    calls, lines = manifest.code.calls, list[str]()
    models = dict.fromkeys(unit.modules[0].partition(".")[0] for unit in change.before.units)
    for number, model in enumerate(models, 1):
        call = next((each for each in calls if model in each.units), None)
        variable = _variable_of(model, call, manifest.code.sources) if call else ""
        if not variable:
            variable = f"MODEL_{number}"
            notes.append(f"# {variable}: your variable of {_describe(model, call, manifest)}")
        own_mesh = mesh_of_calls(calls, call, change) if call else ""
        lines += apply_lines(change, variable, own_mesh or mesh, model)
    return [*notes, *lines]


def _has_several(manifest: RunManifest) -> bool:
    """Whether several models were recorded: then the name of each is a prefix of its units."""
    return " + " in manifest.model.class_name


def _variable_of(model: str, call: ShardingCall, sources: Sequence[SourceLines]) -> str:
    """The script's name of a model: the call's, or one in the loop `for net in (G, D):`."""
    if call.units == [model] or not call.argument:
        return call.argument
    own = [each for each in sources if each.file == call.file and each.first_line <= call.line]
    above = [line for each in own for line in each.lines[: call.line - each.first_line]]
    _, loop, rest = "\n".join(above).rpartition(f"for {call.argument} in ")
    found = re.match(r"[(\[]([\w\s.,]+)[)\]]:", rest) if loop else None
    names = [name.strip() for name in found[1].strip(" ,\n").split(",")] if found else []
    return names[call.units.index(model)] if len(names) == len(call.units) else ""


def _describe(model: str, call: ShardingCall | None, manifest: RunManifest) -> str:
    """`the model that is recorded as ref (1.2M parameters, model 2 of 2 in train.py:13)`."""
    units = [unit for unit in manifest.units if unit.fqn.partition(".")[0] == model]
    details = f"{format_count(sum(unit.num_parameters for unit in units))} parameters"
    if call is not None:
        place = f"model {call.units.index(model) + 1} of {len(call.units)}"
        details += f", {place} that {call.file}:{call.line} shards"
    return f"the model that is recorded as {model} ({details})"


def _change_framework(manifest: RunManifest, change: Change) -> CodeChange:
    code, call = manifest.code, _outer_call(manifest.code.calls)
    title = title_of_framework(call.package)
    settings = express_in_settings(code.frameworks, code.settings, change)
    if settings is not None:
        where = f"{title} makes this change by its own settings."
        return _finish(manifest, change, where, settings=settings, needs_plan_file=False)
    shards = f"{title} shards the model in {call.file}:{call.line}"
    user = call.user
    after = list(lines_after(change)) if is_later(change) and not _has_several(manifest) else []
    if user is None:
        how = "Add these lines after its calls" if after else "Replace its calls with these lines"
        lines = _named(manifest, after) if after else _lines_of_models(manifest, change)
        return _finish(
            manifest, change, f"{shards}. {how}.", lines=lines, needs_plan_file=not after
        )
    shards += f", called from {user.file}:{user.line}"
    if after:
        return _after_statement(manifest, change, shards, user, after)
    if call.package == "accelerate":
        return _before_accelerate(manifest, change, shards, user)
    lines = _lines_of_models(manifest, change, user.model)
    where = f"{shards}. No setting makes this change. Build the model unsharded and apply the plan."
    return _finish(manifest, change, where, lines=lines)


def _outer_call(calls: Sequence[ShardingCall]) -> ShardingCall:
    """The call of a package for the whole model, else the first call of a package."""
    of_packages = [call for call in calls if call.package]
    whole = [call for call in of_packages if call.user is not None and call.user.model]
    return (whole or of_packages)[0]


def _after_statement(
    manifest: RunManifest, change: Change, shards: str, user: UserStatement, lines: Sequence[str]
) -> CodeChange:
    diff, named = "", _named(manifest, lines, user.model_after)
    if user.model_after:
        sources = manifest.code.sources
        edit = edit_after(sources, user.file, user.line, user.end_line, named)
        diff = write_diff(sources, [edit])
    where = f"{shards}. The lines follow this statement."
    if not diff:
        where = f"{shards}. Run these lines after the model is sharded and before it trains."
    lines = () if diff else named
    return _finish(manifest, change, where, diff=diff, lines=lines, needs_plan_file=False)


def _before_accelerate(
    manifest: RunManifest, change: Change, shards: str, user: UserStatement
) -> CodeChange:
    """Accelerate keeps the sharding of a model that is already sharded."""
    lines = _lines_of_models(manifest, change, user.model)
    diff = ""
    if user.made_at and lines == apply_lines(change, user.model, ""):  # no name is unknown
        sources = manifest.code.sources
        edit = edit_after(sources, user.file, user.made_at, user.made_at, lines)
        diff = write_diff(sources, [edit])
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
        calls = sync_lines(change.after)
        how = f": `{calls[0]}`" if len(calls) == 1 else ""  # several roots need a loop
        where += f" The training loop must also reduce gradients as the plan states{how}."
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
    return _list_lines((call.file, call.line) for call in calls)


def _say_edits(edits: Sequence[Edit]) -> str:
    """Say where the lines of a diff are: `The diff changes train.py, line 22.`."""
    changed = _list_lines((edit.file, edit.first) for edit in edits if edit.last >= edit.first)
    added = _list_lines((edit.file, edit.last) for edit in edits if edit.last < edit.first)
    parts = [f"changes {changed}" if changed else "", f"adds lines after {added}" if added else ""]
    return f"The diff {', and '.join(filter(None, parts))}."


def _list_lines(places: Iterable[tuple[str, int]]) -> str:
    lines: dict[str, list[int]] = {}
    for file, line in places:
        lines.setdefault(file, []).append(line)
    return "; ".join(_lines_of_file(file, found) for file, found in lines.items())


def _lines_of_file(file: str, lines: Sequence[int]) -> str:
    numbers = [str(line) for line in sorted(set(lines))]
    if len(numbers) > _MOST_PLACES:
        numbers = [*numbers[:_MOST_PLACES], f"{len(numbers) - _MOST_PLACES} more"]
    words = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    return f"{file}, line{'s' * (len(numbers) > 1)} {words}"


def _named(manifest: RunManifest, lines: Sequence[str], model: str = "") -> list[str]:
    """The lines with the script's name of the model; a note explains an unknown one."""
    note = f"# model: your variable of the recorded model, a {manifest.model.class_name}"
    named = [line.replace("MODEL", model or "model") for line in lines]
    return named if model else [note.removesuffix(", a "), *named]


def _say_unknown(manifest: RunManifest) -> str:
    words = "Replace your fully_shard calls with these lines. Their place in the code is unknown"
    if manifest.code.launch:
        return f"{words}, because the model was sharded before the script imported the recorder."
    return f"{words}, because the run does not contain it."


def _say_no_diff(manifest: RunManifest, change: Change) -> str:
    """The reason why there is no diff."""
    code = manifest.code
    if not code.sources:
        return "The run contains no source lines, so there is no diff."
    unread = [call for call in code.calls if not call.argument]
    if unread:
        why = f"the call in {_places(unread[:1])}, shares its line or statement with other code"
    elif not is_readable(code.calls):
        why = "not every call is a fully_shard call of your own code"
    elif change.before.notes:
        why = f"a plan file cannot express the recorded sharding. {change.before.notes[0]}"
    elif not find_root_places(code.calls, change):
        why = "one call shards several modules that the plan treats differently"
    else:
        why = "a call has settings that a plan file cannot express, or the run lacks some lines"
    return f"No diff can be written: {why.removesuffix('.')}."


# --- Write the launch line of a recorded run with a plan applied, without conflicting options.

TRAINER = "instrumented_trainer"
_RECORDERS = ("fsdp_inspect.record", "fsdp_inspect.emulate")
_FLAGS_OF_RECORDER = frozenset({"--no-verdict", "--no-source", "-h", "--help"})
_DECIDED = frozenset(
    f"--{no}{name.replace('_', '-')}" for name in DECIDED_BY_PLAN for no in ("", "no-")
)
"""Options of the trainer that set the same as a plan. The trainer rejects them next to a plan."""


def write_launch_line(
    manifest: RunManifest,
    plan_file: str,
    *,
    options: Mapping[str, str] | None = None,
    starter_options: Mapping[str, str] | None = None,
    reads_plan: bool = True,
) -> str:
    """The recorded launch with another plan; a comment has the parts that it cannot contain.

    Args:
        manifest: The manifest of the run.
        plan_file: The plan to apply.
        options: Options of the script to set, by name.
        starter_options: Options of the starter to change, if the line contains them.
        reads_plan: Whether the change needs the plan file.
    """
    code = manifest.code
    words, start = (code.launch, code.launched_at) if code.launch else (manifest.command, 0)
    head, own = list(words[:start]), list(words[start:])
    comments = [] if code.launched_at else _say_unknown_start(manifest)
    if TRAINER in own and not reads_plan:
        at = own.index(TRAINER) + 1
        own = [*own[:at], *_renamed(_with_options(own[at:], options or {}))]
    elif TRAINER in own:
        at = own.index(TRAINER) + 1
        arguments = _renamed(without_options(own[at:], _DECIDED))
        own = [*own[:at], *arguments, "--plan", plan_file]
        comments += _say_config(arguments)
    else:
        at = _start_of_script(own)
        arguments = _with_options(own[at:], options or {})
        if reads_plan and _reads_plan_option(manifest, arguments):
            arguments = _with_options(arguments, {"--plan": plan_file})
        own = [*_renamed(own[:at]), *arguments]
        head = _with_known_options(head, starter_options or {})
    comment = f"  # {'; '.join(comments)}" if comments else ""
    return f"{shlex.join([*head, *own])}{comment}"


def without_options(words: Sequence[str], names: Collection[str]) -> list[str]:
    """The words without some options and their values."""
    kept, is_removed = list[str](), False
    for word in words:
        if word.startswith("--"):
            is_removed = word.split("=")[0] in names
        if not is_removed:
            kept.append(word)
    return kept


def _start_of_script(words: Sequence[str]) -> int:
    """The position of the script's own arguments, after the script or the module.

    The recorder's options come before its script.
    """
    recorder = next((at for at, word in enumerate(words) if word in _RECORDERS), None)
    if recorder is None:
        for at, word in enumerate(words):
            if word == "-m" or word.endswith(".py"):
                return at + (2 if word == "-m" else 1)
        return len(words)
    at = recorder + 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 1 if "=" in words[at] or words[at] in _FLAGS_OF_RECORDER else 2
    return at + (2 if words[at : at + 1] == ["-m"] else 1)


def _renamed(words: Sequence[str]) -> list[str]:
    """The words with another name of the run."""
    found = list(words)
    for at, word in enumerate(found):
        if word.startswith("--name="):
            found[at] = f"{word}-advised"
        elif word == "--name" and at + 1 < len(found):
            found[at + 1] = f"{found[at + 1]}-advised"
    return found


def _reads_plan_option(manifest: RunManifest, arguments: Sequence[str]) -> bool:
    """Whether the script takes its plan from `--plan`."""
    return any(word.split("=")[0] == "--plan" for word in arguments) and any(
        call.function == "apply_plan" for call in manifest.code.calls
    )


def _with_options(words: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The words with these options, the old values replaced."""
    new = {_plain(name): (name, value) for name, value in options.items()}
    kept, skip = list[str](), False
    for word in words:
        is_value, skip = skip, False
        if _plain(word) in new:
            kept += new.pop(_plain(word))
            skip = "=" not in word
        elif not is_value:
            kept.append(word)
    return [*kept, *(word for pair in new.values() for word in pair)]


def _with_known_options(words: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The words with new values of the options that they contain."""
    given = {_plain(word) for word in words}
    known = {name: value for name, value in options.items() if _plain(name) in given}
    return _with_options(words, known) if known else list(words)


def _plain(word: str) -> str:
    return word.split("=")[0].replace("-", "_")


def _say_config(arguments: Sequence[str]) -> list[str]:
    if not any(word.split("=")[0] == "--config" for word in arguments):
        return []
    return ["remove sharding settings from the config file: the plan sets them"]


def _say_unknown_start(manifest: RunManifest) -> list[str]:
    if manifest.world_size == 1 or manifest.source == "emulated":
        return []
    return [f"start {manifest.world_size} ranks as in the first run"]
