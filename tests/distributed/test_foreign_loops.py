"""Foreign loops train as without a recorder, and its rows are the collectives that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_inspect.run import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunSource
from tests.conftest import Torchrun
from tests.distributed import foreign_loops
from tests.distributed.foreign_loops import LOOPS, RANKS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COUNTED = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def recorded_counts(run: RunSource) -> dict[str, list[int]]:
    """The collectives of the last step of rank 0, in the form of the counter."""
    events = run.events(0)
    events = events.where(events.step == events.step[events.kind == EventKind.STEP].max())
    kinds = {name: events.bytes[events.kind == EventKind[name.upper()]] for name in COUNTED}
    return {name: [len(rows), int(rows.sum())] for name, rows in kinds.items() if len(rows)}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_recorded_loop_trains_equally_and_has_the_counted_collectives(
    run_ranks: Torchrun, tmp_path: Path, loop: str
) -> None:
    run_ranks(foreign_loops.__file__, tmp_path, loop, num_ranks=RANKS.get(loop, 2))
    alone, recorded = json.loads((tmp_path / f"{loop}.json").read_text())
    assert recorded == alone
    assert recorded_counts(open_run(tmp_path / loop).source) == alone["counts"]
