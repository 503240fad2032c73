"""Predictions of ZeRO-3 with other settings, against steps of DeepSpeed's own engine.

`zero3_engine.json.gz` has runs and true steps of DeepSpeed 0.19.8 in virtual time; `python -m
tests.studies.frameworks.zero3_virtual FILE` writes it.
"""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.buckets import (
    BucketChanges,
    change_buckets,
    measure_buckets,
    simulate_buckets,
)
from fsdp_inspect.simulation.network import KINDS, CostLine, Network
from fsdp_inspect.simulation.simulate import measure_self_check
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.tables import EventTable
from tests.app.conftest import start_app
from tests.app.test_pages import codes_of, read
from tests.builders import InMemoryRun, RunBuilder, write_run
from tests.conftest import Invoke

LATENCY_NS, NS_PER_BYTE, WORLD_SIZE = 300_000, 20, 4
NETWORK = Network(
    {kind: CostLine(LATENCY_NS, bus_factor(kind, WORLD_SIZE) / NS_PER_BYTE * 1e9) for kind in KINDS}
)
"""The link of the runs, whose latency not all of them show."""
RUNS: list[dict[str, Any]] = json.loads(
    gzip.decompress(Path(__file__).with_name("zero3_engine.json.gz").read_bytes())
)
PAIRS = [(at, number) for at, one in enumerate(RUNS) for number in range(len(one["truths"]))]


def engine_run(at: int = 0, **manifest: Any) -> InMemoryRun:
    """A recorded run of the engine."""
    recorded = RUNS[at]
    builder = RunBuilder([], world_size=WORLD_SIZE)
    builder.rank(0)
    known = RunManifest.model_validate(recorded["manifest"]).model_copy(
        update={"warmup_steps": 0, **manifest}
    )
    events = EventTable.from_columns(recorded["events"])
    return InMemoryRun(known, builder.build().ranks, {0: events})


def as_changes(truth: Mapping[str, Any]) -> BucketChanges:
    return BucketChanges(**truth["changes"])


@pytest.mark.parametrize(("at", "number"), PAIRS)
def test_the_prediction_is_the_step_of_the_engine(at: int, number: int) -> None:
    truth = RUNS[at]["truths"][number]
    work = replace(measure_buckets(engine_run(at)), network=NETWORK)
    found = change_buckets(work, as_changes(truth))
    assert abs(found.replay_error) < 1e-4
    assert found.predicted.step_time_ns == pytest.approx(truth["step_time_ns"], rel=1e-4)
    plan = work.plan_of(found.settings)
    assert [[each.kind, each.num_bytes] for each in plan.messages] == truth["messages"]


@pytest.mark.parametrize("at", range(len(RUNS)))
def test_an_unchanged_step_is_the_recorded_one_on_the_fitted_network(at: int) -> None:
    run = engine_run(at)
    found = simulate_buckets(run, BucketChanges())
    assert abs(found.replay_error) < 5e-3
    assert measure_self_check(run) == found.replay_error
    assert (found.change, found.added_bytes) == (0, 0)
    assert found.low_ns <= found.recorded_step_ns <= found.high_ns


@pytest.mark.parametrize(("at", "number"), PAIRS)
def test_the_interval_of_the_fitted_network_contains_the_step_of_the_engine(
    at: int, number: int
) -> None:
    truth = RUNS[at]["truths"][number]
    run = engine_run(at)
    kinds = {kind for kind, _ in truth["messages"]}
    if kinds > set(run.events(0, kinds=sorted(kinds)).kind.tolist()):
        with pytest.raises(MissingDataError, match="has no reduce-scatter, so the duration of one"):
            simulate_buckets(run, as_changes(truth))
        return
    found = simulate_buckets(run, as_changes(truth))
    assert found.low_ns <= truth["step_time_ns"] <= found.high_ns


def test_less_prefetch_takes_less_memory_and_a_larger_bucket_more() -> None:
    run = engine_run()
    sizes = [each.unsharded_bytes for each in run.manifest.units]
    less = simulate_buckets(run, BucketChanges(prefetch_bucket_size=0))
    assert -sum(sizes) < less.added_bytes < -max(sizes)
    kept = simulate_buckets(
        run, BucketChanges(prefetch_bucket_size=0, param_persistence_threshold=10**9)
    )
    assert kept.added_bytes == 0  # the recorded prefetches kept all parameters, too
    larger = simulate_buckets(run, BucketChanges(reduce_bucket_size=29_000))
    assert larger.added_bytes == 4 * 20_000


def without(kind: EventKind) -> InMemoryRun:
    run = engine_run()
    events = run.event_tables[0]
    of_kind = (events.kind == kind).nonzero()[0]
    return replace(run, event_tables={0: events.where(np.arange(len(events)) != of_kind[-1])})


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (engine_run(device_type="cuda"), "on a GPU, the ends of its hidden gathers are unknown"),
        (engine_run(uses=None), "it lacks the order of uses"),
        (engine_run(observed={}), "its settings or its order of uses are incomplete"),
        (
            engine_run(observed={**engine_run().manifest.observed, "prefetch_bucket_size": "1"}),
            "its messages are not those of DeepSpeed's rules",
        ),
        (without(EventKind.ALL_GATHER), "its messages are not those of DeepSpeed's rules"),
        (without(EventKind.BACKWARD), "the passes of its modules are not those of its order"),
    ],
    ids=["gpu", "earlier version", "no settings", "other settings", "no gather", "no backward"],
)
def test_other_runs_are_refused_with_the_reason(run: InMemoryRun, reason: str) -> None:
    with pytest.raises(MissingDataError, match=reason):
        measure_buckets(run)


def test_damaged_orders_are_refused() -> None:
    uses = engine_run().manifest.uses
    assert uses is not None
    for events in ([], uses.events[1:], [(1, len(uses.modules), 0)], [(5, 10**6, 0)]):
        broken = uses.model_copy(update={"events": events})
        with pytest.raises(MissingDataError, match="order of uses are incomplete"):
            measure_buckets(engine_run(uses=broken))


def test_other_stages_and_settings_of_others_are_refused() -> None:
    run = engine_run()
    with pytest.raises(PlanError, match=r"Invalid ZeRO stage: 2\. Expected 3: a run of ZeRO-3"):
        simulate_buckets(run, BucketChanges(zero_stage=2))
    with pytest.raises(
        PlanError, match=r"it uses DeepSpeed ZeRO-3\. Expected --reduce-bucket-size"
    ):
        simulate_buckets(run, BucketChanges(bucket_cap_mb=25))
    with pytest.raises(ValueError, match="Invalid prefetch_bucket_size: -1"):
        simulate_buckets(run, BucketChanges(prefetch_bucket_size=-1))


def test_the_command_prints_the_configuration_of_deepspeed(invoke: Invoke, tmp_path: Path) -> None:
    run = write_run(engine_run(), tmp_path / "run")
    done = invoke("simulate", run, "--prefetch-bucket-size", "0")
    text = " ".join(done.out.split())
    assert "steps 25.0% longer than with the recorded messages" in text
    assert '"stage3_prefetch_bucket_size": 0' in text
    assert '"stage3_max_live_parameters": 1000000000' in text
    assert json.loads("{" + text[text.index('"zero_optimization"') :].split("} ")[0] + "}}")
    assert "all-gather of embed" in text
    assert invoke("simulate", run, "--wrap", "block").code == 2


def test_advise_names_the_command_and_proposes_no_bucket(invoke: Invoke, tmp_path: Path) -> None:
    run = engine_run()
    assert not [each for each in find_findings(run) if each.rule == "R38"]
    done = invoke("advise", write_run(run, tmp_path / "run"), "--details")
    assert "simulate" in done.out
    assert "--prefetch-bucket-size" in done.out


def test_what_if_has_the_settings_and_the_same_command(tmp_path: Path, invoke: Invoke) -> None:
    write_run(engine_run(), tmp_path / "run")
    app = start_app(tmp_path, "what_if", run="run", prefetch_bucket_size="0")
    assert not app.exception
    text = read(app)
    assert "25.0% longer" in text
    labels = {each.label for each in app.select_slider}
    assert {"Prefetch bucket size", "Max live parameters", "Bucket size (elements)"} <= labels
    command = next(each for each in codes_of(app, "bash") if "simulate" in each)
    assert invoke(*shlex.split(command)[1:]).code == 0
