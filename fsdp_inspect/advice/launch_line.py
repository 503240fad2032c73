"""Write the launch line of a recorded run with a plan applied, without conflicting options."""

import shlex
from collections.abc import Collection, Mapping, Sequence

from fsdp_inspect.trace.plan import DECIDED_BY_PLAN
from fsdp_inspect.trace.run import RunManifest

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
    if TRAINER in own:
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
