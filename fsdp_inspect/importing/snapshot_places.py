"""Number the lines of the user's code in the stacks of a snapshot.

A place is the innermost frame that belongs neither to torch nor to an installed package. Stacks
list the innermost frame first (`torch.cuda.memory._snapshot`).
"""

from collections.abc import Sequence
from typing import Any

from fsdp_inspect.trace.stack_dumps import StackFrame

NO_PLACE = 0
_MAX_PLACES = 1 << 20
_MAX_NAME = 600


class Places:
    """Numbers places from 1; 0: no line of the user's code.

    Stacks and frames that many allocations share are read once, by identity. They are kept alive,
    so that no other object gets the same identity.
    """

    def __init__(self) -> None:
        self.names = [""]
        """`file:line` by number."""
        self._numbers: dict[str, int] = {}
        self._frames: dict[int, tuple[Any, int]] = {}
        self._stacks: dict[int, tuple[Sequence[Any], int]] = {}

    def of(self, frames: Sequence[Any]) -> int:
        """The number of the place of a stack."""
        seen = self._stacks.get(id(frames))
        if seen is None:
            numbers = map(self._of_frame, frames)
            number = next((number for number in numbers if number != NO_PLACE), NO_PLACE)
            seen = self._stacks[id(frames)] = (frames, number)
        return seen[1]

    def _of_frame(self, frame: Any) -> int:
        seen = self._frames.get(id(frame))
        if seen is None:
            seen = self._frames[id(frame)] = (frame, self._number(_name(frame)))
        return seen[1]

    def _number(self, name: str) -> int:
        if not name:
            return NO_PLACE
        known = self._numbers.get(name)
        if known is None:
            if len(self.names) >= _MAX_PLACES:
                return NO_PLACE
            known = self._numbers[name] = len(self.names)
            self.names.append(name)
        return known


def _name(frame: Any) -> str:
    """The line of a frame; empty for torch, libraries and native code."""
    if not isinstance(frame, dict):
        return ""
    file, line = frame.get("filename"), frame.get("line")
    if not isinstance(file, str) or type(line) is not int or not 0 < line < 1 << 30:
        return ""
    is_python = file.endswith(".py") or file.startswith("<ipython")
    is_torch = "/torch/" in file or file.startswith("torch/")
    if not is_python or is_torch or StackFrame(file, line, "").is_library:
        return ""
    return f"{file[-_MAX_NAME:]}:{line}"
