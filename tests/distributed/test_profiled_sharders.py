"""Counts, bytes and exposed times of each sharder and mesh, compared with torch.profiler.

Both observe the same steps. A trace of gloo lacks the size of a message of one number, so only the
counts of these are compared. The importer reads no sends between two ranks; `test_mesh_dimensions`
counts them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.mesh_dimensions import group_dimensions
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventFlag, EventKind, StepPart
from fsdp_inspect.trace.run import RunSource
from tests.conftest import Torchrun
from tests.distributed.marked_waits import read_marked_waits
from tests.distributed.profiled_sharders import MARKED, PROFILED_STEPS, SHARDERS, WARMUP_STEPS
from tests.distributed.trace_waits import KINDS as TRACED_KINDS, WaitBounds, read_wait_bounds

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MESHES = ("fsdp_tp", "hsdp", "fsdp_ep", "fsdp_cp", "pipeline")
ON_EIGHT_RANKS = ("hsdp_tp",)
WITHOUT_BOUNDS = ("ddp", "simple_fsdp", "compiled_simple_fsdp")
"""Cases whose plain trace does not show all waits. DDP waits in C++, after hooks of the recorder. A
graph waits in another order than it issues, and the recorder's mark lies inside of the operator
that waits. Marks of the test show these waits; see `marked_waits`."""
STEPS = list(range(WARMUP_STEPS, WARMUP_STEPS + PROFILED_STEPS))
KINDS = sorted(COLLECTIVES - {EventKind.POINT_TO_POINT})
EXPOSED = (
    StepPart.EXPOSED_ALL_GATHER,
    StepPart.EXPOSED_REDUCE_SCATTER,
    StepPart.EXPOSED_ALL_REDUCE,
    StepPart.EXPOSED_OTHER,
)
COMPARED = set(TRACED_KINDS.values())
"""Kinds of collectives whose waits have bounds in a trace: all but sends, and barriers."""
CLOCK_NS = 5_000
"""The recorder and the profiler read different clocks, each twice a call: a reading takes less than
1 µs, and the profiler rounds and scales its ticks."""
ACROSS_NS = 100_000
"""Two profilers convert their ticks to the machine's clock, each with an error of some µs."""
Seen = dict[str, tuple[RunSource, RunSource]]
"""The recorded and the imported run, by case."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def seen(run_ranks: Torchrun, folder: Path) -> Seen:
    launches = ((tuple(SHARDERS), 2), (MESHES, 4), (ON_EIGHT_RANKS, 8))
    for cases, num_ranks in launches:
        driver = "tests.distributed.profiled_sharders"
        run_ranks("-m", driver, folder, *cases, num_ranks=num_ranks)
    return {case: _open_both(folder / case) for cases, _ in launches for case in cases}


def _open_both(folder: Path) -> tuple[RunSource, RunSource]:
    import_traces(folder / "traces", folder / "imported", by_step=True)
    return open_run(folder / "run"), open_run(folder / "imported")


class Waits(NamedTuple):
    """A recorded run, and the bounds of its waits in the traces of the same steps, by rank."""

    recorded: RunSource
    bounds: dict[int, list[WaitBounds]]


@pytest.fixture(
    params=[name for name in (*SHARDERS, *MESHES, *ON_EIGHT_RANKS) if name not in WITHOUT_BOUNDS]
)
def waits(request: pytest.FixtureRequest, seen: Seen, folder: Path) -> Waits:
    recorded, _ = seen[request.param]
    traces = folder / request.param / "traces"
    ranks = [record.rank for record in recorded.ranks]
    bounds = {rank: read_wait_bounds(traces / f"rank{rank}.json") for rank in ranks}
    return Waits(recorded, bounds)


@pytest.fixture(params=[*SHARDERS, *MESHES, *ON_EIGHT_RANKS])
def both(request: pytest.FixtureRequest, seen: Seen) -> tuple[RunSource, RunSource]:
    return seen[request.param]


def test_both_count_the_same_collectives(both: tuple[RunSource, RunSource]) -> None:
    recorded, imported = both
    for rank in (each.rank for each in recorded.ranks):
        ours = Counter(recorded.events(rank, steps=STEPS, kinds=KINDS).kind.tolist())
        assert ours == Counter(imported.events(rank, kinds=KINDS).kind.tolist())
        assert ours.total() > 0


def test_messages_are_as_large_as_in_the_trace(both: tuple[RunSource, RunSource]) -> None:
    recorded, imported = both
    for rank in (each.rank for each in recorded.ranks):
        ours = recorded.events(rank, steps=STEPS, kinds=KINDS)
        theirs = imported.events(rank, kinds=KINDS)
        known = Counter(
            pair
            for pair in zip(theirs.kind.tolist(), theirs.bytes.tolist(), strict=True)
            if pair[1] >= 0
        )
        assert known.total() > 0
        assert known - Counter(zip(ours.kind.tolist(), ours.bytes.tolist(), strict=True)) == {}


@pytest.mark.parametrize("case", MARKED)
def test_exposed_time_lies_between_the_bounds_of_the_marks(
    seen: Seen, folder: Path, case: str
) -> None:
    """For each step and rank: of all waits, and of sends and receives alone."""
    recorded, _ = seen[case]
    ranks = [each.rank for each in recorded.ranks]
    traces = {rank: folder / case / "traces" / f"rank{rank}.json" for rank in ranks}
    seen_least = 0.0
    for rank, waits in read_marked_waits(traces).items():
        messages = [each for each in waits if each.kind is EventKind.POINT_TO_POINT]
        assert bool(messages) == (case == "pipeline")
        for exposed, own in (
            (exposed_by_step(recorded, rank), waits),
            (message_waits_by_step(recorded, rank), messages),
        ):
            for place, exposed_ns in enumerate(exposed.tolist()):
                of_step = [each for each in own if each.step == place]
                clock = (1 + len(of_step)) * CLOCK_NS
                assert exposed_ns <= sum(each.most_ns for each in of_step) + clock
                assert sum(each.least_ns for each in of_step) <= exposed_ns + clock + ACROSS_NS
                seen_least += sum(each.least_ns for each in of_step)
    assert seen_least > 0  # rank 0 is late, so the other ranks wait


def message_waits_by_step(run: RunSource, rank: int) -> np.ndarray:
    rows = run.summary(ranks=[rank], kinds=[EventKind.POINT_TO_POINT])
    return np.array([rows.exposed_ns[rows.step == step].sum() for step in STEPS])


def exposed_by_step(run: RunSource, rank: int) -> np.ndarray:
    rows = run.summary(ranks=[rank], kinds=EXPOSED)
    return np.array([rows.duration_ns[rows.step == step].sum() for step in STEPS])


def test_exposed_time_along_each_dimension_lies_between_the_bounds_of_the_trace(
    waits: Waits,
) -> None:
    """Both directions, step by step. The bounds themselves depend on the machine, not the test."""
    for rank, bounds in waits.bounds.items():
        dimensions = group_dimensions(waits.recorded, rank)
        for place, step in enumerate(STEPS):
            events = waits.recorded.events(rank, steps=[step], kinds=sorted(COMPARED))
            events = events.where(np.argsort(events.issue_ns, kind="stable"))
            of_step = [each for each in bounds if each.step == place]
            assert events.kind.tolist() == [each.kind for each in of_step]
            breakdown = measure_step_breakdown(waits.recorded, rank=rank, step=step)
            exposed = {row.dimension: row.exposed_ns for row in breakdown.dimensions}
            for label, rows in dimensions.by_label(events.group).items():
                own = [of_step[row] for row in rows.tolist()]
                clock = len(own) * CLOCK_NS
                least, most = (sum(getattr(e, n) for e in own) for n in ("least_ns", "most_ns"))
                assert 0 < exposed[label] <= most + clock
                assert least - clock <= exposed[label]


@pytest.mark.parametrize("case", ["simple_fsdp", "compiled_simple_fsdp"])
def test_collectives_of_a_parametrization_have_the_unit_of_their_parameter(
    seen: Seen, case: str
) -> None:
    recorded, _ = seen[case]
    names = [unit.fqn for unit in recorded.manifest.units]
    events = recorded.events(0, steps=STEPS[-1:], kinds=[EventKind.ALL_GATHER])
    assert [names[unit] for unit in events.unit.tolist()] == names
    assert np.all((events.flags & EventFlag.UNIT_INFERRED) != 0)
    reductions = recorded.events(0, steps=STEPS[-1:], kinds=[EventKind.REDUCE_SCATTER])
    assert [names[unit] for unit in reductions.unit.tolist()] == names[::-1]
