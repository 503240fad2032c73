"""Write runs of one model, a day apart, whose step becomes slower, with their catalog."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.trace.tables import EventTable
from tests.app.synthetic import make_manifest, make_run, write_run

NUM_NIGHTS = 14
FIRST_SLOW = 7
SLOWER = 1.25
_DAY_NS = 86_400_000_000_000
_TIMES = ("issue_ns", "start_ns", "end_ns", "need_ns")


def write_nights(folder: Path) -> Path:
    """Write the runs `night-00`, `night-01`, ... and their catalog; returns the folder."""
    for night in range(NUM_NIGHTS):
        manifest = make_manifest(run_id=name_night(night))
        manifest = manifest.model_copy(
            update={"created_unix_ns": manifest.created_unix_ns + night * _DAY_NS}
        )
        run = replace(make_run(num_steps=5), manifest=manifest)
        factor = (SLOWER if night >= FIRST_SLOW else 1.0) * (1 + 0.004 * (night % 3))
        run.tables.update({rank: _stretch(table, factor) for rank, table in run.tables.items()})
        write_run(folder / name_night(night), run)
    index_runs(folder)
    return folder


def name_night(night: int) -> str:
    """The id of a run."""
    return f"night-{night:02}"


def _stretch(events: EventTable, factor: float) -> EventTable:
    """The same events with all known times multiplied."""
    times = {name: getattr(events, name) for name in _TIMES}
    return replace(
        events,
        **{
            name: np.where(values >= 0, (values * factor).astype(np.int64), values)
            for name, values in times.items()
        },
    )
