"""The recorder on FSDP1 and DDP with gloo ranks, compared with torch's flight recorder.

The flight recorder of gloo calls a reduce-scatter an all-reduce, because gloo implements it as one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryCategory,
    MemoryPoint,
    Method,
    Phase,
)
from fsdp_inspect.trace.run import RunStatus, Unit
from fsdp_inspect.trace.sharders import FSDP1
from tests.cases import mark_others, wants_slow
from tests.conftest import Torchrun
from tests.distributed import hooked_ddp
from tests.distributed.recorded import Recorded
from tests.distributed.recorder_scenarios import STEPS
from tests.distributed.simulated_bytes import expect_bytes_of
from tests.distributed.wrapped_scenarios import SCENARIOS, num_ranks_of

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("wrapped_scenarios.py")
MEMORY_STEP = 2
BLOCK = 2 * 32 * 64 + 32 + 64
"""Parameters of a block."""
REST = 64 * 32 + 2 * 32 + 32 * 64 + 64
"""Parameters of the root: embedding, norm, head."""
AS_IN_FLIGHT_RECORDER = {
    EventKind.ALL_GATHER: "gloo:all_gather",
    EventKind.REDUCE_SCATTER: "gloo:all_reduce",
    EventKind.ALL_REDUCE: "gloo:all_reduce",
    EventKind.BROADCAST: "gloo:broadcast",
}
WITH_BUCKETS = [name for name in SCENARIOS if name.startswith("ddp") and "comm_hook" not in name]
COMM_HOOK = (
    "The model has the communication hook fp16_compress_hook: its collectives are recorded, but "
    "not by bucket."
)
FSDP1_SCENARIOS = [name for name in SCENARIOS if name.startswith("fsdp1")]
QUICK = (
    *("fsdp1_full_shard", "fsdp1_mixed_precision", "fsdp1_forward_prefetch", "fsdp1_no_sync"),
    *("ddp_small_buckets_3", "ddp_no_sync_3", "ddp_comm_hook_3"),
)
"""The scenarios of `make test`."""


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Recorded:
    folder = tmp_path_factory.mktemp("wrapped")
    names = [*SCENARIOS] if wants_slow(request) else QUICK
    for num_ranks in sorted(set(map(num_ranks_of, names))):
        run_ranks(DRIVER, folder, *names, num_ranks=num_ranks)
    return Recorded(folder)


# --- the training is unchanged


@pytest.mark.parametrize("name", mark_others(SCENARIOS, QUICK))
def test_the_training_is_unchanged_and_its_recording_complete(
    recorded: Recorded, name: str
) -> None:
    result, run = recorded.result(name), recorded.run(name)
    bare, traced = result["bare"], result["recorded"]
    assert len(bare["losses"]) == STEPS
    assert traced["losses"] == bare["losses"]
    assert traced["collectives"] == bare["collectives"] != []
    assert traced["changed"] == []  # hooks, methods and functions
    assert traced["was_recording"]
    assert result["warnings"] == []
    assert traced["problems"] == ([COMM_HOOK] if "comm_hook" in name else [])
    assert run.status is RunStatus.COMPLETE
    assert [record.num_steps for record in run.ranks] == [STEPS] * run.manifest.world_size
    assert run.manifest.sharder == name.partition("_")[0]
    assert ("fsdp1" in run.manifest.plan) == (run.manifest.sharder == FSDP1)


def test_messages_that_threads_of_gloo_free_do_not_block_the_training(
    run_ranks: Torchrun, tmp_path: Path
) -> None:
    """torch 2.13 stops within 50 steps if the all-reduce holds the GIL."""
    run_ranks(DRIVER.with_name("hooked_ddp.py"), tmp_path / "run", num_ranks=3)
    run = open_run(tmp_path / "run")
    assert [record.num_steps for record in run.ranks] == [hooked_ddp.STEPS] * 3


@pytest.mark.parametrize("name", mark_others(FSDP1_SCENARIOS, QUICK))
def test_a_simulation_of_fsdp1_is_the_recorded_step_or_refused(
    recorded: Recorded, name: str
) -> None:
    """The identity law: the time within 0.5%, and every byte."""
    run = recorded.run(name)
    reasons = {"fsdp1_no_shard": "are replicated", "fsdp1_offload": "FSDP1 offloads"}
    if name in reasons:
        with pytest.raises(MissingDataError, match=reasons[name]):
            measure_work(run)
        return
    simulation = simulate_plan(run, observed_plan(run))
    assert simulation.step_time_ns == pytest.approx(simulation.recorded_step_ns, rel=0.005)
    expect_bytes_of(simulation, run.manifest.units)


# --- counts and bytes


@pytest.mark.parametrize("name", mark_others(SCENARIOS, QUICK))
def test_collectives_are_those_of_the_flight_recorder(recorded: Recorded, name: str) -> None:
    events = recorded.events(name)
    found = Counter(
        (AS_IN_FLIGHT_RECORDER[EventKind(kind)], num_bytes)
        for kind, num_bytes in zip(events.kind.tolist(), events.bytes.tolist(), strict=True)
        if kind in COLLECTIVES
    )
    counted = recorded.result(name)["recorded"]["collectives"]
    assert found == Counter((kind, max(sent, received)) for kind, sent, received in counted)


def test_the_broadcasts_of_new_buckets_are_recorded_in_the_step_that_makes_them(
    recorded: Recorded,
) -> None:
    """torch 2.13, `Reducer::sync_bucket_indices`: places of parameters, and sizes of buckets."""
    run = recorded.run("ddp_small_buckets_3")
    for rank in range(run.manifest.world_size):
        events = run.events(rank, kinds=[EventKind.BROADCAST])
        assert events.step.tolist() == [1, 1]
        assert all(num_bytes > 0 for num_bytes in events.bytes.tolist())


@pytest.mark.parametrize("name", mark_others(FSDP1_SCENARIOS, QUICK))
def test_messages_are_as_large_as_the_unit_says(recorded: Recorded, name: str) -> None:
    events, units = recorded.events(name), recorded.run(name).manifest.units
    chosen = events.where(events.unit != NO_UNIT)
    for kind, unit, num_bytes in zip(chosen.kind, chosen.unit, chosen.bytes, strict=True):
        owner = units[unit]
        expected = {
            EventKind.ALL_GATHER: owner.unsharded_bytes,
            EventKind.REDUCE_SCATTER: owner.reduce_bytes,
            EventKind.ALL_REDUCE: owner.reduce_bytes
            if owner.is_replicated
            else owner.sharded_bytes,
        }
        assert num_bytes == expected.get(EventKind(kind), num_bytes)


def test_an_fsdp1_unit_is_described_by_its_flat_parameter(recorded: Recorded) -> None:
    root, first, *_ = recorded.run("fsdp1_full_shard").manifest.units
    assert (root.fqn, root.modules, root.module_class, root.is_root) == ("", [""], "Net", True)
    assert (first.fqn, first.module_class, first.is_root) == ("layers.0", "Block", False)
    assert (first.num_parameters, first.num_tensors) == (BLOCK, 4)
    assert first.parameters["layers.0.up.weight"] == [64, 32]
    assert (first.unsharded_bytes, first.sharded_bytes) == (BLOCK * 4, BLOCK * 2)
    assert (root.reshard_after_forward, first.reshard_after_forward) == (False, True)
    assert root.num_parameters == REST
    assert first.recorded_by == "flat_param"
    assert recorded.run("fsdp1_full_shard").manifest.sharder == FSDP1


def test_full_shard_gathers_each_block_twice_and_the_root_once(recorded: Recorded) -> None:
    blocks = {f"layers.{index}": 1 for index in range(3)}
    gathers = [
        recorded.counts("fsdp1_full_shard", EventKind.ALL_GATHER, phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    assert gathers == [{"(root)": 1, **blocks}, blocks]
    reductions = recorded.counts("fsdp1_full_shard", EventKind.REDUCE_SCATTER)
    assert reductions == {"(root)": 1, **blocks}


@pytest.mark.slow
def test_shard_grad_op_gathers_each_unit_once(recorded: Recorded) -> None:
    gathers = recorded.counts("fsdp1_shard_grad_op", EventKind.ALL_GATHER)
    assert gathers == {"(root)": 1, "layers.0": 1, "layers.1": 1, "layers.2": 1}
    assert recorded.unit("fsdp1_shard_grad_op", "layers.0").reshard_after_forward is False


@pytest.mark.slow
def test_no_shard_only_all_reduces_each_unit(recorded: Recorded) -> None:
    assert recorded.counts("fsdp1_no_shard", EventKind.ALL_GATHER) == {}
    assert recorded.counts("fsdp1_no_shard", EventKind.ALL_REDUCE) == {
        "(root)": 1, "layers.0": 1, "layers.1": 1, "layers.2": 1,
    }  # fmt: skip
    assert recorded.unit("fsdp1_no_shard", "layers.0").is_replicated


def test_no_sync_gathers_in_both_microbatches_and_reduces_in_the_last(recorded: Recorded) -> None:
    events = recorded.events("fsdp1_no_sync")
    counts = {
        kind: Counter(events.microbatch[events.kind == kind].tolist())
        for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
    }
    assert counts[EventKind.ALL_GATHER] == {0: 7, 1: 7}
    assert counts[EventKind.REDUCE_SCATTER] == {1: 4}


@pytest.mark.slow
def test_a_frozen_unit_is_gathered_and_not_reduced(recorded: Recorded) -> None:
    frozen = recorded.unit("fsdp1_frozen", "layers.1")
    assert (frozen.reduce_bytes, frozen.num_trainable_parameters) == (0, 0)
    assert "layers.1" not in recorded.counts("fsdp1_frozen", EventKind.REDUCE_SCATTER)
    assert recorded.counts("fsdp1_frozen", EventKind.ALL_GATHER)["layers.1"] == 2


def test_mixed_precision_gathers_in_bfloat16_and_reduces_in_float32(recorded: Recorded) -> None:
    unit = recorded.unit("fsdp1_mixed_precision", "layers.0")
    assert (unit.param_dtype, unit.reduce_dtype) == ("bfloat16", "float32")
    assert (unit.unsharded_bytes, unit.reduce_bytes) == (BLOCK * 2, BLOCK * 4)
    casts = recorded.counts("fsdp1_mixed_precision", EventKind.ALL_GATHER_COPY_IN)
    assert casts == recorded.counts("fsdp1_mixed_precision", EventKind.ALL_GATHER)
    assert recorded.counts("fsdp1_full_shard", EventKind.ALL_GATHER_COPY_IN) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1_hybrid_4", "fsdp1_hybrid_grad_op_4"])
def test_hybrid_sharding_reduces_each_unit_within_and_between_the_shards(
    recorded: Recorded, name: str
) -> None:
    run = recorded.run(name)
    groups = {group.index: group for group in run.manifest.process_groups}
    assert run.manifest.mesh == {"replicate": 2, "shard": 2}
    for unit in run.manifest.units:
        assert groups[unit.shard_group].ranks == [0, 1]
        assert groups[unit.replicate_group].ranks == [0, 2]
    each = {"(root)": 1, "layers.0": 1, "layers.1": 1, "layers.2": 1}
    assert recorded.counts(name, EventKind.REDUCE_SCATTER) == each
    assert recorded.counts(name, EventKind.ALL_REDUCE) == each


def _prefetched(recorded: Recorded, name: str, phase: Phase) -> set[str]:
    events, units = recorded.events(name), recorded.run(name).manifest.units
    mask = (events.kind == EventKind.ALL_GATHER) & (events.phase == phase)
    mask &= (events.flags & EventFlag.PREFETCHED) != 0
    return {units[unit].fqn for unit in events.unit[mask]}


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("fsdp1_full_shard", set(), {"layers.0", "layers.1", "layers.2"}),
        pytest.param("fsdp1_without_prefetch", set(), set(), marks=pytest.mark.slow),
        pytest.param(
            "fsdp1_late_backward_prefetch", set(), {"layers.0", "layers.1"}, marks=pytest.mark.slow
        ),
        (
            "fsdp1_forward_prefetch",
            {"layers.0", "layers.1", "layers.2"},
            {"layers.0", "layers.1", "layers.2"},
        ),
    ],
)
def test_prefetched_gathers_are_those_of_the_setting(
    recorded: Recorded, name: str, forward: set[str], backward: set[str]
) -> None:
    assert _prefetched(recorded, name, Phase.FORWARD) == forward
    assert _prefetched(recorded, name, Phase.BACKWARD) == backward


def test_the_settings_of_the_wrapper_are_observed(recorded: Recorded) -> None:
    observed = recorded.run("fsdp1_forward_prefetch").manifest.observed
    assert observed["sharding_strategy"] == "FULL_SHARD"
    assert (observed["forward_prefetch"], observed["limit_all_gathers"]) == ("True", "False")
    assert observed["backward_prefetch"] == "BACKWARD_PRE"


# --- spans and memory


@pytest.mark.parametrize("name", mark_others(FSDP1_SCENARIOS, QUICK))
def test_each_unit_has_a_forward_and_a_backward_per_microbatch(
    recorded: Recorded, name: str
) -> None:
    microbatches = 2 if name == "fsdp1_no_sync" else 1
    units = [unit.fqn or "(root)" for unit in recorded.run(name).manifest.units]
    for kind in (EventKind.FORWARD, EventKind.BACKWARD):
        counts = recorded.counts(name, kind)
        counts.pop("-")  # the pass of the whole step
        assert counts == dict.fromkeys(units, microbatches)


def _memory(recorded: Recorded, name: str) -> dict[str, int]:
    memory = recorded.run(name).memory(0)
    at = [int(p) for p in memory.point].index(MemoryPoint.PEAK)
    return {each.label: int(getattr(memory, each.label)[at]) for each in MemoryCategory}


def test_memory_of_full_shard_is_that_of_its_shards(recorded: Recorded) -> None:
    peak = _memory(recorded, "fsdp1_full_shard")
    shards = sum(unit.sharded_bytes for unit in recorded.run("fsdp1_full_shard").manifest.units)
    assert peak["sharded_parameter"] == shards
    assert peak["optimizer_state"] == pytest.approx(2 * shards, abs=64)
    # The root, the running block and the prefetched block.
    assert peak["unsharded_parameter"] == (REST + 2 * BLOCK) * 4


@pytest.mark.slow
def test_memory_of_no_shard_is_that_of_whole_parameters(recorded: Recorded) -> None:
    peak = _memory(recorded, "fsdp1_no_shard")
    assert peak["sharded_parameter"] == (REST + 3 * BLOCK) * 4
    assert peak["unsharded_parameter"] in (-1, 0)


# --- DDP


def _buckets(recorded: Recorded, name: str) -> list[Unit]:
    return recorded.run(name).manifest.units


@pytest.mark.parametrize("name", mark_others(WITH_BUCKETS, QUICK))
def test_each_bucket_is_reduced_once_in_order(recorded: Recorded, name: str) -> None:
    events, units = recorded.events(name), _buckets(recorded, name)
    mask = (events.kind == EventKind.ALL_REDUCE) & (events.unit != NO_UNIT)
    chosen = events.where(mask)
    order = np.argsort(chosen.sequence)
    assert chosen.unit[order].tolist() == list(range(len(units)))
    assert chosen.bytes[order].tolist() == [unit.reduce_bytes for unit in units]
    assert [unit.fqn for unit in units] == [f"bucket {place}" for place in range(len(units))]


def test_buckets_hold_all_parameters_in_the_order_of_their_gradients(recorded: Recorded) -> None:
    units = _buckets(recorded, "ddp_small_buckets_3")
    assert len(units) == 3
    assert sum(unit.num_parameters for unit in units) == REST + 3 * BLOCK
    assert units[0].modules == ["head", "norm", "layers.2"]
    assert all(unit.is_replicated and not unit.reshard_after_forward for unit in units)
    assert recorded.run("ddp_small_buckets_3").manifest.mesh == {"replicate": 3}


@pytest.mark.slow
def test_a_large_bucket_holds_the_whole_model(recorded: Recorded) -> None:
    [unit] = _buckets(recorded, "ddp_one_bucket_3")
    assert (unit.num_parameters, unit.modules) == (REST + 3 * BLOCK, [""])


def test_buckets_of_the_first_steps_are_recorded_without_a_unit(recorded: Recorded) -> None:
    events = recorded.events("ddp_small_buckets_3", step=0)
    reductions = events.where(events.kind == EventKind.ALL_REDUCE)
    assert (reductions.unit.tolist(), reductions.bytes.tolist()) == (
        [NO_UNIT],
        [(REST + 3 * BLOCK) * 4],
    )


@pytest.mark.slow
def test_the_map_of_used_parameters_belongs_to_no_bucket(recorded: Recorded) -> None:
    events = recorded.events("ddp_unused_parameters_3")
    without = events.where((events.kind == EventKind.ALL_REDUCE) & (events.unit == NO_UNIT))
    assert without.bytes.tolist() == [17 * 4]  # an int32 for each parameter
    ranks = recorded.run("ddp_unused_parameters_3").ranks
    assert [rank.unused_parameters for rank in ranks] == ["some"] * len(ranks)


def test_a_microbatch_without_sync_reduces_nothing(recorded: Recorded) -> None:
    events = recorded.events("ddp_no_sync_3")
    assert set(events.microbatch[events.kind == EventKind.ALL_REDUCE].tolist()) == {1}
    observed = recorded.run("ddp_no_sync_3").manifest.observed
    assert observed["gradient_sync"] == "some microbatches"


def test_collectives_of_a_communication_hook_have_no_bucket(recorded: Recorded) -> None:
    events = recorded.events("ddp_comm_hook_3")
    reductions = events.where(events.kind == EventKind.ALL_REDUCE)
    assert set(reductions.unit.tolist()) == {NO_UNIT}
    assert reductions.bytes.sum() == (REST + 3 * BLOCK) * 2


@pytest.mark.parametrize("name", mark_others(WITH_BUCKETS, QUICK))
def test_the_wait_for_a_bucket_ends_with_it_and_after_the_bucket_before(
    recorded: Recorded, name: str
) -> None:
    events = recorded.events(name)
    ends = {
        int(row): int(end)
        for row, end, kind in zip(events.collective, events.end_ns, events.kind, strict=True)
        if kind == EventKind.ALL_REDUCE
    }
    waits = events.where(events.kind == EventKind.ALL_REDUCE_WAIT)
    order = np.argsort(waits.start_ns, kind="stable")
    assert len(waits) == len(ends)
    assert set(waits.method.tolist()) == {Method.INFERRED}
    previous = 0
    for at in order:
        start, end = int(waits.start_ns[at]), int(waits.end_ns[at])
        assert end == max(start, ends[int(waits.collective[at])])
        assert start >= previous
        previous = end


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("ddp_small_buckets_3", MemoryCategory.REDUCE_SCATTER_BUFFER),
        pytest.param("ddp_bucket_views_3", MemoryCategory.SHARDED_GRADIENT, marks=pytest.mark.slow),
    ],
)
def test_the_buckets_are_kept_between_steps_as_buffers_or_as_gradients(
    recorded: Recorded, name: str, kept: MemoryCategory
) -> None:
    peak, whole = _memory(recorded, name), (REST + 3 * BLOCK) * 4  # before the first gradient
    assert peak["sharded_parameter"] == whole
    of_buckets = {MemoryCategory.REDUCE_SCATTER_BUFFER.label, MemoryCategory.SHARDED_GRADIENT.label}
    assert {label for label in of_buckets if peak[label]} == {kept.label}
    assert peak[kept.label] == whole
