"""Emulate many ranks on one device: `python -m fsdp_inspect.emulate`.

    python -m fsdp_inspect.emulate --world-size 64 --bandwidth 50GB/s --latency 20us train.py ARGS
    python -m fsdp_inspect.emulate --preset h200-ib400 --world-size 64 -m pkg.train ARGS

The script runs as rank 0 of N. Its `init_process_group` creates torch's fake process group, and
`RANK`, `WORLD_SIZE` and related variables have the values that torchrun would set. The kernels, the
allocator and FSDP2's scheduling are real; the network is a model (see `emulation`). The run is
recorded as by `fsdp_inspect.record`, and marked as emulated.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_inspect.emulation.network import Specification, parse_specification
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.recording.launcher import (
    LauncherArguments,
    RankParser,
    add_options,
    launch_script,
    read_arguments,
    say,
)
from fsdp_inspect.trace.links import PRESETS

_DESCRIPTION = """\
Run a training script as rank 0 of many emulated ranks on one device, and
record it.

The kernels, the memory and FSDP2's scheduling are real; a model replaces the
network. Step time, exposed communication and peak memory are those of rank 0
of N. The loss is meaningless, because the other ranks' data and parameters are
missing.
"""

_EPILOG = """\
presets:
{presets}

examples:
  python -m fsdp_inspect.emulate --world-size 64 --bandwidth 50GB/s --latency 20us train.py
  python -m fsdp_inspect.emulate --preset h200-ib400 --world-size 64 -m pkg.train
  fsdp-inspect show runs/<run>        show the result in the terminal
"""

_OPTIONS = {
    "preset": "emulate the links of a real machine: " + ", ".join(PRESETS),
    "world-size": "number of ranks; the script runs as rank 0 (default: one node of the preset)",
    "gpus-per-node": "ranks per node (default: the preset's; 8 with links between nodes)",
    "bandwidth": "bus bandwidth of a process group inside a node, such as 50GB/s or 400Gbit/s",
    "latency": "latency of a collective inside a node, such as 20us (default: 20us)",
    "inter-bandwidth": "bandwidth of one rank's network card, for groups that cross nodes",
    "inter-latency": "latency of a collective of a group that crosses nodes",
}


class EmulationArguments(NamedTuple):
    """The parsed and validated command line."""

    specification: Specification
    recording: LauncherArguments


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script as rank 0 of N under a recorder; exit as the script exits.

    Args:
        arguments: The command line; None means that of this process.
    """
    given = parse_emulation_arguments(sys.argv[1:] if arguments is None else arguments)
    from fsdp_inspect.emulation.process import emulate

    try:
        emulation = emulate(given.specification)
        emulation.__enter__()
    except FsdpInspectError as error:
        say(str(error))
        raise SystemExit(2) from None
    say(f"emulated: {given.specification}. The network is a model; the loss is meaningless.")
    try:
        launch_script(given.recording)
    finally:
        emulation.__exit__(None, None, None)


def parse_emulation_arguments(arguments: Sequence[str]) -> EmulationArguments:
    """Parse the launcher's own options; the script's name and the rest belong to the script.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: 0 after `--help`; 2, with a message on stderr, if an option is unknown or
            invalid or the script does not exist.
    """
    parser = RankParser(
        prog="python -m fsdp_inspect.emulate",
        usage="python -m fsdp_inspect.emulate [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(presets=_describe_presets()),
    )
    for name, meaning in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=meaning)
    add_options(parser)
    given = parser.parse_args(arguments)
    words = {name.replace("-", "_"): value for name in _OPTIONS if (value := _given(given, name))}
    try:
        specification = parse_specification(",".join(f"{k}={v}" for k, v in words.items()))
    except FsdpInspectError as error:
        parser.error(str(error))
    own = {name.replace("-", "_") for name in _OPTIONS}
    return EmulationArguments(specification, read_arguments(parser, given, own))


def _given(given: argparse.Namespace, name: str) -> str | None:
    value: str | None = getattr(given, name.replace("-", "_"))
    return value


def _describe_presets() -> str:
    return "\n".join(
        f"  {preset.name}\n{_indent(f'{preset}')}\n{_indent(f'Source: {preset.source}')}"
        for preset in PRESETS.values()
    )


def _indent(text: str) -> str:
    margin = " " * 4
    return textwrap.fill(
        text, 79, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
