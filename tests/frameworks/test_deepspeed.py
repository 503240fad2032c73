"""DeepSpeed's gradients and messages, compared with FSDP2 and with torch.profiler."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind
from fsdp_inspect.trace.run import RunSource
from tests.distributed.test_imported_gloo import CALL_NS
from tests.distributed.test_profiled_sharders import EXPOSED
from tests.frameworks import measured

LAST_STEP = 4
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks installs it.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero")
    measured._train("-m", "tests.frameworks.zero_driver", path)
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


def test_exposed_time_is_that_of_the_trace_but_for_what_it_lacks(
    folder: Path, stage: int, tmp_path: Path
) -> None:
    recorded = opened(folder, stage)
    import_traces(folder / f"zero{stage}-traces", tmp_path / "imported")
    imported = open_run(tmp_path / "imported")
    for rank in (0, 1):
        ours = exposed_of(recorded, rank, LAST_STEP)
        theirs = exposed_of(imported, rank, imported.summary(ranks=[rank]).step.max())
        calls = len(recorded.events(rank, steps=[LAST_STEP], kinds=sorted(COLLECTIVES)))
        assert theirs > 0
        assert theirs <= 1.2 * ours + calls * CALL_NS


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
