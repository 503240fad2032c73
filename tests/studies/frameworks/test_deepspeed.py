"""DeepSpeed's gradients and messages, compared with FSDP2 and with torch.profiler."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.report.text import describe_distances
from fsdp_inspect.simulation.buckets import measure_buckets
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventFlag, EventKind
from fsdp_inspect.trace.run import RunSource
from tests.distributed.marked_waits import read_marked_waits
from tests.distributed.test_profiled_sharders import ACROSS_NS, CLOCK_NS, EXPOSED
from tests.studies.frameworks import measured

LAST_STEP = 4
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks installs it.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero")
    measured._train("-m", "tests.studies.frameworks.zero_driver", path)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(params=[1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return request.param


def opened(folder: Path, stage: int) -> RunSource:
    return open_run(folder / f"zero{stage}")


def test_gradients_of_zero_3_agree_with_those_of_fsdp2(results: dict[str, Any]) -> None:
    expected, found = results["fsdp2"], results["zero3"]
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(values), rtol=1e-5, atol=1e-7
        )


def test_each_collective_of_a_step_has_the_bytes_that_the_profiler_saw(
    folder: Path, results: dict[str, Any], stage: int
) -> None:
    events = opened(folder, stage).events(0, steps=[LAST_STEP], kinds=sorted(COLLECTIVES))
    labels = [EventKind(kind).label for kind in events.kind.tolist()]
    found = Counter(zip(labels, events.bytes.tolist(), strict=True))
    expected = Counter({tuple(pair): count for pair, count in results[f"stage {stage}"]})
    assert found == expected


def test_exposed_time_lies_between_the_bounds_of_the_marks(folder: Path, stage: int) -> None:
    """Rank 0 is late, so rank 1 waits at least until rank 0 issues the same collectives."""
    recorded = opened(folder, stage)
    traces = {rank: folder / f"zero{stage}-traces" / f"rank{rank}.json" for rank in (0, 1)}
    found = read_marked_waits(traces)
    for rank, waits in found.items():
        exposed = exposed_of(recorded, rank, LAST_STEP)
        clock = (1 + len(waits)) * CLOCK_NS
        assert exposed <= sum(each.most_ns for each in waits) + clock
        assert sum(each.least_ns for each in waits) <= exposed + clock + ACROSS_NS
    assert sum(each.least_ns for each in found[1]) > 0


@pytest.mark.parametrize(("name", "seen"), [("zero3", "stage 3"), ("zero3-kept", "kept")])
def test_the_gathers_of_the_profiler_are_the_uses_that_were_not_kept(
    folder: Path, results: dict[str, Any], name: str, seen: str
) -> None:
    run = open_run(folder / name)
    sizes = {unit.index: unit.unsharded_bytes for unit in run.manifest.units}
    uses = run.events(0, steps=[LAST_STEP], kinds=[EventKind.FORWARD, EventKind.BACKWARD])
    uses = uses.where(uses.unit != NO_UNIT)
    fresh = uses.unit[(uses.flags & EventFlag.STILL_GATHERED) == 0]
    gathered = sum(size * count for (kind, size), count in results[seen] if kind == "all_gather")
    assert sum(sizes[unit] for unit in fresh.tolist()) == gathered


@pytest.mark.parametrize("name", ["zero3", "zero3-kept"])
def test_distances_are_those_of_the_gathers_that_ran(folder: Path, name: str) -> None:
    distances = measure_units(open_run(folder / name)).distances
    assert distances is not None
    by_name = {row.fqn: row for row in distances.units}
    size = sum(row.num_parameters for row in distances.units)
    first, last = by_name["model.embed_tokens"], by_name["lm_head"]
    assert first.reuse_distance == 2 * (size - first.num_parameters)  # forward, then backward
    assert (last.reuse_distance, last.kept_ratio) == (0, 1.0)
    assert distances.longest_prefetch is not None
    assert distances.longest_prefetch > 0
    assert describe_distances(distances)[0].endswith("(prefetch_bucket_size: 60,000).")


@pytest.mark.parametrize("name", ["zero3", "zero3-kept"])
def test_the_messages_of_zero_3_are_those_that_the_simulation_makes(
    folder: Path, name: str
) -> None:
    run = open_run(folder / name)
    work = measure_buckets(run)  # refuses other messages
    size = sum(each.message_bytes for each in work.simulate(work.recorded).buckets)
    own = run.events(0, steps=[LAST_STEP], kinds=sorted(COLLECTIVES))
    assert size == own.bytes[own.unit != NO_UNIT].sum()


def exposed_of(run: RunSource, rank: int, step: int) -> int:
    rows = run.summary(ranks=[rank], kinds=EXPOSED)
    return int(rows.duration_ns[rows.step == step].sum())


def test_every_message_but_the_norm_has_a_unit(folder: Path, stage: int) -> None:
    run = opened(folder, stage)
    events = run.events(0, steps=[LAST_STEP], kinds=sorted(COLLECTIVES))
    without = events.where(events.unit == NO_UNIT)
    assert without.bytes.max(initial=0) <= 8
    assert len(without) == 1
    assert run.manifest.sharder == f"zero{stage}"
    assert run.manifest.mesh == {"shard": 2}


def test_units_are_buckets_or_sub_modules_that_hold_all_parameters(
    folder: Path, stage: int
) -> None:
    manifest = opened(folder, stage).manifest
    assert sum(unit.num_parameters for unit in manifest.units) == manifest.model.num_parameters
    names = [unit.fqn for unit in manifest.units]
    if stage == 3:
        assert "model.layers.0.self_attn.q_proj" in names
        assert manifest.observed["prefetch_bucket_size"] == "60000"
    else:
        assert names[0] == "parameter group 0"
        assert names[1] == "bucket 0"
    assert manifest.observed["offload_optimizer"] == "cpu"
