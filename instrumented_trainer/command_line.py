"""Parse the settings: the command line overrides a TOML file, which overrides the defaults.

Every setting `some_name` is `--some-name VALUE` on the command line and `some_name = VALUE` in the
file, at its top or in the table of its section. A flag is also `--flag` or `--no-flag`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import ValidationError

from fsdp_inspect.error_text import describe_validation_error, quote_all, suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.reading import MAX_TOML_BYTES, InvalidTextError, parse_toml, read_regular
from instrumented_trainer.config import (
    Section,
    TrainerConfig,
    legal_values,
    meaning_of,
    section_of,
)

_PROGRAM = "python -m instrumented_trainer"
_HELP = ("-h", "--help")
_DESCRIPTION = """\
Train a model with PyTorch FSDP (or another sharder) and record the cost of each of its units.

  torchrun --nproc-per-node 2 -m instrumented_trainer
  torchrun --nproc-per-node 4 -m instrumented_trainer --mesh 2x2 --wrap every:2
  torchrun --nproc-per-node 8 -m instrumented_trainer --config llama.toml --steps 100
  python -m instrumented_trainer --print-config > my.toml

On a machine with GPUs it trains on them with NCCL and bfloat16, otherwise on CPU with gloo.
"""


class ParsedCommand:
    """The parsed command: settings for a run, or a text to print."""

    def __init__(self, config: TrainerConfig, text: str | None = None) -> None:
        self.config = config
        self.text = text
        """The text to print instead of training; None means train."""


def parse_command(arguments: Sequence[str]) -> ParsedCommand:
    """Parse a command line.

    Raises:
        ConfigError: A flag or key is unknown (the message suggests a similar one), or a value is
            invalid (the message has the legal values).
    """
    parser = _build_parser()
    if any(argument in _HELP for argument in arguments):
        return ParsedCommand(TrainerConfig(), parser.format_help())
    given = vars(parser.parse_args(arguments))
    path = given.pop("config")
    print_config = given.pop("print_config")
    settings = {**(read_file(Path(path)) if path else {}), **given}
    config = check_settings(settings)
    return ParsedCommand(config, render_config(config) if print_config else None)


def check_settings(settings: Mapping[str, Any]) -> TrainerConfig:
    """Validate settings by name.

    Raises:
        ConfigError: A name is unknown, or a value is invalid.
    """
    try:
        return TrainerConfig.model_validate(dict(settings))
    except ValidationError as error:
        keys = {"": tuple(TrainerConfig.model_fields)}
        places = [str(complaint["loc"][0]) for complaint in error.errors() if complaint["loc"]]
        legal = " ".join(
            f"{name}: {legal_values(name)}."
            for name in dict.fromkeys(places)
            if name in TrainerConfig.model_fields
        )
        complaint = describe_validation_error(error, legal_keys=keys)
        advice = f"Legal values of {legal}" if legal else "See --help for every setting."
        raise ConfigError(f"{complaint} {advice}") from error


def render_config(config: TrainerConfig) -> str:
    """Render the settings as a TOML file, with the meaning of each setting."""
    values = config.model_dump(mode="json")
    lines = ["# Settings of instrumented_trainer; use with --config FILE."]
    for section in Section:
        lines += ["", f"[{section}]"]
        for name in (n for n in values if section_of(n) == section):
            lines.append(f"# {meaning_of(name)} ({legal_values(name)})")
            if values[name] is None:
                lines.append(f"# {name} =")
            else:
                lines.append(_toml_line(name, values[name]))
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: Any) -> str:
    if isinstance(value, dict):  # JSON in a string keeps any nesting on one line
        import json

        value = json.dumps(value)
    if isinstance(value, list):
        value = ",".join(value)
    return tomli_w.dumps({name: value}).rstrip("\n")


class _Parser(argparse.ArgumentParser):
    """A parser that raises the program's own errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See --help for every setting.")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: None = None
    ) -> argparse.Namespace:
        known, unknown = self.parse_known_args(list(args), namespace)
        if not unknown:
            return known
        flags = [flag for action in self._actions for flag in action.option_strings]
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise ConfigError(
                f"Unexpected argument {name!r}. Expected settings as --key value. Quote values "
                "with spaces; see --help for every setting."
            )
        raise ConfigError(
            f"Unknown setting {name!r}. {suggest(name, flags, what='settings')} "
            "See --help for every setting."
        )


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="%(prog)s [--config FILE.toml] [--key VALUE ...]",
    )
    general = parser.add_argument_group("general")
    general.add_argument(*_HELP, action="store_true", help="Show this help.")
    general.add_argument(
        "--config",
        metavar="FILE",
        default=None,
        help="Read settings from a TOML file; the command line overrides them.",
    )
    general.add_argument(
        "--print-config",
        action="store_true",
        default=False,
        help="Print all settings as a TOML file and exit.",
    )
    for section in Section:
        group = parser.add_argument_group(str(section))
        for name in (n for n in TrainerConfig.model_fields if section_of(n) == section):
            _add_setting(group, name)
    return parser


def _add_setting(group: argparse._ArgumentGroup, name: str) -> None:
    field = TrainerConfig.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    default = _show_default(field.get_default(call_default_factory=True))
    text = f"{meaning_of(name)} [{legal_values(name)}; default: {default}]".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag, nargs="?", const="true", metavar="BOOL", dest=name, help=text)
        group.add_argument(
            f"--no-{flag[2:]}",
            action="store_const",
            const="false",
            dest=name,
            help=argparse.SUPPRESS,
        )
    else:
        group.add_argument(flag, metavar="VALUE", dest=name, help=text)


def _show_default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value or value == 0 else "none"


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file; only their names are checked.

    Raises:
        ConfigError: The file cannot be read, or has an unknown setting.
    """
    try:
        tables = parse_toml(read_regular(path, MAX_TOML_BYTES))
    except OSError as error:
        raise ConfigError(
            f"The settings file {str(path)!r} cannot be read: {error}. Expected a TOML file. "
            "Pass an existing one, or write one with --print-config."
        ) from error
    except InvalidTextError as error:
        raise ConfigError(
            f"The settings file {str(path)!r} cannot be parsed: {error}. Correct the file."
        ) from error
    settings: dict[str, Any] = {}
    for key, value in tables.items():
        if key in set(Section) and isinstance(value, dict):
            settings |= _read_section(path, Section(key), value)
        else:
            _expect_known(path, key)
            settings[key] = value
    return settings


def _read_section(path: Path, section: Section, values: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in values:
        _expect_known(path, key, inside=f" in [{section}]")
        if section_of(key) != section:
            raise ConfigError(
                f"{str(path)!r} sets {key!r} in [{section}]. Expected it in [{section_of(key)}], "
                "or at the top of the file. Move it there."
            )
    return values


def _expect_known(path: Path, key: str, inside: str = "") -> None:
    known = list(TrainerConfig.model_fields)
    if key not in known:
        raise ConfigError(
            f"{str(path)!r} sets {key!r}{inside}, which is an unknown setting. "
            f"{suggest(key, [*known, *(str(s) for s in Section)], what='settings')} Tables are "
            f"{quote_all(str(section) for section in Section)}. See --help for every setting."
        )
