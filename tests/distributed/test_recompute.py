"""The repeated forwards of both kinds of checkpoints are measured, for any position."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.run import Run
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from tests.cases import mark_slow
from tests.conftest import Torchrun
from tests.distributed.checkpointed_script import NUM_BLOCKS, SLEEP_S

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("checkpointed_script.py")
LEAST_NS = SLEEP_S * 1e9
REPEATED = {
    "inside": range(NUM_BLOCKS),
    "around": range(NUM_BLOCKS),
    "every-second": range(1, NUM_BLOCKS, 2),
    "pair": range(NUM_BLOCKS),
}
KINDS = ((), ("--reentrant",), ("--reentrant", "--steps"))
CASES = [(place, *kind) for kind in KINDS for place in REPEATED]
QUICK = (("every-second",),)


def backward_ns(run: Run) -> float:
    """The mean duration of the backward in the typical steps of the median rank."""
    member = timed_rank(run.source)
    assert member is not None
    events = run.source.events(
        member.rank, steps=member.typical_steps.tolist(), kinds=[EventKind.BACKWARD]
    )
    whole = events.where(events.unit == NO_UNIT)
    return float((whole.end_ns - whole.start_ns).sum()) / len(member.typical_steps)


@pytest.mark.parametrize("case", mark_slow(CASES, but=QUICK), ids=" ".join)
def test_each_unit_shows_its_own_repeated_forward(
    run_ranks: Torchrun, tmp_path: Path, case: tuple[str, ...]
) -> None:
    place = case[0]
    run_ranks(SCRIPT, *case, cwd=tmp_path)
    run = fsdp_inspect.open_run(tmp_path / "run")
    number = len(REPEATED[place]) // (2 if place == "pair" else 1)
    assert run.manifest.observed["recomputation"] == f"{number} forwards a backward"
    units = {unit.fqn: unit for unit in run.units().units}
    blocks = [units[f"layers.{at}"] for at in range(NUM_BLOCKS)]
    for at, block in enumerate(blocks):
        assert block.forward_ns is not None
        assert block.forward_ns >= LEAST_NS
        assert block.all_gather.count_per_step == 2
        if at in REPEATED[place]:
            assert block.recompute_ns >= LEAST_NS
        else:
            assert block.recompute_ns == 0
    # No time counts twice, so all repeated forwards together fit into the backward.
    assert sum(unit.recompute_ns for unit in units.values()) <= backward_ns(run) + len(units)
    events = run.source.events(0, kinds=[EventKind.RECOMPUTE])
    assert set(events.phase.tolist()) <= {Phase.BACKWARD}
    assert run.summary().plan_check.sentence.startswith("The run follows its plan")
    assert [rank.problems for rank in run.source.ranks] == [[], []]
