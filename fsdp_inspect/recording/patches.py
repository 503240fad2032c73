"""Change objects of other libraries, and undo each change."""

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

from fsdp_inspect.recording.torch_api.attributes import set_attribute


class Patches:
    """Attributes set on objects of other libraries, and callbacks that undo other changes.

    `undo` restores in reverse order, by the rules of `torch_api.attributes`.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, target: object, name: str, value: Any) -> None:
        """Set `target.name` on the object itself; `undo` restores or deletes it.

        A function gets the place of the method of a class that it replaces: pickle looks it up.
        """
        if isinstance(target, type) and isinstance(value, FunctionType):
            value.__module__ = target.__module__
            value.__qualname__ = f"{target.__qualname__}.{name}"
        self._undo.append(set_attribute(target, name, value))

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Call this function on `undo`."""
        self._undo.append(callback)

    def undo(self) -> None:
        """Undo every change, once; a failing callback does not stop the others."""
        while self._undo:
            restore = self._undo.pop()
            with contextlib.suppress(ReferenceError):
                restore()


class Guard(Protocol):
    """Whether the recording is active, and the receiver of internal errors."""

    active: bool

    def fail(self, error: BaseException) -> None:
        """Report an exception of a hook; should set `active` to False."""
        ...


def wrap_call(
    original: Callable[..., Any],
    before: Callable[..., Any],
    after: Callable[[Any, Any], None] | None,
    guard: Guard,
) -> Callable[..., Any]:
    """Return a function that calls `original` between `before(*args)` and `after(token, result)`.

    Exceptions of `original` propagate; exceptions of `before` and `after` go to `guard.fail` only.
    `after` is not called if `original` raises. Neither is called while `guard` is inactive.
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


def describe_internal(error: BaseException) -> str:
    """An error of the recorder with its place: `an internal error at name:12: ValueError()`."""
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {where[-1].name}:{where[-1].lineno}" if where else ""
    try:
        described = repr(error)
    except Exception:  # an error that cannot be described must not reach the training
        described = type(error).__name__
    return f"an internal error{place}: {described}"


def warn(message: str) -> None:
    """Issue a warning of the recorder; if warnings are errors, log it instead."""
    try:
        warnings.warn(f"fsdp_inspect: {message}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger("fsdp_inspect").warning("%s", message)
