from pathlib import Path

from fsdp_inspect.analysis.run_list import list_recorded_runs
from fsdp_inspect.report.outcomes import render_listing
from tests.builders import RunBuilder, steady_run, write_run
from tests.report.terminal_text import text_of


def test_a_listing_has_a_line_for_each_run(tmp_path):
    write_run(steady_run(), tmp_path / "first")
    assert text_of(render_listing(list_recorded_runs(tmp_path), tmp_path)) == (
        "run    created (UTC)     status    ranks  steps  backend  params\n"
        "first  2026-01-01 00:00  complete  2          4  gloo        200"
    )


def test_an_unreadable_run_is_listed_with_its_reason(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("[]")
    shown = text_of(render_listing(list_recorded_runs(tmp_path), tmp_path), width=200)
    assert "unreadable" in shown
    assert "\nbad: " in shown


def test_missing_ranks_show_in_the_listing(tmp_path):
    builder = RunBuilder(world_size=4)
    builder.rank(0).step(0, 0, 10)
    write_run(builder.build(), tmp_path / "partial")
    assert "1 of 4" in text_of(render_listing(list_recorded_runs(tmp_path), tmp_path))


def test_an_emulated_run_is_listed_as_one(tmp_path):
    builder = RunBuilder(world_size=1, backend="fake")
    builder.rank(0).step(0, 0, 10)
    write_run(builder.build(), tmp_path / "emulated-run")
    row = text_of(render_listing(list_recorded_runs(tmp_path), tmp_path)).splitlines()[1]
    assert row.split()[-2] == "emulated"


def test_an_empty_folder_says_how_to_record():
    assert text_of(render_listing((), Path("runs"))).startswith("No runs in runs. Record one with")
