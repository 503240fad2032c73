"""Write the losses of a rank, exact to the last bit, for a comparison of two trainings."""

from __future__ import annotations

import json
import os
from pathlib import Path


class LossFile:
    """The losses that one rank has computed, written as hexadecimal numbers."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"losses-{os.environ['RANK']}.json"
        self._losses: list[str] = []

    def add(self, loss: float) -> None:
        """Append a loss and write the file again, because a script may end in any way."""
        self._losses.append(float(loss).hex())
        self._path.write_text(json.dumps(self._losses))


def read_losses(folder: Path) -> dict[str, list[str]]:
    """The losses of all ranks, by file name."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("losses-*.json")}
