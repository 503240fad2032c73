"""Label an allocation by its category, its metadata or its stack.

The label comes from the first of these that exists: the category of torch's memory profiler
(`profile_plot` snapshots), the training script's metadata if it names a category
(`torch.cuda.memory._set_memory_metadata`), and functions on the stack that only FSDP2 or an
optimizer has (names as in torch 2.13). Labels from the stack are inferred.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_inspect.trace.codes import MemoryCategory
from fsdp_inspect.trace.stack_dumps import StackFrame

UNLABELLED = -1
"""The allocation has no category, metadata or known stack."""

FROM_OPTIMIZER = 100
"""Allocated by an optimizer: state if it stays, temporary if it does not."""
FROM_MODULE = 101
"""Allocated under a module's forward: an activation if it stays, temporary if it does not."""

_BY_PROFILER = {
    "input": MemoryCategory.INPUT,
    "temporary": MemoryCategory.TEMPORARY,
    "activation": MemoryCategory.ACTIVATION,
    "gradient": MemoryCategory.SHARDED_GRADIENT,
    "parameter": MemoryCategory.SHARDED_PARAMETER,
    "optimizer_state": MemoryCategory.OPTIMIZER_STATE,
}
"""torch.profiler's categories, which do not distinguish sharded from unsharded."""

_BY_METADATA = {category.label: category for category in MemoryCategory}

_BY_FUNCTION = {
    "foreach_all_gather_copy_out": MemoryCategory.UNSHARDED_PARAMETER,
    "alloc_all_gather_outputs": MemoryCategory.UNSHARDED_PARAMETER,
    "init_all_gather_outputs": MemoryCategory.UNSHARDED_PARAMETER,
    "init_unsharded_param": MemoryCategory.UNSHARDED_PARAMETER,
    "foreach_all_gather": MemoryCategory.ALL_GATHER_BUFFER,
    "foreach_reduce": MemoryCategory.REDUCE_SCATTER_BUFFER,
    "_init_sharded_param": MemoryCategory.SHARDED_PARAMETER,
}
_BY_FILE = {
    "torch/utils/data/": int(MemoryCategory.INPUT),
    "torch/optim/": FROM_OPTIMIZER,
    "torch/nn/modules/module.py": FROM_MODULE,
}
_STRONGEST_FIRST = tuple(dict.fromkeys([*map(int, _BY_FUNCTION.values()), *_BY_FILE.values()]))
"""Order for a stack with several matches: functions take precedence over files."""


class Labels:
    """Codes for allocations: a `MemoryCategory`, `FROM_...`, or `UNLABELLED`.

    Frames and stacks that many allocations share are labelled once, by identity. They are kept
    alive, so that no other object gets the same identity.
    """

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Any, int]] = {}
        self._stacks: dict[int, tuple[Sequence[Any], int]] = {}

    def of(self, holder: Mapping[str, Any], frames: Sequence[Any]) -> int:
        """The code of one allocation.

        Args:
            holder: The block or trace entry.
            frames: The stack that allocated it.
        """
        written = _written(holder)
        if written is not None:
            return written
        seen = self._stacks.get(id(frames))
        if seen is None:
            codes = {self._of_frame(frame) for frame in frames}
            code = next((code for code in _STRONGEST_FIRST if code in codes), UNLABELLED)
            seen = self._stacks[id(frames)] = (frames, code)
        return seen[1]

    def _of_frame(self, frame: Any) -> int:
        seen = self._frames.get(id(frame))
        if seen is None:
            seen = self._frames[id(frame)] = (frame, _by_frame(frame))
        return seen[1]


def _written(holder: Mapping[str, Any]) -> int | None:
    category = holder.get("category")
    if isinstance(category, str) and category in _BY_PROFILER:
        return _BY_PROFILER[category]
    metadata = holder.get("user_metadata")
    if isinstance(metadata, str) and metadata:
        return _BY_METADATA.get(metadata.strip().lower().replace(" ", "_"))
    return None


def _by_frame(frame: Any) -> int:
    if not isinstance(frame, dict):
        return UNLABELLED
    function, file = frame.get("name"), frame.get("filename")
    if isinstance(function, str) and function in _BY_FUNCTION:
        return _BY_FUNCTION[function]
    if isinstance(file, str):
        return next((code for place, code in _BY_FILE.items() if place in file), UNLABELLED)
    return UNLABELLED


# --- Number the lines of the user's code in the stacks of a snapshot.
#
# A place is the innermost frame that belongs neither to torch nor to an installed package. Stacks
# list the innermost frame first (`torch.cuda.memory._snapshot`).

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
