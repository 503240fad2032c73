"""Call a function when this process ends."""

import atexit
import multiprocessing
from collections.abc import Callable
from multiprocessing.util import Finalize


def call_at_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Call a function when this process ends, also in a child that `multiprocessing` forked.

    Such a child runs no exit handlers of Python, only the finalizers of `multiprocessing`. In a
    spawned child both run, so the function must allow a second call.

    Returns:
        A function that cancels the call.
    """
    atexit.register(function)
    is_child = multiprocessing.parent_process() is not None
    finalizer = Finalize(None, function, exitpriority=0) if is_child else None

    def cancel() -> None:
        atexit.unregister(function)
        if finalizer is not None:
            finalizer.cancel()

    return cancel
