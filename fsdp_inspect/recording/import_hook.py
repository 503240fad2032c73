"""Call back right after the script imports a module, without importing that module first.

A launcher that imports torch before the script runs would change the script: variables such as
OMP_NUM_THREADS or PYTORCH_ALLOC_CONF, set above the script's `import torch`, would have no effect.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call back after the module's code has run, or immediately if it is already imported.

    Returns:
        A function after which the callback is neither called nor kept.
    """
    watch = _Watch(name, callback)
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, watch)
    return watch.withdraw


class _Watch(MetaPathFinder):
    """Finds one module through the other finders, until the module is imported.

    It stays in place when a library only checks whether the module exists, as
    `importlib.util.find_spec` does. Such a check does not import the module.
    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching: set[int] = set()
        """Threads that query the other finders."""

    def withdraw(self) -> None:
        """Remove this finder."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or threading.get_ident() in self._searching:
            return None
        spec = self._ask_others(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                self.withdraw()
                self._callback()

        loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec

    def _ask_others(self, fullname: str) -> ModuleSpec | None:
        self._searching.add(threading.get_ident())
        try:
            return importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(threading.get_ident())
