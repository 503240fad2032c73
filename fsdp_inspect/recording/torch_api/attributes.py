"""Set attributes on objects of other libraries, and restore them later."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_ABSENT = object()


def set_attribute(target: object, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on an instance, class or module itself.

    Returns:
        A function that restores or deletes the attribute. If other code has replaced the value in
        the meantime, that code's value stays.
    """
    before = vars(target).get(name, _ABSENT)
    setattr(target, name, value)

    def restore() -> None:
        if vars(target).get(name) is not value:
            return
        if before is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, before)

    return restore


def replace_everywhere(
    undo: ExitStack, replacements: Mapping[Callable[..., Any], Callable[..., Any]]
) -> None:
    """Replace functions in every loaded module until `undo` is closed.

    It also finds modules that imported a function under another name.
    """
    by_id = {id(original): replacement for original, replacement in replacements.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            replacement = by_id.get(id(value))
            if replacement is not None and module.__name__ != replacement.__module__:
                undo.callback(set_attribute(module, name, replacement))
