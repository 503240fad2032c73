"""Call a key-value store whose server may not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

ANSWER_S = 5.0
"""The time that a call waits for its answer. With a thousand ranks on one server, a call takes less
than 1 s."""


class StoreClient:
    """Calls a process group's store in a thread; the caller waits for a limited time.

    One rank may be the server of the store. If that rank is stopped, a call of torch's store has
    no end and no timeout.
    """

    def __init__(self, store: Any, answer_s: float | None = None) -> None:
        """Start the thread of the calls.

        Args:
            store: A clone of the process group's store that only this object uses.
            answer_s: The time that a call waits, seconds; None: `ANSWER_S`.
        """
        self._store = store
        self._answer_s = ANSWER_S if answer_s is None else answer_s
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._is_lost = False
        threading.Thread(target=self._work, name="fsdp-inspect-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value. Raises as `get`."""
        value: int = self._call(lambda: self._store.add(key, amount))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist. Raises as `get`."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """The value of a key that exists.

        Raises:
            RuntimeError: The store does not answer, now or in an earlier call.
        """
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key. Raises as `get`."""
        self._call(lambda: self._store.set(key, value))

    def _call(self, call: Callable[[], Any]) -> Any:
        if self._is_lost:
            raise RuntimeError("an earlier call had no answer")
        self._calls.put(call)
        try:
            answer, error = self._answers.get(timeout=self._answer_s)
        except queue.Empty:
            self._is_lost = True
            raise RuntimeError(f"no answer within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return answer

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                answer, error = call(), None
            except Exception as raised:
                answer, error = None, raised
            self._answers.put((answer, error))
