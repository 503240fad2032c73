"""Has the script imported a module by now? A call right after it did, and no import of our own.

A launcher that imported torch before the script ran would change the script: variables such as
OMP_NUM_THREADS or PYTORCH_ALLOC_CONF, set above the script's `import torch`, would come too late.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(name: str, callback: Callable[[], None]) -> None:
    """Call back once the module's own code has run; at once when it was imported before."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Watch(name, callback))


class _Watch(MetaPathFinder):
    """Finds one module through everybody else, and takes itself away with the first import."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self._callback()

        loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
