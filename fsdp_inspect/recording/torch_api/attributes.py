"""Set attributes on objects of other libraries, and restore them later."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_ABSENT = object()


class _Change:
    """A value that an attribute received, and the one that it had before."""

    def __init__(self, value: Any, before: Any) -> None:
        self.value = value
        self.before = before


_changes: dict[tuple[int, str], list[_Change]] = {}
"""Changes that are not restored yet, by the identity of the target and the attribute."""


def set_attribute(target: object, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on an instance, class or module itself.

    Changes of one attribute may be restored in any order: two recorders in one process may end in
    either order. After the last one, the attribute is what it was before the first.

    Returns:
        A function that restores or deletes the attribute. If other code has replaced the value in
        the meantime, that code's value stays.
    """
    change = _Change(value, vars(target).get(name, _ABSENT))
    key = id(target), name
    _changes.setdefault(key, []).append(change)
    setattr(target, name, value)

    def restore() -> None:
        changes = _changes.get(key, [])
        if change not in changes:
            return
        changes.remove(change)
        if not changes:
            del _changes[key]
        if vars(target).get(name) is value:
            if change.before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, change.before)
        else:
            for later in changes:
                if later.before is value:
                    later.before = change.before

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
