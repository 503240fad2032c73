"""Read the results of the recorder's scenarios: runs, and the reports of the ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import EventTable
from tests.distributed.recorder_scenarios import STEPS

LAST_STEP = STEPS - 1


class Recorded:
    """The runs of all scenarios, and the ranks' reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, name: str) -> StoredRun:
        return open_run(self.folder / name)

    def result(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.rank{rank}.json").read_text())

    def events(self, name: str, step: int = LAST_STEP, rank: int = 0) -> EventTable:
        return self.run(name).events(rank, steps=[step])

    def unit(self, name: str, fqn: str) -> Unit:
        return next(unit for unit in self.run(name).manifest.units if unit.fqn == fqn)

    def counts(self, name: str, kind: EventKind, phase: Phase | None = None) -> dict[str, int]:
        """Events of a kind in the last step by unit; `-` is the key without a unit."""
        events, units = self.events(name), self.run(name).manifest.units
        mask = events.kind == kind
        if phase is not None:
            mask &= events.phase == phase
        labels = [units[u].fqn or "(root)" if u != NO_UNIT else "-" for u in events.unit[mask]]
        return dict(Counter(labels))
