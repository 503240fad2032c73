"""Find the line of the user's code that the running thread executes."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fsdp_inspect.trace.black_box import CodePlace

OWN_PACKAGES = ("fsdp_inspect", "instrumented_trainer")
FRAMEWORKS = frozenset(
    {
        "accelerate",
        "axolotl",
        "lightning",
        "lightning_fabric",
        "nemo",
        "peft",
        "pytorch_lightning",
        "torchtitan",
        "torchtune",
        "transformers",
        "trl",
        "verl",
    }
)
"""Packages that are often run from a clone, outside the installed packages."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
_SKIPPED, _MODULE, _LIBRARY, _USER = range(4)
_CALL_OF_MODULE = str(Path("torch", "nn", "modules", "module.py"))
_MAX_PLACES = 1000
_KEEPS_VARIABLES = sys.version_info < (3, 13)
_UNSHARED = 3
"""The references to a copy of variables that only its frame and `read_variables` use."""
T = TypeVar("T")


def package_of(frame: FrameType) -> str | None:
    """The package of a frame; empty: the user's code; None: the standard library."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    if module == "__main__":  # `python -m package` runs the package's __main__
        module = getattr(frame.f_globals.get("__spec__"), "name", module)
    top = module.partition(".")[0]
    if top in OWN_PACKAGES or top in FRAMEWORKS or top == "torch":
        return top
    parts = Path(file).parts
    for name in _INSTALLED:
        if name in parts:
            return parts[parts.index(name) + 1].removesuffix(".py")
    return None if file.startswith(("<", _STANDARD_LIBRARY)) else ""


def read_variables(frame: FrameType, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Read variables of a function that runs in this thread, and do not keep them alive.

    Before Python 3.13, `f_locals` of a function is a copy, which its frame keeps until the function
    returns: a tensor that the function deletes would stay in memory. So the copy is emptied, unless
    it has other users: `locals()` in the function returns the same copy, and debuggers write it
    back.

    Args:
        frame: The frame of the function.
        read: Reads the variables.
    """
    variables = frame.f_locals
    try:
        return read(variables)
    finally:
        is_copy = _KEEPS_VARIABLES and frame.f_code.co_flags & CO_OPTIMIZED
        if is_copy and sys.gettrace() is None and sys.getrefcount(variables) == _UNSHARED:
            variables.clear()


def find_calling_line(frame: FrameType | None) -> str:
    """The user's line on a stack, `file:line`; empty if there is none."""
    while frame is not None:
        if package_of(frame) == "":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Stack(NamedTuple):
    """The frames of a place, with their distances from the frame of the walk's start."""

    user: FrameType | None
    levels: int
    inner: FrameType | None
    inner_levels: int
    loop: tuple[int, FrameType | None] = (0, None)
    """The frame of the training loop that called the model, and its distance."""


_Known: TypeAlias = tuple[int, CodeType, int]
"""A frame: the level on the stack, the code and the instruction."""


class CodePlaces:
    """Numbers the lines of code that lead to collectives, from 1.

    A place is the innermost line of the user's code on the stack, with the innermost line of a
    library (not torch) that it called, and with the line of the training loop that called the
    model. Without a line of the user's code, the place is the library's line.
    """

    def __init__(self, own: Sequence[str] = OWN_PACKAGES) -> None:
        """Skip the lines of the packages `own`, as those of torch."""
        self._own = own
        self._sorts: dict[str, int] = {}
        """The kind of each file: skipped (torch, standard library, FSDP Inspect), the calls of
        modules, a library, or the user's code."""
        self._numbers: dict[tuple[object, ...], int] = {}
        self._kept: list[CodeType] = []
        """The code objects whose ids are in `_numbers`, so that no other object gets these ids."""
        self._last: dict[int, tuple[int, list[_Known]]] = {}
        """The number and the frames of the last place of each unit."""
        self.new: list[tuple[int, CodePlace]] = []
        """Places found since this list was last emptied."""

    def find_again(self, unit: int) -> int:
        """The number of the place of the caller's caller, which issues a collective of a unit.

        A unit is nearly always called from the same line, at the same depth of the stack. So this
        looks at the frames of the unit's last place first. A walk over all frames takes 20 µs or
        more with cold caches.
        """
        last = self._last.get(unit)
        if last is not None:
            number, known = last
            try:
                for level, code, instruction in known:
                    frame = sys._getframe(level)
                    if frame.f_code is not code or frame.f_lasti != instruction:
                        break
                else:
                    return number
            except ValueError:  # the stack is not that deep
                pass
        place = self._walk(sys._getframe(2))
        place = place._replace(loop=self._find_loop(place))
        number = self._number(place)
        if place.user is None or not number:
            self._last.pop(unit, None)
            return number
        frames = ((place.levels, place.user), (place.inner_levels, place.inner), place.loop)
        self._last[unit] = (
            number,
            [(each + 2, frame.f_code, frame.f_lasti) for each, frame in frames if frame],
        )
        return number

    def last_of(self, unit: int) -> int:
        """The number of the last place of a unit; 0: unknown."""
        last = self._last.get(unit)
        return 0 if last is None else last[0]

    def find(self, frame: FrameType | None) -> int:
        """The number of the place of a frame; 0: no such line, or there are too many places.

        The line of the training loop is left out, because that walk takes three times as long.
        """
        return self._number(self._walk(frame))

    def _walk(self, frame: FrameType | None) -> _Stack:
        """Find the innermost frame of the user's code, and the innermost frame of a library."""
        inner: FrameType | None = None
        levels = inner_levels = 0
        sorts = self._sorts
        while frame is not None:
            sort = sorts.get(frame.f_code.co_filename)
            if sort is None:
                sort = self._sort(frame)
            if sort == _USER:
                break
            if sort == _LIBRARY and inner is None:
                inner, inner_levels = frame, levels
            frame = frame.f_back
            levels += 1
        return _Stack(frame, levels, inner, inner_levels)

    def _find_loop(self, place: _Stack) -> tuple[int, FrameType | None]:
        """The user's innermost frame outside of the calls of modules; None: `place` is outside."""
        loop: FrameType | None = None
        levels, loop_levels, is_inside = place.levels, 0, False
        frame = None if place.user is None else place.user.f_back
        while frame is not None:
            levels += 1
            sort = self._sorts.get(frame.f_code.co_filename)
            if sort is None:
                sort = self._sort(frame)
            if sort == _MODULE:
                loop, is_inside = None, True
            elif sort == _USER and is_inside and loop is None:
                loop, loop_levels = frame, levels
            frame = frame.f_back
        return loop_levels, loop

    def _number(self, place: _Stack) -> int:
        frame, inner = place.user, place.inner
        if frame is None:
            frame, inner = inner, None
            if frame is None:
                return 0
        loop = place.loop[1]
        frames = [each for each in (frame, inner, loop) if each is not None]
        key = (inner is None, *((id(each.f_code), each.f_lasti) for each in frames))
        return self._numbers.get(key) or self._add(key, frame, inner, loop)

    def _sort(self, frame: FrameType) -> int:
        package = package_of(frame)
        sort = _LIBRARY if package else _USER
        if package is None or package == "torch" or package in self._own:
            is_call = frame.f_code.co_filename.endswith(_CALL_OF_MODULE)
            sort = _MODULE if is_call else _SKIPPED
        self._sorts[frame.f_code.co_filename] = sort
        return sort

    def _add(
        self,
        key: tuple[object, ...],
        frame: FrameType,
        inner: FrameType | None,
        loop: FrameType | None,
    ) -> int:
        if len(self._numbers) >= _MAX_PLACES:
            return 0
        self._kept += [each.f_code for each in (frame, inner, loop) if each is not None]
        called = from_loop = ""
        if inner is not None:
            called = f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno}"
        if loop is not None:
            from_loop = f"{_short(loop.f_code.co_filename)}:{loop.f_lineno}"
        number = self._numbers[key] = len(self._numbers) + 1
        code = frame.f_code
        place = CodePlace(_short(code.co_filename), frame.f_lineno, code.co_name, called, from_loop)
        self.new.append((number, place))
        return number


def _short(file: str) -> str:
    """A path relative to the working directory, if the file is in it."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else file
    except (ValueError, OSError):
        return file
