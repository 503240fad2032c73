"""Read the command that started the ranks of a job: `torchrun`, `accelerate launch` or Python."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect.recording.environment import describe_command

_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_PROGRAMS = ("torchrun", "accelerate")


def describe_launch() -> tuple[list[str], int]:
    """The command that started the ranks, with secrets masked, and the start of a rank's part.

    Returns:
        The words, and the number of words of the starter. Without a known starter, the words are
        the command of this process, and the number is 0.
    """
    own = describe_command(sys.orig_argv)
    try:
        import psutil

        starter = psutil.Process(os.getppid()).cmdline() if "RANK" in os.environ else []
    except Exception:  # no psutil, or the parent has ended
        starter = []
    words = shorten_starter(starter)
    if not words:
        return own, 0
    return describe_command(words), _start_of_rank(words, sys.orig_argv)


def shorten_starter(words: Sequence[str]) -> list[str]:
    """The command line of a starter without the paths of the interpreter and the program.

    Returns:
        Empty if the starter is unknown.
    """
    for at, word in enumerate(words[:6]):
        if word == "-m" and at + 1 < len(words):
            module = words[at + 1]
            name = _MODULES.get(module)
            if name is not None:
                return [name, *words[at + 2 :]]
            return ["accelerate", "launch", *words[at + 2 :]] if "accelerate" in module else []
        if Path(word).name in _PROGRAMS:
            return [Path(word).name, *words[at + 1 :]]
    return []


def _start_of_rank(words: Sequence[str], own: Sequence[str]) -> int:
    """The index of the rank's own command in the starter's words; 0: not found.

    torchrun starts `python -u SCRIPT ARGUMENTS` for `torchrun OPTIONS SCRIPT ARGUMENTS`.
    """
    tail = list(own[1:])
    while tail:
        if list(words[-len(tail) :]) == tail:
            return len(words) - len(tail)
        tail.pop(0)
    return 0
