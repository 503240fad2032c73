"""The Compare page: differences first, with the library's numbers, for any runs."""

import dataclasses
import json
import re
import shutil

import pytest
from fsdp_inspect_app.app_pages.compare.charts import (
    LESS,
    MORE,
    draw_memory_changes,
    frame_metrics,
    frame_settings,
    frame_unit_changes,
)
from fsdp_inspect_app.tables import draw_steps

from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.comparison.differences import UnitMeasure, find_unit_changes
from fsdp_inspect.report.html import read_comparison, render_comparison_page
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests import builders
from tests.app.conftest import HOSTILE_UNIT, start_app
from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run, write_run
from tests.app.test_pages import charts_of, read

FASTER_BY_NS = 30_000_000
HOSTILE_SETTING = "<img src=x> **b** [x](http://e)"


def faster(run):
    """The same run with steps that end earlier, without the tail of the optimizer."""
    tables = {}
    for rank, events in run.tables.items():
        ends = events.end_ns.copy()
        last = (events.kind == EventKind.STEP) | (events.kind == EventKind.OPTIMIZER)
        ends[last] -= FASTER_BY_NS
        tables[rank] = dataclasses.replace(events, end_ns=ends)
    return dataclasses.replace(run, tables=tables)


def named(run, run_id, **changes):
    manifest = make_manifest(run_id=run_id, **changes.pop("manifest", {}))
    return dataclasses.replace(run, manifest=manifest.model_copy(update=changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, a repeat, a run with another setting, a hostile run, a copy, and a broken run."""
    folder = tmp_path_factory.mktemp("compared")
    run = make_run(num_steps=6)
    write_run(folder / "before", named(run, "before", config={"wrap": "block"}))
    write_run(folder / "again", named(run, "again", config={"wrap": "block"}))
    write_run(folder / "after", named(faster(run), "after", config={"wrap": "root"}))
    fqns = [UNIT_FQNS[0], HOSTILE_UNIT, *UNIT_FQNS[2:]]
    write_run(
        folder / "hostile",
        named(run, "hostile", manifest={"fqns": fqns}, config={"wrap": HOSTILE_SETTING}),
    )
    shutil.copytree(folder / "before", folder / "copy")
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def comparison(folder):
    return compare_runs(*(open_run(folder / name) for name in ("before", "after")))


@pytest.fixture(scope="module")
def compared(folder):
    return start_app(folder, "compare", **{"baseline": "before", "with": "after"})


def open_with(open_app, folder, baseline, *others, **address):
    app = open_app(folder, "compare", baseline=baseline, **{"with": list(others)}, **address)
    assert not app.exception
    return app


BEFORE = "before"
"""The folder has a copy of the run `before`, so its place follows its name."""


def renamed(sentence):
    """A sentence of the library with the names of the runs in place of `A` and `B`."""
    return re.sub(r"\bB\b", "after", re.sub(r"\bA\b", BEFORE, sentence))


def test_the_answer_comes_first_in_the_librarys_words(compared, comparison):
    assert not compared.exception
    assert not compared.error
    assert read(compared).startswith(renamed(comparison.headline))
    assert renamed(comparison.answer) in read(compared)
    assert "Different settings" in read(compared)


def test_settings_that_differ_come_before_what_they_cost(compared, comparison):
    settings, cost = compared.dataframe[0].value, compared.dataframe[2].value
    assert settings["setting"].tolist() == ["wrap"]
    assert (settings[BEFORE][0], settings["after"][0]) == ("block", "root")
    assert cost.equals(frame_metrics(comparison.metrics, [BEFORE, "after"]))
    assert "step time" in cost[""].tolist()


def test_every_change_has_a_verdict_on_noise(compared):
    cost = compared.dataframe[2].value.set_index("")
    assert cost.loc["communicated bytes", "verdict"] == "equal"
    assert cost.loc["communication", "verdict"] == "within noise"


def test_reasons_are_those_of_the_library(compared, comparison):
    for reason in comparison.conclusions[0].reasons:
        assert renamed(reason) in read(compared)


def test_every_chart_has_words_a_table_and_a_csv(compared):
    charts = charts_of(compared)
    assert len(charts) >= 3
    assert all(chart["alt"] for chart in charts)
    assert len(compared.download_button) >= len(charts) + 1


def test_the_address_holds_the_runs_and_what_is_looked_at(open_app, folder):
    app = open_with(open_app, folder, "before", "after", "hostile", side="C", measure="forward")
    assert app.selectbox(key="baseline").value == "before"
    assert app.multiselect(key="with").value == ["after", "hostile"]
    assert app.query_params["with"] == ["after", "hostile"]
    assert app.selectbox(key="side").value == "C"
    assert f"What changed from {BEFORE} to hostile" in read(app)
    assert "Change to hostile: forward of each unit" in read(app)


def test_repeats_stand_on_one_side(open_app, folder):
    app = open_with(open_app, folder, "before", "again", "after")
    assert "median of 2 repeats" in read(app)
    labels = [one.proto.label.replace("\\", "") for one in app.get("page_link")]
    assert {f"Open {BEFORE}", "Open again", "Open after"} <= set(labels)


def test_without_an_address_the_chosen_run_stands_against_one_of_its_model(open_app, folder):
    app = open_app(folder, "compare", run="after")
    assert not app.exception
    assert "after" in (app.selectbox(key="baseline").value, *app.multiselect(key="with").value)
    assert app.query_params["with"]


def test_a_crashed_run_is_no_default_baseline(open_app, tmp_path):
    for number, name in enumerate(("old", "crashed", "new")):
        builders.write_run(builders.steady_run(run_id=name), tmp_path / name)
        manifest = json.loads((tmp_path / name / "run.json").read_text())
        manifest.pop("crc32", None)
        manifest["created_unix_ns"] = 1 + number
        (tmp_path / name / "run.json").write_text(json.dumps(manifest))
    for path in (tmp_path / "crashed").rglob("rank.json"):
        record = json.loads(path.read_text())
        record.pop("crc32", None)
        path.write_text(json.dumps({**record, "status": "failed"}))
    assert open_run(tmp_path / "crashed").status == "failed"
    app = open_app(tmp_path, "compare", run="new")
    assert not app.exception
    assert app.selectbox(key="baseline").value == "old"


def test_the_baseline_of_the_page_runs_is_the_baseline(open_app, folder):
    app = open_app(folder, "runs", baseline="before")
    app.switch_page("app_pages/compare/compare.py")
    app.query_params.clear()
    app.query_params["run"] = "hostile"
    app.run()
    assert not app.exception
    assert app.selectbox(key="baseline").value == "before"
    assert app.multiselect(key="with").value == ["hostile"]


@pytest.mark.parametrize("address", ["../../etc", "nothing", "\0"])
def test_what_the_address_names_wrongly_is_as_if_not_named(open_app, folder, address):
    app = open_app(folder, "compare", baseline=address, run="before", **{"with": address})
    assert not app.exception
    assert app.selectbox(key="baseline").value in {path.name for path in folder.iterdir()}


def test_a_copy_is_no_other_run(open_app, folder):
    app = open_with(open_app, folder, "before", "copy")
    assert "'before' and 'copy' are copies of one run" in app.error[0].value.replace("\\", "")


def test_a_broken_run_is_named_with_the_reason(open_app, folder):
    app = open_with(open_app, folder, "before", "broken")
    assert "These runs cannot be compared" in read(app)
    assert "run.json" in app.error[0].value.replace("\\", "")


def test_the_baseline_is_not_compared_with_itself(open_app, folder):
    app = open_with(open_app, folder, "before", "before", "after")
    assert app.multiselect(key="with").value == ["after"]


def test_names_and_settings_are_never_markup(open_app, folder):
    app = open_with(open_app, folder, "before", "hostile")
    for element in (*app.markdown, *app.caption):
        assert "<img" not in element.value.replace("\\<", "")
    assert HOSTILE_SETTING in app.dataframe[0].value["hostile"].tolist()


@pytest.mark.parametrize("other", ["whole", "partial", "no-steps"])
def test_damaged_runs_are_compared_in_what_they_have(open_app, runs_folder, other):
    app = open_with(open_app, runs_folder, "failed", other)
    assert not app.error


def test_one_run_is_nothing_to_compare(open_app, folder, tmp_path):
    shutil.copytree(folder / "before", tmp_path / "alone")
    assert "A comparison needs two runs." in read(open_app(tmp_path, "compare"))


def test_no_run_says_how_to_record(open_app, tmp_path):
    assert "No run found." in read(open_app(tmp_path, "compare"))


def test_steps_are_drawn_on_one_scale_and_add_up(folder):
    digests = read_comparison([open_run(folder / name) for name in ("before", "after")]).summaries
    chart = draw_steps(
        [
            (label, {part.name: part.duration_ns for part in digest.breakdown.parts})
            for label, digest in zip("AB", digests, strict=True)
        ]
    )
    longest = max(digest.breakdown.step_time_ns for digest in digests)
    rows = chart.markup.split("chart-row")[1:]
    for row, digest in zip(rows, digests, strict=True):
        length = sum(map(float, re.findall(r"width:([\d.]+)%", row)))
        assert length == pytest.approx(100 * digest.breakdown.step_time_ns / longest, rel=1e-3)


def test_bars_diverge_and_leave_out_unknown_changes():
    chart = draw_memory_changes([("a", -(1 << 20)), ("b", 2 << 20), ("c", None), ("d", 0)])
    bars = re.findall(r"--c:([^;]+);left:([\d.]+)%;width:([\d.]+)%", chart.markup)
    assert bars == [(LESS.colour, "25", "25"), (MORE.colour, "50", "50")]
    assert re.findall(r'chart-end"[^>]*>([^<]*)<', chart.markup) == ["-1.00 MiB", "+2.00 MiB"]
    assert LESS.colour != MORE.colour


def test_the_units_table_keeps_the_order_of_the_changes(comparison):
    changes = find_unit_changes(comparison.units, UnitMeasure.EXPOSED, 1, largest_first=True)
    frame = frame_unit_changes(changes, ("A", "B"), 1)
    assert len(frame) == len(UNIT_FQNS)
    before = [change.before / 1e6 for change in changes]
    assert frame["A: exposed (ms)"].tolist() == before


def test_settings_are_written_as_configuration_files_do(comparison):
    [setting] = comparison.settings
    changed = dataclasses.replace(setting, values=(True, None))
    frame = frame_settings([changed], ["A", "B"])
    assert (frame["A"][0], frame["B"][0]) == ("true", "(not set)")


def test_the_html_report_is_the_librarys(folder):
    contents = read_comparison([open_run(folder / name) for name in ("before", "after")])
    page = render_comparison_page(contents)
    assert "2 sides compared" in page
    assert contents.comparison.conclusions[0].sentence[:20] in page
