"""How is torch left as it was? Attributes that are replaced for as long as an emulation runs."""

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def replace_attribute(undo: ExitStack, target: object, name: str, value: Any) -> None:
    """Set an attribute of a class or module until `undo` is closed.

    Where somebody else has replaced our value in the meantime, theirs stays.
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

    undo.callback(restore)
