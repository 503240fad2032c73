"""The public `Run`: every result, its conversions, and their agreement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_inspect as fi
from fsdp_inspect.errors import IncompleteRunError, MissingDataError, NotARunError
from fsdp_inspect.results import Result, TableResult
from fsdp_inspect.run import Run
from tests.builders import RunBuilder, steady_run

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[1] / "samples").glob("*/run.json"))
TABLES = ("breakdown", "exposed", "units", "memory", "ranks", "step_times")


@pytest.fixture(scope="module", params=SAMPLES, ids=lambda path: path.name)
def run(request: pytest.FixtureRequest) -> Run:
    return fi.open_run(request.param)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_the_same_rows_in_each_form(run: Run, name: str) -> None:
    result: TableResult = getattr(run, name)()
    frame, arrow = result.to_pandas(), result.to_arrow()
    columns = [column.name for column in result.TABLE.columns]
    assert list(frame.columns) == arrow.column_names == columns
    assert len(set(columns)) == len(columns)
    assert len(frame) == arrow.num_rows == len(result.rows())
    records = result.TABLE.records(result.rows())
    assert arrow.to_pylist() == records
    assert set(frame.attrs["columns"]) == set(columns)
    for column in result.TABLE.columns:
        metadata = arrow.schema.field(column.name).metadata
        assert metadata[b"definition"].decode() == column.definition


def test_numbers_of_different_answers_agree(run: Run) -> None:
    summary, parts = run.summary(), run.breakdown().to_pandas()
    assert summary.step_time_ns is not None
    assert parts["duration_ns"].sum() == summary.step_time_ns.typical
    exposed = run.exposed().exposed
    assert exposed is not None
    assert exposed.exposed_ns == summary.exposed_ns
    assert sum(exposed.causes_ns.values()) == summary.exposed_ns
    of_parts = parts[parts["part"].str.startswith("exposed_")]["duration_ns"].sum()
    assert of_parts == summary.exposed_ns
    ranks = run.ranks().to_pandas().set_index("rank")
    assert ranks.loc[run.median_rank, "step_time_ns"] == summary.step_time_ns.typical
    assert ranks.loc[run.median_rank, "exposed_ns"] == summary.exposed_ns


def test_answers_are_computed_once(run: Run) -> None:
    assert run.summary() is run.summary()
    assert run.exposed() is run.exposed()
    assert run.units(rank=0) is run.units(rank=0)


@pytest.mark.parametrize("name", ["summary", *TABLES])
def test_every_answer_has_a_figure_and_a_dictionary(run: Run, name: str) -> None:
    result: Result = getattr(run, name)()
    assert len(result.plot().data) >= 1
    assert set(result.to_dict()) >= {"run_id"} or name in ("ranks", "step_times")


def test_a_notebook_shows_tables_with_definitions_as_tooltips(run: Run) -> None:
    shown = run.units()._repr_html_()
    assert shown.startswith("<table><caption>Units in the typical step</caption>")
    assert 'title="' in shown
    assert run.summary().verdict.sentence in run._repr_html_()


def test_hostile_names_are_text_in_a_notebook() -> None:
    builder = RunBuilder(["<script>alert(1)</script>"])
    builder.rank(0).step(3, 0, 100)
    shown = Run(builder.build()).units()._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_a_simulation_and_its_advice_come_from_the_run() -> None:
    run = fi.open_run(SAMPLES[0])
    simulation = run.simulate(reshard_after_forward=False)
    assert simulation.step_time_ns == simulation.predicted.step_time_ns
    assert "events" in simulation.to_dict()["predicted"]
    assert simulation.to_dict()["predicted"]["events"] is None
    advice = run.advise(memory_limit="80GiB")
    assert advice.best is not None
    assert advice.plan is not None
    assert advice.best.plan == advice.plan.fastest.plan


def test_two_runs_are_compared_with_the_first_as_the_reference() -> None:
    first, second = (fi.open_run(path) for path in SAMPLES[:2])
    comparison = first.compare(second)
    assert [side.runs[0].run_id for side in comparison.sides] == [first.id, second.id]
    with pytest.raises(ValueError, match=r"compare\(\) got no run"):
        first.compare()


def test_errors_name_the_value_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=r"No run found at"):
        fi.open_run(tmp_path)
    run = Run(steady_run())
    with pytest.raises(IncompleteRunError, match=r"Rank 99 not found"):
        run.units(rank=99)
    with pytest.raises(MissingDataError, match=r"nonexistent"):
        run.exposed(unit="nonexistent")
    with pytest.raises(ValueError, match=r"Invalid memory limit: 'much'"):
        run.advise(memory_limit="much")
    with pytest.raises(TypeError, match=r"forward_prefech"):
        run.simulate(forward_prefech=2)


def test_a_run_without_a_timed_step_answers_with_none() -> None:
    run = Run(RunBuilder(["layers.0"]).build())
    assert run.median_rank is None
    assert run.exposed().rows() == ()
    assert run.units().to_pandas()["exposed_ns"].tolist() == [0]
    with pytest.raises(MissingDataError, match=r"no step is timed yet"):
        run.breakdown().plot()


def test_the_api_imports_neither_torch_nor_streamlit_nor_plotly() -> None:
    code = (
        "import sys, fsdp_inspect as fi; "
        f"run = fi.open_run({str(SAMPLES[0])!r}); run.summary(); run.units().to_arrow(); "
        "print(sorted({'torch', 'streamlit', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_representation_of_a_result_is_its_verdict(run: Run) -> None:
    summary = run.summary()
    assert repr(summary) == f"<Summary: {summary.verdict.sentence}>"
    units = run.units()
    assert repr(units) == f"<UnitCosts: {len(units.rows())} rows, see to_pandas()>"
    assert max(len(repr(getattr(run, name)())) for name in (*TABLES, "diagnose")) < 300


def test_advice_lists_its_changes() -> None:
    advice = fi.open_run(SAMPLES[0]).advise()
    assert advice.plan is not None
    assert advice.changes == list(advice.plan.suggestions)
    assert repr(advice) == f"<Advice: {advice.answer}>"
