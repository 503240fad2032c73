"""A baseline file is stable and short, and is read back unchanged."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect import forecast_memory
from fsdp_inspect.comparison.gate.baseline import (
    Baseline,
    make_baseline,
    read_baseline,
    render_baseline,
    write_baseline,
)
from fsdp_inspect.comparison.gate.check import check_run
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, fold, read_runs, unfold
from fsdp_inspect.errors import CheckError
from fsdp_inspect.store.reader import open_run
from tests.comparison.gate.changed_models import build

ROWS = st.lists(st.tuples(st.text(), st.dictionaries(st.text(), st.integers())))


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> GateMeasurements:
    folder = tmp_path_factory.mktemp("forecast") / "run"
    forecast_memory(build, folder, world_size=4)
    return read_runs([open_run(folder)])


@given(ROWS)
def test_what_is_folded_unfolds_to_the_same(rows: list[tuple[str, dict[str, int]]]) -> None:
    assert unfold(fold(rows)) == rows


def test_alike_units_are_one_row_and_keep_their_order() -> None:
    rows = [("a", {"x": 1}), ("b", {"x": 1}), ("c", {"x": 2}), ("d", {"x": 1})]

    assert fold(rows) == [
        {"each": {"x": 1}, "units": ["a", "b"]},
        {"each": {"x": 2}, "units": ["c"]},
        {"each": {"x": 1}, "units": ["d"]},
    ]


def test_a_file_is_read_back_as_it_was_written(reading: GateMeasurements, tmp_path: Path) -> None:
    written = make_baseline(reading)
    path = tmp_path / "baseline.json"
    path.write_text(render_baseline(written))

    assert read_baseline(path) == written
    assert [unit.fqn for unit in written.manifest.units] == [
        unit.fqn for unit in reading.manifest.units
    ]


def test_writing_says_what_became_of_the_file_and_keeps_its_limits(
    reading: GateMeasurements, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "baseline.json"
    limits = {"peak_allocated_bytes": "+2%"}

    assert write_baseline(reading, path, dry=True)[1] == "wrote"
    assert not path.exists()
    assert write_baseline(reading, path) == (read_baseline(path), "wrote")
    assert write_baseline(reading, path)[1] == "unchanged"
    path.write_text(render_baseline(make_baseline(reading, limits=limits)))
    grown = dataclasses.replace(reading, memory={**reading.memory, "peak_allocated_bytes": 1})
    assert write_baseline(grown, path)[1] == "rewrote"
    assert read_baseline(path).limits == limits
    assert read_baseline(path).memory["peak_allocated_bytes"] == 1


def test_the_file_names_no_build_of_torch_no_machine_and_no_folder(
    reading: GateMeasurements,
) -> None:
    manifests = [
        reading.manifest.model_copy(
            update={
                "versions": {"torch": f"2.13.0{label}"},
                "device_name": name,
                "run_id": name,
                "config": {"runs_dir": f"/home/{name}", "seed": 0},
            }
        )
        for label, name in (("+cpu", "one"), ("+cu130", "two"))
    ]
    first, second = (
        render_baseline(
            make_baseline(GateMeasurements(manifest=manifest, run_ids=("x",), method=""))
        )
        for manifest in manifests
    )

    assert first == second
    assert '"torch": "2.13.0"' in first


def test_a_baseline_of_another_build_and_machine_differs_in_no_setting(
    reading: GateMeasurements,
) -> None:
    other = reading.manifest.model_copy(
        update={"versions": {"torch": "2.13.0+other"}, "device_name": "another machine"}
    )
    baseline = make_baseline(reading)
    result = check_run(
        GateMeasurements(
            manifest=other,
            run_ids=("x",),
            method=reading.method,
            memory=reading.memory,
            moments=reading.moments,
            phase=reading.phase,
        ),
        baseline,
    )

    assert result.exit_code == 0
    assert result.settings == ()


def test_rows_that_are_none_are_a_clear_error(reading: GateMeasurements, tmp_path: Path) -> None:
    plain = json.loads(render_baseline(make_baseline(reading)))
    plain["run"]["units"] = [{"fqn": "layers.0"}]
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(plain))

    with pytest.raises(CheckError, match="Invalid baseline") as raised:
        read_baseline(path)
    assert "--update" in str(raised.value)


def test_limits_may_be_written_into_it_by_hand(reading: GateMeasurements) -> None:
    plain = json.loads(render_baseline(make_baseline(reading)))
    plain["limits"] = {"peak_allocated_bytes": "+1 MiB"}

    assert Baseline.model_validate(plain).parsed_limits()["peak_allocated_bytes"].beyond == 2**20
