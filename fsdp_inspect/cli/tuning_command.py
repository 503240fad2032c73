"""Build the training command of a plan or of the baseline.

A command is a list of words with placeholders: `{plan}` (the plan file), `{runs}` (the folder for
the recorded run), `{name}` (the name of the run) and `{config}` (settings of the trainer). The
baseline has no plan file: its command omits the words with `{plan}` and the options before them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fsdp_inspect.cli.child import TRAINER, torchrun_words
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.reading import MAX_TOML_BYTES, InvalidTextError, parse_toml, read_regular
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN

PLAN, RUNS, NAME, CONFIG = "{plan}", "{runs}", "{name}", "{config}"
_CONFIG_FILE, _CONFIG_UNDER_PLAN = "config.toml", "config-under-plan.toml"
_EMULATE = "emulate"


def fill_placeholders(
    command: Sequence[str], *, folder: Path, name: str, plan: Path | None
) -> list[str]:
    """The command with values in place of its placeholders.

    Args:
        command: The command with placeholders.
        folder: The folder of the session.
        name: The name of the run.
        plan: The plan file; None: the baseline.
    """
    words = list(command) if plan is not None else _without_plan(command)
    config = folder / (_CONFIG_FILE if plan is None else _CONFIG_UNDER_PLAN)
    values = {PLAN: str(plan), RUNS: str(folder), NAME: name, CONFIG: str(config)}
    for placeholder, value in values.items():
        words = [word.replace(placeholder, value) for word in words]
    return words


def trainer_command(
    config: Path | None, *, num_ranks: int | None, options: Sequence[str]
) -> tuple[list[str], int]:
    """The trainer's command with placeholders, and its number of ranks.

    Args:
        config: A TOML file of settings; None: the defaults.
        num_ranks: The number of processes; None: one under emulation, else two.
        options: Further settings, as `--key`, `value`.

    Raises:
        FsdpInspectError: The file cannot be read.
    """
    is_emulated = f"--{_EMULATE}" in options or _setting(config, _EMULATE) is not None
    ranks = num_ranks or (1 if is_emulated else 2)
    start = [sys.executable] if is_emulated else torchrun_words(ranks)
    settings = ["--config", CONFIG] if config is not None else []
    kept = ["--record", "--runs-dir", RUNS, "--name", NAME, "--plan", PLAN]
    return [*start, "-m", TRAINER, *settings, *options, *kept], ranks


def write_configs(config: Path, folder: Path) -> None:
    """Write the settings to a session: unchanged, and without the settings that a plan decides."""
    settings = read_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG_FILE).write_text(tomli_w.dumps(settings))
    (folder / _CONFIG_UNDER_PLAN).write_text(tomli_w.dumps(_left_to_plan(settings)))


def read_config(config: Path) -> dict[str, Any]:
    """The settings of a file.

    Raises:
        FsdpInspectError: The file is unreadable or not TOML.
    """
    try:
        return parse_toml(read_regular(config, MAX_TOML_BYTES))
    except (OSError, InvalidTextError) as error:
        raise FsdpInspectError(
            f"No settings can be read from {str(config)!r}: {error}. Expected a TOML file of the "
            f"trainer's settings. Write one with: python -m {TRAINER} --print-config"
        ) from error


def complaint_about(command: Sequence[str]) -> str | None:
    """The reason why a plan cannot be passed to the user's command; None: it can."""
    if any(PLAN in word for word in command):
        return None
    return (
        f"{PLAN} is missing in the command {' '.join(command)!r}, so it cannot receive a plan. "
        f"Expected {PLAN} for the plan file, and {RUNS} for the folder of runs. Write, for "
        f"example: -- torchrun --nproc-per-node 8 train.py --plan {PLAN} --runs-dir {RUNS}"
    )


def _without_plan(command: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in command:
        if PLAN not in word:
            words.append(word)
        elif word == PLAN and words and words[-1].startswith("-"):
            words.pop()
    return words


def _setting(config: Path | None, name: str) -> Any:
    """A setting of a file, at its top level or in a table; None: it is not set."""
    if config is None:
        return None
    settings = read_config(config)
    tables = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return next((table[name] for table in tables if name in table), None)


def _left_to_plan(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _left_to_plan(value) if isinstance(value, dict) and name != "hf_config" else value
        for name, value in settings.items()
        if name not in DECIDED_BY_PLAN
    }
