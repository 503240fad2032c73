"""Exceptions that a signal handler raised while the recorder's code ran.

Python runs signal handlers between two instructions of the main thread. If one raises, such as the
handler of torch's `DataLoader` after a worker was killed, the exception comes out of the code that
ran at that moment. It belongs to the training, also if that code was the recorder's.
"""

import signal
import traceback
from types import CodeType


def raise_if_of_signal(error: BaseException) -> None:
    """Raise an exception again if a Python signal handler raised it.

    Raises:
        BaseException: `error` itself, with its traceback.
    """
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not frames.isdisjoint(_handlers()):
        raise error


def _handlers() -> set[CodeType]:
    """The code of the handlers of all signals."""
    codes = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of functools.partial
        for function in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004 - its code
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if isinstance(code, CodeType):
                codes.add(code)
    return codes
