"""The recorder on real gloo ranks: its counts, and an unchanged training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryPoint,
    Method,
    Phase,
    StepPart,
)
from fsdp_inspect.trace.run import RunStatus
from tests.cases import mark_slow, wants_slow
from tests.conftest import Torchrun
from tests.distributed.recorded import LAST_STEP, Recorded
from tests.distributed.recorder_scenarios import SCENARIOS, STEPS

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("recorder_scenarios.py")
QUICK = (
    *("blocks", "no_step_calls", "checkpointed_inside_fsdp", "accumulation_without_sync"),
    *("evaluation_between_steps", "clipping_and_loss_reduction", "asynchronous_prefetch"),
    "hybrid_sharding_4",
)
"""The scenarios of `make test`."""
CASES = mark_slow(SCENARIOS, but=QUICK)


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> Recorded:
    folder = tmp_path_factory.mktemp("scenarios")
    names = [*SCENARIOS] if wants_slow(request) else QUICK
    run_ranks(DRIVER, folder, *names, num_ranks=2)
    run_ranks(DRIVER, folder, *names, num_ranks=4)
    return Recorded(folder)


# --- the training is unchanged


@pytest.mark.parametrize("name", CASES)
def test_the_training_is_unchanged_and_its_recording_complete(
    recorded: Recorded, name: str
) -> None:
    result, run = recorded.result(name), recorded.run(name)
    assert len(result["bare"]["losses"]) == STEPS
    assert result["recorded"]["losses"] == result["bare"]["losses"]
    assert result["recorded"]["is_restored"] is True
    assert result["recorded"]["was_recording"]
    assert result["warnings"] == []
    assert run.status is RunStatus.COMPLETE
    assert [record.num_steps for record in run.ranks] == [STEPS] * run.manifest.world_size


# --- properties of every scenario


@pytest.mark.parametrize("name", CASES)
def test_each_rank_numbers_the_collectives_of_a_group_alike(recorded: Recorded, name: str) -> None:
    run = recorded.run(name)
    shard = run.manifest.process_groups[0]
    seen = []
    for rank in shard.ranks:
        events = run.events(rank)
        mask = np.isin(events.kind, list(COLLECTIVES)) & (events.group == shard.index)
        chosen = events.where(mask)
        order = np.argsort(chosen.sequence)
        seen.append(
            [
                (int(s), int(k), int(b))
                for s, k, b in zip(
                    chosen.sequence[order], chosen.kind[order], chosen.bytes[order], strict=True
                )
            ]
        )
    assert seen[0]
    assert all(other == seen[0] for other in seen)


@pytest.mark.parametrize("name", CASES)
def test_messages_are_as_large_as_the_manifest_says(recorded: Recorded, name: str) -> None:
    events, units = recorded.events(name), recorded.run(name).manifest.units
    for kind, expected in (
        (EventKind.ALL_GATHER, "unsharded_bytes"),
        (EventKind.REDUCE_SCATTER, "reduce_bytes"),
    ):
        mask = (events.kind == kind) & (events.unit != NO_UNIT)
        assert mask.any()
        for unit, num_bytes in zip(events.unit[mask], events.bytes[mask], strict=True):
            assert num_bytes == getattr(units[unit], expected)


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_that_the_plan_asks_for(recorded: Recorded, name: str) -> None:
    check = check_plan(recorded.run(name))
    assert check.is_consistent, (check.sentence, check.findings)


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_step(recorded: Recorded, name: str) -> None:
    summary = recorded.run(name).summary()
    for rank in np.unique(summary.rank):
        for step in np.unique(summary.step):
            rows = summary.where((summary.rank == rank) & (summary.step == step))
            parts = rows.where((rows.kind >= 100) & (rows.kind < StepPart.COMMUNICATION))
            whole = rows.where(rows.kind == EventKind.STEP)
            assert parts.duration_ns.sum() == whole.duration_ns[0]


@pytest.mark.parametrize("name", CASES)
def test_steps_follow_each_other_without_a_gap(recorded: Recorded, name: str) -> None:
    events = recorded.run(name).events(0, kinds=[EventKind.STEP])
    assert events.step.tolist() == list(range(STEPS))
    assert events.start_ns[1:].tolist() == events.end_ns[:-1].tolist()


@pytest.mark.parametrize("name", CASES)
def test_the_memory_step_knows_its_peak_by_category_and_owner(
    recorded: Recorded, name: str
) -> None:
    memory = recorded.run(name).memory(0)
    peak = memory.where(memory.point == MemoryPoint.PEAK)
    owners = memory.where(memory.point == MemoryPoint.PEAK_BY_OWNER)
    assert peak.step.tolist() == [2]
    assert owners.allocated.sum() == peak.allocated[0] > 0
    assert peak.sharded_parameter[0] > 0
    assert peak.optimizer_state[0] > 0


@pytest.mark.parametrize("name", CASES)
def test_losses_are_logged(recorded: Recorded, name: str) -> None:
    scalars = recorded.run(name).scalars(0)
    expected = [float.fromhex(loss) for loss in recorded.result(name)["recorded"]["losses"]]
    assert scalars.step.tolist() == list(range(STEPS))
    assert scalars.value.tolist() == expected


# --- counts by scenario

BLOCKS = {"layers.0", "layers.1", "layers.2"}


def test_each_unit_is_gathered_for_forward_and_for_backward(recorded: Recorded) -> None:
    gathers = recorded.counts("blocks", EventKind.ALL_GATHER)
    assert gathers == {"(root)": 1, "norm, head": 2, **dict.fromkeys(BLOCKS, 2)}
    for kind in (EventKind.REDUCE_SCATTER, EventKind.FORWARD, EventKind.BACKWARD):
        counts = recorded.counts("blocks", kind)
        assert {unit: n for unit, n in counts.items() if unit != "-"} == {
            "(root)": 1,
            "norm, head": 1,
            **dict.fromkeys(BLOCKS, 1),
        }


def test_a_collective_is_tied_to_its_copies_and_its_wait(recorded: Recorded) -> None:
    events = recorded.events("blocks")
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    for identity in gathers.collective:
        kinds = set(events.kind[events.collective == identity].tolist())
        assert kinds == {
            EventKind.ALL_GATHER_COPY_IN,
            EventKind.ALL_GATHER,
            EventKind.ALL_GATHER_WAIT,
            EventKind.ALL_GATHER_COPY_OUT,
        }


def test_backward_gathers_are_prefetched_by_the_unit_before(recorded: Recorded) -> None:
    run, events = recorded.run("blocks"), recorded.events("blocks")
    names = [unit.fqn for unit in run.manifest.units]
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.phase == Phase.BACKWARD))
    issued = {
        names[unit]: names[by] for unit, by in zip(gathers.unit, gathers.issued_by, strict=True)
    }
    assert issued["layers.2"] == "norm, head"
    assert issued["layers.1"] == "layers.2"
    flags = dict(zip((names[u] for u in gathers.unit), gathers.flags.tolist(), strict=True))
    assert flags["layers.1"] & EventFlag.PREFETCHED


def test_synchronous_gloo_times_are_called_host_blocking(recorded: Recorded) -> None:
    events = recorded.events("blocks")
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    assert set(collectives.method.tolist()) == {Method.HOST_BLOCKING}
    assert (collectives.need_ns == collectives.start_ns).all()


def test_units_are_listed_in_the_order_they_ran(recorded: Recorded) -> None:
    units = recorded.run("blocks").manifest.units
    ran = sorted(units, key=lambda unit: unit.execution_index)
    assert [unit.fqn for unit in ran] == ["", "layers.0", "layers.1", "layers.2", "norm, head"]
    assert [unit.reshard_after_forward for unit in ran] == [False, True, True, True, True]


def test_steps_end_at_the_optimizer_without_step_calls(recorded: Recorded) -> None:
    run = recorded.run("no_step_calls")
    assert run.manifest.recorder["steps_end_at"] == "optimizer"
    assert recorded.counts("no_step_calls", EventKind.OPTIMIZER) == {"-": 1}
    assert recorded.counts("no_step_calls", EventKind.REDUCE_SCATTER)["layers.0"] == 1


@pytest.mark.slow
def test_a_unit_used_twice_has_two_forwards(recorded: Recorded) -> None:
    assert recorded.counts("unit_used_twice", EventKind.FORWARD)["layers.0"] == 2
    assert recorded.counts("unit_used_twice", EventKind.BACKWARD)["layers.0"] == 2
    assert recorded.counts("unit_used_twice", EventKind.FORWARD)["layers.1"] == 1


@pytest.mark.slow
def test_nested_units_are_units_of_their_own(recorded: Recorded) -> None:
    gathers = recorded.counts("nested_units", EventKind.ALL_GATHER)
    assert {"layers.0", "layers.0.up"} <= set(gathers)
    events, units = recorded.events("nested_units"), recorded.run("nested_units").manifest.units
    spans = {
        units[unit].fqn: (start, end)
        for unit, start, end, kind in zip(
            events.unit, events.start_ns, events.end_ns, events.kind, strict=True
        )
        if kind == EventKind.FORWARD and unit != NO_UNIT
    }
    outer, inner = spans["layers.0"], spans["layers.0.up"]
    assert outer[0] < inner[0] < inner[1] < outer[1]


@pytest.mark.slow
def test_a_model_may_have_no_root_unit(recorded: Recorded) -> None:
    assert "(root)" not in recorded.counts("no_root_unit", EventKind.ALL_GATHER)
    assert recorded.counts("no_root_unit", EventKind.ALL_GATHER)["embed"] == 1


@pytest.mark.slow
def test_frozen_units_are_gathered_and_never_reduced(recorded: Recorded) -> None:
    assert recorded.counts("frozen_blocks", EventKind.ALL_GATHER)["layers.0"] == 2
    assert "layers.0" not in recorded.counts("frozen_blocks", EventKind.REDUCE_SCATTER)
    unit = recorded.run("frozen_blocks").manifest.units[1]
    assert (unit.num_trainable_parameters, unit.reduce_bytes) == (0, 0)


@pytest.mark.parametrize(
    "name",
    mark_slow(
        ["checkpointed_inside_fsdp", "checkpointed_outside_fsdp"], but=["checkpointed_inside_fsdp"]
    ),
)
def test_recomputation_is_not_a_second_forward(recorded: Recorded, name: str) -> None:
    for block in BLOCKS:
        assert recorded.counts(name, EventKind.FORWARD)[block] == 1
        assert recorded.counts(name, EventKind.RECOMPUTE, Phase.BACKWARD)[block] == 1
        assert recorded.counts(name, EventKind.ALL_GATHER)[block] == 2


def test_accumulation_without_sync_reduces_once_in_three_microbatches(recorded: Recorded) -> None:
    name = "accumulation_without_sync"
    assert recorded.counts(name, EventKind.FORWARD)["layers.0"] == 3
    assert recorded.counts(name, EventKind.REDUCE_SCATTER)["layers.0"] == 1
    events = recorded.events(name)
    assert set(events.microbatch[events.kind == EventKind.REDUCE_SCATTER].tolist()) == {2}
    assert set(events.microbatch[events.kind == EventKind.FORWARD].tolist()) == {0, 1, 2}


def test_evaluation_lies_between_steps(recorded: Recorded) -> None:
    name = "evaluation_between_steps"
    assert recorded.counts(name, EventKind.FORWARD, Phase.EVALUATION)["layers.0"] == 3
    assert recorded.counts(name, EventKind.FORWARD, Phase.FORWARD)["layers.0"] == 1
    summary = recorded.run(name).summary()
    last = summary.where((summary.rank == 0) & (summary.step == LAST_STEP))
    between = last.duration_ns[last.kind == StepPart.BETWEEN_STEPS][0]
    step = last.duration_ns[last.kind == EventKind.STEP][0]
    events = recorded.events(name)
    whole = events.where(events.kind == EventKind.STEP)
    assert between > 0
    assert step == whole.end_ns[0] - whole.start_ns[0] - between


def test_the_root_stays_unsharded_through_evaluation_and_is_not_gathered_again(
    recorded: Recorded,
) -> None:
    counts = recorded.counts("evaluation_between_steps", EventKind.ALL_GATHER, Phase.FORWARD)
    assert counts["layers.0"] == 1


@pytest.mark.slow
def test_structured_outputs_do_not_hide_a_unit(recorded: Recorded) -> None:
    for kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.REDUCE_SCATTER):
        assert recorded.counts("structured_outputs", kind)["head"] == 1


def test_collectives_that_fsdp_does_not_issue_are_recorded_too(recorded: Recorded) -> None:
    name = "clipping_and_loss_reduction"
    assert recorded.counts(name, EventKind.ALL_REDUCE) == {"-": 3}  # clipping, mean, asynchronous
    assert recorded.counts(name, EventKind.BARRIER) == {"-": 1}
    events = recorded.events(name)
    asynchronous = events.where(
        (events.kind == EventKind.ALL_REDUCE) & ((events.flags & EventFlag.ASYNC) != 0)
    )
    assert asynchronous.bytes.tolist() == [16]
    assert asynchronous.end_ns[0] > asynchronous.start_ns[0]


def test_asynchronous_gathers_have_their_real_end_and_their_wait(recorded: Recorded) -> None:
    events = recorded.events("asynchronous_prefetch")
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    waits = events.where(events.kind == EventKind.ALL_GATHER_WAIT)
    assert ((gathers.flags & EventFlag.ASYNC) != 0).all()
    assert set(gathers.method.tolist()) == {Method.MEASURED}
    assert (gathers.need_ns >= gathers.issue_ns).all()
    assert len(waits) == len(gathers)
    by_collective = dict(zip(waits.collective.tolist(), waits.end_ns.tolist(), strict=True))
    for identity, end in zip(gathers.collective.tolist(), gathers.end_ns.tolist(), strict=True):
        assert end <= by_collective[identity]


def test_forward_prefetch_names_the_unit_that_issued_it(recorded: Recorded) -> None:
    run, events = recorded.run("asynchronous_prefetch"), recorded.events("asynchronous_prefetch")
    names = [unit.fqn for unit in run.manifest.units]
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.phase == Phase.FORWARD))
    issued = dict(
        zip((names[u] for u in gathers.unit), (names[u] for u in gathers.issued_by), strict=True)
    )
    assert issued["layers.1"] == "layers.0"
    assert issued["layers.3"] == "layers.2"


@pytest.mark.slow
def test_a_collective_that_torch_replaced_is_wrapped_again(recorded: Recorded) -> None:
    for step in (1, 3, 4):
        events = recorded.events("torch_setter_called_later", step)
        mask = (events.kind == EventKind.ALL_GATHER) & (events.unit == 1)
        assert mask.sum() == 2, step


@pytest.mark.slow
def test_dtypes_are_those_of_the_messages(recorded: Recorded) -> None:
    unit = recorded.run("bf16_with_fp32_reduction").manifest.units[1]
    assert (unit.param_dtype, unit.reduce_dtype) == ("bfloat16", "float32")
    assert unit.reduce_bytes == 2 * unit.unsharded_bytes


@pytest.mark.slow
def test_offloading_is_noted(recorded: Recorded) -> None:
    assert all(unit.offload for unit in recorded.run("offloaded").manifest.units)


@pytest.mark.slow
def test_several_groups_in_a_module_are_units_with_names_of_their_own(recorded: Recorded) -> None:
    units = recorded.run("several_groups_in_a_module").manifest.units
    names = [unit.fqn for unit in units]
    assert {"layers.0 [pg=2]", "layers.0 [pg=2] #2"} <= set(names)
    assert {unit.recorded_by for unit in units} == {"param_group", "custom_comm"}
    gathers = recorded.counts("several_groups_in_a_module", EventKind.ALL_GATHER)
    assert gathers["layers.0 [pg=2]"] == gathers["layers.0 [pg=2] #2"] == 2


def test_hybrid_sharding_has_an_all_reduce_for_each_unit(recorded: Recorded) -> None:
    name = "hybrid_sharding_4"
    assert recorded.counts(name, EventKind.ALL_REDUCE, Phase.BACKWARD) == {
        "(root)": 1,
        "norm, head": 1,
        **dict.fromkeys(BLOCKS, 1),
    }
    manifest = recorded.run(name).manifest
    assert manifest.mesh == {"replicate": 2, "shard": 2}
    roles = {group.role: group.ranks for group in manifest.process_groups}
    assert roles == {"shard": [0, 1], "replicate": [0, 2]}


@pytest.mark.slow
def test_an_integer_reshard_gathers_over_the_smaller_group_in_backward(recorded: Recorded) -> None:
    run, events = recorded.run("integer_reshard_4"), recorded.events("integer_reshard_4")
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.unit == 1))
    sizes = {
        Phase(phase).label: len(run.manifest.process_groups[group].ranks)
        for phase, group in zip(gathers.phase, gathers.group, strict=True)
    }
    assert sizes == {"forward": 4, "backward": 2}
    assert run.manifest.units[1].reshard_after_forward == 2


@pytest.mark.slow
def test_tensor_parallel_collectives_are_beside_the_units(recorded: Recorded) -> None:
    counts = recorded.counts("tensor_parallel_4", EventKind.ALL_REDUCE)
    assert counts == {"-": 6}  # each of three blocks once in forward and once in backward
    assert recorded.counts("tensor_parallel_4", EventKind.ALL_GATHER)["layers.0"] == 2


def test_settings_that_json_does_not_know_are_kept_as_text(recorded: Recorded) -> None:
    assert recorded.run("blocks").manifest.config == {"scenario": "x", "device": "cpu"}
