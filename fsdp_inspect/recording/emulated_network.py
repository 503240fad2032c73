"""The emulated network of this process, as a recording sees it.

The package `emulation` replaces the network of rank 0 and announces it here. Recording does not
import that package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_inspect.trace.codes import EventKind


@dataclass(slots=True, eq=False)
class Transfer:
    """One collective on its link, with times in ns on the clock of `time.perf_counter_ns`."""

    kind: EventKind
    num_bytes: int
    issue_ns: int
    start_ns: int
    end_ns: int
    need_ns: int = -1
    """The time of the first wait for it; -1 if there was none."""


class LinkModel(Protocol):
    """A model of the network in place of the real one; `emulation.process.Emulation`."""

    specification: Any
    """The ranks and the links; its text describes them."""

    def take_transfer(self) -> Transfer | None:
        """The transfer of the last issued collective, once; None if its times are unknown."""
        ...

    def describe(self) -> dict[str, Any]:
        """The representation in `run.json`."""
        ...

    def send_notes(self, take: Callable[[str], None]) -> None:
        """Send every note, earlier and later ones, to the attached recording."""
        ...


_active: LinkModel | None = None


def announced_emulation() -> LinkModel | None:
    """The emulated network of this process; None on a real rank."""
    return _active


def announce_emulation(network: LinkModel | None) -> None:
    """Set the emulated network of this process; None: it has ended."""
    global _active
    _active = network
