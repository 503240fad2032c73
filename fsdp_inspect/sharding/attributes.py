"""How is an object that is not ours left as it was? An attribute set on it, and the taking back."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


def set_attribute(target: object, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on an instance, class or module itself.

    Returns:
        What restores or deletes it. Where somebody else has replaced our value in the meantime
        theirs stays: taking it away would remove a change that is not ours.
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
