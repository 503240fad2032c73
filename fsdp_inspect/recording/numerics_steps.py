"""Choose the numerics steps of a recording, and write their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_inspect.recording.numerics import StepObserver
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.store.schema import NUMERICS_FILE

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import UnitHandle
    from fsdp_inspect.store.writer import RankWriter

_MOST_REQUESTED = 3
"""The most numerics steps that values which are not finite start."""


class NumericsSteps:
    """Runs the numerics steps of a recording, and keeps their lines until they are written."""

    def __init__(
        self,
        session: Session,
        writer: RankWriter,
        every: int,
        handles: Sequence[UnitHandle],
    ) -> None:
        """Choose each step whose number is a multiple of `every`; 0: no step."""
        self._session = session
        self._writer = writer
        self._every = every
        self._handles = handles
        self._lines: list[bytes] = []
        self._is_requested = False
        self._num_requested = 0

    def request(self) -> None:
        """Make the next step a numerics step, because a value is not finite; a few times."""
        if self._num_requested < _MOST_REQUESTED:
            self._is_requested = True

    def begin(self) -> None:
        """Look at the values of the step that begins now, if it is a numerics step.

        A requested step holds no copy of the shards: the user did not reckon with its memory.
        A memory step is never a numerics step, because the storage tracker would count the copies.
        """
        session = self._session
        is_chosen = self._every > 0 and session.step % self._every == 0
        if not (is_chosen or self._is_requested):
            return
        if session.tracker is None and session.numerics is None:
            self._num_requested += not is_chosen
            self._is_requested = False
            session.numerics = StepObserver(session.step, self._handles, keeps_copies=is_chosen)

    def end(self) -> None:
        """Write the line of the step, if it was a numerics step."""
        numerics, self._session.numerics = self._session.numerics, None
        if numerics is None:
            return
        try:
            origin = self._writer.record.origin
            line = numerics.encode(origin) if numerics.problem is None else b""
        except Exception as error:
            raise_if_of_signal(error)
            numerics.problem, line = error, b""
        if numerics.problem is not None:
            self._session.problem(
                f"Step {self._session.step} has no numerics: {numerics.problem!r}."
            )
            return
        self._lines.append(line)
        self._writer.write_file(NUMERICS_FILE, self._write)

    def abandon(self) -> None:
        """Stop observing; nothing is written."""
        self._session.numerics = None

    def _write(self) -> None:
        lines = list(self._lines)
        with (self._writer.folder / NUMERICS_FILE).open("ab") as file:
            file.write(b"".join(lines))
        del self._lines[: len(lines)]
