"""Start and stop the watchers of a rank together: watchdog, order check, stack files.

[Note: The store]
The ranks communicate through the key-value store of the default process group. A store client
serves one call at a time, so each thread has a clone, and the training never waits for a call of
the watchdog. The watchdog waits for an answer for a limited time, because the server may be in the
rank that hangs. A store that cannot be cloned (torch before 2.7, or a store class of the script) is
not used, and the run notes it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from fsdp_inspect.errors import DesyncError
from fsdp_inspect.recording.folders import StackFiles
from fsdp_inspect.recording.order_check import OrderCheck
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.torch_api.process_groups import StoreClient, default_store
from fsdp_inspect.recording.watchdog import Watchdog, WatchSettings
from fsdp_inspect.store.schema import DESYNC_FILE

if TYPE_CHECKING:
    from fsdp_inspect.recording.black_box import BlackBoxWriter
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.store.writer import RankWriter


class Surveillance:
    """The watchers of one rank."""

    def __init__(
        self,
        session: Session,
        box: BlackBoxWriter,
        writer: RankWriter,
        key: str,
        settings: WatchSettings,
    ) -> None:
        """Prepare the watchers; `key` is the prefix of this recording's keys in the store."""
        self._session = session
        self._box = box
        self._writer = writer
        self._settings = settings
        self._has_desync = False
        self._patches = Patches()
        self._stacks = StackFiles(writer.folder, with_source=settings.with_source)
        self._watchdog = Watchdog(session, box, writer, self._stacks, settings)
        self._gate: OrderCheck | None = None
        """The comparison before each optimizer step; None: not requested."""
        cloned = self._clone_store() if settings.world_size > 1 else None
        if cloned is None:
            return
        store = StoreClient(cloned)
        order = self._order_check(store, key) if settings.on_desync != "off" else None
        self._watchdog.connect(store, key, order)
        if settings.on_desync == "raise":
            self._gate = self._order_check(self._clone_store(), f"{key}/gate")

    def _order_check(self, store: Any, prefix: str) -> OrderCheck:
        given = self._settings
        return OrderCheck(
            store, prefix, given.rank, self._box, self._contents_at_desync, given.unit_names
        )

    def _contents_at_desync(self) -> bytes:
        """The black box at a difference. The first one is kept: later collectives overwrite it."""
        contents = self._watchdog.contents()
        if not self._has_desync:
            self._has_desync = True
            path = self._writer.folder / DESYNC_FILE

            def write() -> None:
                path.write_bytes(contents)

            self._writer.write_file(DESYNC_FILE, write)
        return contents

    @property
    def standstills(self) -> tuple[tuple[int, int], ...]:
        """Hangs that ended, as (start, end) in ns."""
        return tuple(self._watchdog.standstills)

    def start(self) -> None:
        """Start the watchers."""
        self._stacks.install(has_keeper=self._box.can_be_kept)
        self._writer.update(crash_stacks=self._stacks.catches_crashes)
        self._watchdog.start(self._stacks.path_to_copy)
        self._note_exits()

    def _note_exits(self) -> None:
        """Note calls of `os._exit`, which a kill looks like from outside."""
        leave, pid, box = os._exit, os.getpid(), self._box

        def noted(status: int) -> None:
            if os.getpid() == pid:  # children leave this way after a fork
                with contextlib.suppress(Exception):
                    box.note_exit(status)
            leave(status)

        self._patches.set_attribute(os, "_exit", noted)

    def stop(self, timeout_s: float, *, has_failed: bool) -> None:
        """Stop the watchers; see `Watchdog.stop`."""
        self._watchdog.stop(timeout_s, has_failed=has_failed)
        self._patches.undo()

    def close(self) -> None:
        """No longer write stacks at signals. Until the record is written, they show the end."""
        self._stacks.uninstall()

    def before_update(self) -> None:
        """With `on_desync="raise"`, compare all ranks and wait for them.

        Raises:
            DesyncError: The ranks issued different collectives.
        """
        if self._gate is None:
            return
        try:
            sentence = self._gate.agree()
        except RuntimeError as error:  # the store is gone
            self._gate = None
            self._session.problem(f"The ranks are no longer compared before updates: {error}.")
            return
        if sentence is not None:
            self._session.problem(sentence)
            raise DesyncError(f"{sentence} The optimizer step was not taken.")

    def _clone_store(self) -> Any:
        try:
            store: Any = default_store()
            return store.clone()
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            self._session.problem(
                f"The process group's store cannot be shared ({error}): ranks are neither compared "
                "nor asked for their stacks."
            )
            return None
