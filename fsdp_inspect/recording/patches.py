"""Make changes to objects that are not ours, each with its undoing."""

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from fsdp_inspect.sharding.attributes import set_attribute


class Patches:
    """Attributes set on objects that are not ours, and callbacks that take other changes back.

    `undo` restores in reverse order, by the rules of `sharding.attributes`.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, target: object, name: str, value: Any) -> None:
        """Set `target.name` on the object itself; undoing restores or deletes it."""
        self._undo.append(set_attribute(target, name, value))

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Call this when everything is taken back."""
        self._undo.append(callback)

    def undo(self) -> None:
        """Take everything back, once; a failing restore does not stop the others."""
        while self._undo:
            restore = self._undo.pop()
            with contextlib.suppress(ReferenceError):
                restore()


class Guard(Protocol):
    """Who says whether we still record, and hears of our own errors."""

    active: bool

    def fail(self, error: BaseException) -> None:
        """One of our hooks raised; expected to set `active` to False."""
        ...


def wrap_call(
    original: Callable[..., Any],
    before: Callable[..., Any],
    after: Callable[[Any, Any], None] | None,
    guard: Guard,
) -> Callable[..., Any]:
    """A function that calls `original` between `before(*args)` and `after(token, result)`.

    Whatever `original` raises goes through; what `before` and `after` raise goes to `guard.fail`
    only. `after` is not called when `original` raised, neither of them while `guard` is inactive.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not guard.active:
            return original(*args, **kwargs)
        token = None
        try:
            token = before(*args, **kwargs)
        except Exception as error:
            guard.fail(error)
        result = original(*args, **kwargs)
        if after is not None and guard.active:
            try:
                after(token, result)
            except Exception as error:
                guard.fail(error)
        return result

    wrapped.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapped


def warn(message: str) -> None:
    """One warning of the recorder; where warnings are errors it is logged, and never raised."""
    try:
        warnings.warn(f"fsdp_inspect: {message}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger("fsdp_inspect").warning("%s", message)
