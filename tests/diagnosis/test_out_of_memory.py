"""The contents of memory, its growth, and the reasons against a plan, from hand-made reports."""

from typing import Any

import pytest

from fsdp_inspect.advice.run_advice import FoundPlans
from fsdp_inspect.analysis.memory.growth import measure_memory_growth
from fsdp_inspect.diagnosis.diagnose import diagnose, with_plans
from fsdp_inspect.diagnosis.fitting_plans import NoPlans, PlanSearch, search_plans
from fsdp_inspect.diagnosis.out_of_memory import OutOfMemory, read_out_of_memory
from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.report.out_of_memory import (
    describe_fitting_plans,
    describe_memory_at_failure,
    name_plan_file,
)
from fsdp_inspect.trace.live_memory import (
    MOST_ROWS,
    OTHER,
    LiveBytes,
    LiveMoment,
    OutOfMemoryRecord,
    keep_largest,
)
from fsdp_inspect.trace.run import ClockPair, RankRecord, RunManifest, RunStatus, Unit
from tests.builders import InMemoryRun

MIB = 1 << 20
CLOCK = ClockPair(monotonic_ns=0, unix_ns=0, uncertainty_ns=0)
NAMES = ("", "layers.0", "layers.1")
LIVE = [
    LiveBytes(unit=1, category="activation", place="net.py:8", bytes=40 * MIB, count=2),
    LiveBytes(unit=2, category="activation", place="net.py:8", bytes=20 * MIB, count=1),
    LiveBytes(unit=2, category="unsharded_parameter", place="train.py:3", bytes=16 * MIB, count=1),
    LiveBytes(unit=1, category="optimizer_state", bytes=8 * MIB, count=4),
]
THEN = LiveMoment(
    step=4,
    phase="forward",
    unit=1,
    bytes=44 * MIB,
    live=[
        LiveBytes(unit=1, category="activation", place="net.py:8", bytes=10 * MIB, count=2),
        LiveBytes(unit=2, category="activation", place="net.py:8", bytes=10 * MIB, count=1),
        LiveBytes(unit=2, category="unsharded_parameter", place="train.py:3", bytes=16 * MIB),
        LiveBytes(unit=1, category="optimizer_state", bytes=8 * MIB),
    ],
)


def report(**fields: Any) -> OutOfMemoryRecord:
    known = {
        "run_id": "r",
        "rank": 1,
        "requested_bytes": 30 * MIB,
        "limit_bytes": 100 * MIB,
        "is_limit_requested": True,
        "allocated_bytes": 84 * MIB,
        "step": 5,
        "phase": "forward",
        "unit": 1,
        "location": "/home/me/net.py:8",
        "live_from": "storage_tracker",
        "live": LIVE,
        "reference": THEN,
    }
    return OutOfMemoryRecord(**{**known, **fields})


def run_with(record: OutOfMemoryRecord, **fields: Any) -> InMemoryRun:
    units = [
        Unit(
            index=at,
            fqn=fqn,
            modules=[fqn],
            num_parameters=0,
            num_trainable_parameters=0,
            unsharded_bytes=0,
            sharded_bytes=0,
            reduce_bytes=0,
            param_dtype="float32",
            reduce_dtype="float32",
            reshard_after_forward=True,
            replicate_group=0 if fields.get("sharder") == "ddp" else -1,
        )
        for at, fqn in enumerate(NAMES)
    ]
    manifest = RunManifest(
        run_id="r",
        created="",
        created_unix_ns=0,
        world_size=2,
        units=units,
        backend="gloo",
        **{"device_type": "cpu", **fields},
    )
    failure = "OutOfMemoryError at step 5: Tried to allocate 30.0 MiB."
    ranks = [
        RankRecord(
            rank=rank,
            world_size=2,
            clock_start=CLOCK,
            status=RunStatus.FAILED if rank == record.rank else RunStatus.CUT_OFF,
            failure=failure if rank == record.rank else None,
        )
        for rank in (0, 1)
    ]
    return InMemoryRun(manifest, ranks, {}, failed_allocations={record.rank: record})


def read(record: OutOfMemoryRecord) -> OutOfMemory:
    found = read_out_of_memory(run_with(record), [1])
    assert found is not None
    return found


def test_the_diagnosis_has_the_position_of_the_report() -> None:
    found = diagnose(run_with(report()))
    assert (found.ranks, found.unit, found.step) == ((1,), "layers.0", 5)
    assert found.phase is not None
    assert found.phase.label == "forward"
    assert found.location == "/home/me/net.py:8"
    written = diagnosis_to_dict(found)
    assert written["class"] == "out of memory"
    assert written["sentence"] == (
        "Out of memory in forward of layers.0, step 5: allocating 30.0 MiB failed at "
        "me/net.py:8, with 84.0 MiB of the limit of 100 MiB allocated. Rank 1 failed."
    )


def test_live_bytes_add_up_by_category_unit_and_line() -> None:
    found = read(report())
    assert [(row.name, row.bytes // MIB) for row in found.by_category] == [
        ("activation", 60),
        ("unsharded_parameter", 16),
        ("optimizer_state", 8),
    ]
    assert [(row.name, row.bytes // MIB, row.main_category) for row in found.by_unit] == [
        ("layers.0", 48, "activation"),
        ("layers.1", 36, "activation"),
    ]
    assert [(row.name, row.bytes // MIB, row.num_units) for row in found.by_place] == [
        ("net.py:8", 60, 2),
        ("train.py:3", 16, 1),
        ("", 8, 1),
    ]


def test_only_what_grew_since_the_good_step_is_listed() -> None:
    found = read(report())
    assert found.growth is not None
    [only] = found.growth
    assert (only.category, only.place, only.bytes, only.num_units) == (
        "activation",
        "net.py:8",
        40 * MIB,
        2,
    )
    text = " ".join(describe_memory_at_failure(found))
    assert (
        "Step 4 held 44.0 MiB at the same place. More than then: activation of net.py:8 +40.0 MiB "
        "in 2 units (20.0 MiB to 60.0 MiB)."
    ) in text


def test_a_step_that_held_the_same_has_no_growth() -> None:
    same = THEN.model_copy(update={"live": LIVE, "bytes": 84 * MIB, "phase": "backward"})
    text = " ".join(describe_memory_at_failure(read(report(reference=same))))
    assert "Nothing grew since step 4, which held 84.0 MiB at its peak." in text


@pytest.mark.parametrize(("num_steps", "is_leak"), [(5, False), (8, True)])
def test_a_leak_is_the_growth_that_all_commands_state(num_steps: int, is_leak: bool) -> None:
    """Five rising steps are too few for a firm answer: by chance, p is 0.017."""
    before = LiveMoment(step=1, phase="outside", unit=-1, bytes=44 * MIB, live=THEN.live)
    now = LiveMoment(step=5, phase="outside", unit=-1, bytes=84 * MIB, live=LIVE)
    record = report(
        resting_bytes=[(10 + step) * MIB for step in range(num_steps)],
        resting_before=before,
        resting_now=now,
    )
    run = run_with(record)
    found = read_out_of_memory(run, [1])
    assert found is not None
    assert found.leak
    assert found.steady == (measure_memory_growth(run) if is_leak else None)
    text = " ".join(describe_memory_at_failure(found))
    searched = search_plans(run, found, name_file=str)
    if is_leak:
        assert "Each step leaves 1.00 MiB allocated." in text
        [said] = describe_fitting_plans(found, searched)
        assert "Stop keeping the tensors of net.py:8 over steps" in said
    else:
        assert "The run does not show whether each step adds to it." in text
        assert searched.reason is NoPlans.FIRST_STEP


def test_fragmentation_is_stated_if_no_free_block_holds_the_request() -> None:
    record = report(reserved_bytes=120 * MIB, largest_free_block_bytes=10 * MIB)
    text = " ".join(describe_memory_at_failure(read(record)))
    assert "Reserved but not allocated: 36.0 MiB (30% of reserved memory)" in text
    assert "none alone: the memory is fragmented" in text


def test_kept_tensors_leave_the_rest_unattributed() -> None:
    record = report(live_from="tensors", live=LIVE[2:], reference=THEN)
    found = read(record)
    assert found.unattributed_bytes == 60 * MIB
    assert found.growth is None
    text = " ".join(describe_memory_at_failure(found))
    assert "(60.0 MiB more are activations, buffers and temporaries)" in text
    assert "Peak of step 4, the last step whose storages were tracked: 44.0 MiB" in text


@pytest.mark.parametrize(
    ("changes", "manifest", "reason"),
    [
        ({}, {}, NoPlans.FIRST_STEP),
        ({}, {"source": "imported"}, NoPlans.IMPORTED),
        ({"limit_bytes": None}, {}, NoPlans.NO_LIMIT),
        ({"phase": "evaluation"}, {}, NoPlans.NOT_TRAINING),
    ],
)
def test_no_plan_is_proposed_without_the_data_for_it(
    changes: dict[str, Any], manifest: dict[str, Any], reason: NoPlans
) -> None:
    run = run_with(report(**changes), **manifest)
    found = read_out_of_memory(run, [1])
    assert found is not None
    searched = search_plans(run, found, name_file=str)
    assert (searched.plans, searched.reason) == ((), reason)
    [text] = describe_fitting_plans(found, searched)
    assert text.startswith("Cannot tell which plan fits, because ")


def test_a_run_of_ddp_is_told_of_no_shards() -> None:
    kept = LiveBytes(unit=1, category="sharded_parameter", bytes=16 * MIB)
    run = run_with(report(live=[*LIVE[:2], kept]), sharder="ddp")
    found = read_out_of_memory(run, [1])
    assert found is not None
    text = " ".join(
        [
            *describe_memory_at_failure(found),
            *describe_fitting_plans(found, search_plans(run, found, name_file=str)),
        ]
    )
    assert "No plan is searched: DDP keeps all parameters on each rank." in text
    assert "reshard" not in text
    assert "sharded" not in text
    assert ", parameter 16.0 MiB" in text


@pytest.mark.parametrize("reason", sorted({*NoPlans} - {NoPlans.UNSHARDED}))
def test_every_reason_has_its_sentence_and_what_could_be_freed(reason: NoPlans) -> None:
    searched = PlanSearch(1, reason, "A sentence.", FoundPlans((), 3, MIB, True), MIB)
    [text] = describe_fitting_plans(read(report()), searched)
    begins = ("Cannot tell which plan fits", "None of 3 simulated plans fits", "No plan fits for")
    assert text.startswith(begins)
    assert text.endswith(
        " Measured at the failure: full parameters of units that do not run now take 16.0 MiB "
        "(reshard_after_forward=True frees those of the forward); activations take 60.0 MiB "
        "(activation checkpointing keeps only the outputs of blocks); sharded parameters, "
        "optimizer state and buffers take 8.00 MiB (more ranks take less each)."
    )


def test_plans_are_searched_only_after_an_out_of_memory() -> None:
    run = run_with(report())
    found = with_plans(diagnose(run), run)
    assert found.plans is not None
    written = diagnosis_to_dict(found)["out_of_memory"]
    assert written["plans"]["reason"] == "first step"
    assert written["by_line"][0] == {
        "name": "net.py:8",
        "bytes": 60 * MIB,
        "main_category": "activation",
        "num_units": 2,
    }


def test_rows_beyond_the_largest_are_joined() -> None:
    rows = [LiveBytes(category="input", bytes=at, count=1) for at in range(MOST_ROWS + 10)]
    kept = keep_largest(rows)
    assert len(kept) == MOST_ROWS + 1
    assert (kept[-1].category, kept[-1].bytes, kept[-1].count) == (OTHER, sum(range(10)), 10)


def test_plan_files_are_numbered_from_the_second_on() -> None:
    assert [name_plan_file("a/plan.toml", at) for at in (1, 2)] == ["a/plan.toml", "a/plan-2.toml"]
    assert name_plan_file("plan", 3) == "plan-3"
