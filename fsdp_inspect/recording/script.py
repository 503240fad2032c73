"""Run a script exactly as the Python interpreter would run it.

[Note: What a script can see]
`sys.argv`, `sys.path[0]`, `__main__` with its `__file__`, `__spec__` and `__package__`, exit codes
and the text of tracebacks equal those of `python script.py` or `python -m module`. The module
`__main__` stays in place until the process ends, so that pickles, spawned DataLoader workers and
exit handlers find it (the public `runpy` functions restore the old one).
"""

import builtins
import io
import os
import pkgutil
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple


class Target(NamedTuple):
    """The script or module to run."""

    name: str
    """Path of a script (or of a folder or archive with a `__main__.py`), or name of a module."""
    arguments: Sequence[str]
    is_module: bool


def run_as_main(target: Target) -> None:
    """Run the target as the main program of this process; its exceptions propagate.

    Args:
        target: The script or module; a script must exist.
    """
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if target.is_module:
        sys.argv[:] = ["-m", *target.arguments]
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
        return
    sys.argv[:] = [target.name, *target.arguments]
    path = os.path.abspath(target.name)  # noqa: PTH100 - links stay, as Python does it
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, added by `python -m`
    if Path(path).is_dir() or zipfile.is_zipfile(path):
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(os.path.realpath(path)).parent))
    _run_file(path, main)


def trim_traceback(error: BaseException) -> None:
    """Make Python print the same traceback as without a launcher.

    Args:
        error: The exception of `run_as_main`, about to be raised again.
    """
    first = _first_of_script(error.__traceback__)
    shown = sys.excepthook

    def show(
        kind: type[BaseException], value: BaseException, where: types.TracebackType | None
    ) -> None:
        if value is error:
            value, where = value.with_traceback(first), first
        shown(kind, value, where)

    sys.excepthook = show


def _run_file(path: str, main: types.ModuleType) -> None:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # a .pyc
    if code is None:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__package__ = None
    exec(code, vars(main))


def _first_of_script(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback below this file's frames; None if the script could not be compiled."""
    place, own = traceback, None
    while place is not None and (own is None or place.tb_frame.f_code.co_filename == __file__):
        if place.tb_frame.f_code.co_filename == __file__:
            own = place
        place = place.tb_next
    return traceback if own is None else own.tb_next
