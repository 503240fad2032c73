"""The OpenMetrics text is valid and has the run's numbers in base units."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.live.monitor import monitor_run
from fsdp_inspect.diagnosis.diagnose import diagnose
from fsdp_inspect.report.openmetrics import Family, Sample, find_families, render_openmetrics
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.run import RunStatus
from tests.boxes import HEADER, SECOND, Call, make_box
from tests.builders import InMemoryRun, RunBuilder, add_steady_step, steady_run
from tests.openmetrics import parse


def render(run: InMemoryRun) -> str:
    return render_openmetrics(
        find_families(monitor_run(run, range(run.manifest.world_size)), diagnose(run))
    )


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_label_is_read_as_it_was_written(text: str) -> None:
    family = Family("fsdp_it", "Help.", (Sample({"unit": text, "rank": "0"}, 1.5),))

    assert parse(render_openmetrics([family]))["fsdp_it"].value(unit=text) == 1.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (3, "3.0"), (0.25, "0.25")],
)
def test_numbers_are_spelled_as_the_format_wants_them(value: float, text: str) -> None:
    printed = render_openmetrics([Family("fsdp_it", "Help.", (Sample({"rank": "0"}, value),))])

    assert f'fsdp_it{{rank="0"}} {text}\n' in printed


def test_a_metric_without_numbers_is_left_out() -> None:
    assert render_openmetrics([Family("fsdp_it", "Help.", ())]) == "# EOF\n"


def test_a_run_is_told_by_rank_and_unit_in_seconds_and_bytes() -> None:
    run = steady_run()
    found = parse(render(run))

    assert found["fsdp_run"].samples[0][0]["run_id"] == run.manifest.run_id
    assert found["fsdp_run_state"].value(fsdp_run_state="ended") == 1
    step = found["time_metrics_end_to_end_seconds"]
    assert (step.type, step.unit) == ("gauge", "seconds")
    assert step.value(rank="0", source="recorded", method="measured") == 1000e-9
    assert found["time_metrics_data_loading_seconds"].value(rank="1") == 50e-9
    assert found["fsdp_last_step"].value(rank="0") == 3
    gathers = found["fsdp_unit_all_gather_seconds"]
    assert gathers.value(unit="layers.0", rank="0") == 120e-9
    assert found["fsdp_unit_exposed_seconds"].value(unit="layers.1", rank="0") == 80e-9
    assert found["fsdp_logged"].value(name="loss", rank="1") == 1.0


def test_a_run_without_gathers_has_no_time_of_gathers() -> None:
    builder = RunBuilder()
    for rank in (0, 1):
        for step in range(3):
            start = 1000 * step
            builder.rank(rank).step(step, start, start + 1000)
            builder.rank(rank).all_reduce("layers.0", start, start + 100, need=start)
    found = parse(render(builder.build()))
    assert "fsdp_unit_exposed_seconds" in found
    assert "fsdp_unit_all_gather_seconds" not in found


def test_units_of_one_name_are_told_apart() -> None:
    run = steady_run()
    units = [unit.model_copy(update={"fqn": ""}) for unit in run.manifest.units]
    manifest = run.manifest.model_copy(update={"units": units})
    found = parse(render(replace(run, manifest=manifest)))

    names = {labels["unit"] for labels, _ in found["fsdp_unit_exposed_seconds"].samples}
    assert names == {"(root) [0]", "(root) [1]"}


def test_a_run_without_a_step_says_only_what_it_is() -> None:
    found = parse(render(RunBuilder(world_size=1).build()))

    assert list(found) == ["fsdp_run", "fsdp_run_state", "fsdp_problem"]
    assert sum(value for _, value in found["fsdp_problem"].samples) == 0


def test_a_late_rank_raises_an_alert_with_its_number() -> None:
    waiting = [Call(0), Call(1, has_finished=False)]
    header = replace(HEADER, sign_ns=90 * SECOND, hang_seen_ns=70 * SECOND)
    run = replace(
        steady_run(),
        status=RunStatus.RUNNING,
        ranks=[
            record.model_copy(update={"status": RunStatus.RUNNING}) for record in steady_run().ranks
        ],
        black_boxes={0: make_box(waiting, (0, 1), header), 1: make_box([Call(0)], (0, 1), header)},
    )

    found = parse(render(run))

    assert {labels["fsdp_problem"] for labels, value in found["fsdp_problem"].samples if value} == {
        "rank late"
    }
    assert found["fsdp_problem_rank"].samples == [({"rank": "1"}, 1.0)]
    assert found["fsdp_problem_certain"].samples == [({}, 1.0)]
    silent = {
        labels["rank"]: value for labels, value in found["fsdp_since_collective_seconds"].samples
    }
    assert silent == {"0": 88.0, "1": 89.0 - 1e-9}


def test_what_the_loop_logged_has_torchtitans_name_where_it_has_one() -> None:
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    add_steady_step(rank, 0, start=0)
    logged = {"mfu(%)": 40.0, "throughput(tps)": 7000.0, "loss": 2.5, "odd\nname": 1.0}
    rank.record["scalar_names"] = list(logged)
    for index, value in enumerate(logged.values()):
        rank.logged.append({"step": 0, "name": index, "time_ns": 0, "value": value})
    found = parse(render(builder.build()))

    assert found["mfu_ratio"].value(rank="0") == pytest.approx(0.4)
    assert found["throughput_tps"].value(rank="0") == 7000
    assert found["fsdp_logged"].value(name="loss") == 2.5
    assert found["fsdp_logged"].value(name="odd\nname") == 1


def test_what_the_allocator_counts_has_torchtitans_names_and_is_told_once() -> None:
    builder = RunBuilder(world_size=2, device_type="cuda")
    for number in (0, 1):
        rank = builder.rank(number)
        add_steady_step(rank, 0, start=0)
        rank.record["scalar_names"] = ["memory/num_ooms", "memory/max_active(GiB)"]
        rank.logged += [
            {"step": 0, "name": name, "time_ns": 0, "value": 1.0 + name} for name in (0, 1)
        ]
    counted = builder.rank(0)
    counted.record.update(memory_from="cuda_allocator", device_memory_bytes=4000)
    for retries in (2, 5):
        counted.memory(
            MemoryPoint.STEP_END,
            500,
            reserved=1000,
            peak_reserved=1000,
            num_alloc_retries=retries,
            num_ooms=0,
        )
    printed = render(builder.build())
    found = parse(printed)

    for name, words in (
        ("bytes", "Highest bytes of the allocator."),
        ("ratio", "Highest bytes of the allocator / memory of the device."),
    ):
        assert f"# HELP memory_max_reserved_{name} {words}\n" in printed
    assert found["memory_max_reserved_bytes"].value(rank="0", method="cuda_allocator") == 1000
    assert found["memory_num_alloc_retries"].value(rank="0", method="cuda_allocator") == 3
    assert found["memory_max_reserved_ratio"].value(rank="0") == 0.25
    assert found["memory_num_ooms"].value(rank="0", method="cuda_allocator") == 0
    assert found["memory_num_ooms"].value(rank="1", method="logged") == 1
    assert found["memory_max_active_bytes"].value(rank="1") == 2 * 2**30
    assert found["time_metrics_data_loading_ratio"].value(rank="0", method="measured") == 0.05
