"""Does every page open every run, say first what matters, and show the library's own numbers?"""

import re
from pathlib import Path

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.digest.run import digest_run
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from tests.app.conftest import HOSTILE_NAME, HOSTILE_UNIT

SAMPLES = Path(__file__).parents[2] / "samples"
SAMPLE_IDS = sorted(
    path.parent.relative_to(SAMPLES).as_posix() for path in SAMPLES.glob("**/run.json")
)
PAGES = ("runs", "overview", "timeline", "units")
RUN_PAGES = PAGES[1:]
DAMAGED = ("failed", "partial", "no-steps")


def read(app):
    """All Markdown of a page as a reader sees it."""
    texts = [element.value for element in (*app.markdown, *app.caption, *app.warning, *app.info)]
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", "\n".join(texts)).replace("\N{WORD JOINER}", "")


@pytest.mark.parametrize("page", RUN_PAGES)
@pytest.mark.parametrize("sample", SAMPLE_IDS)
def test_every_page_opens_every_sample(open_app, sample, page):
    app = open_app(SAMPLES, page, run=sample)
    assert not app.exception
    assert not app.error
    assert app.query_params["run"] == sample


@pytest.mark.parametrize("page", RUN_PAGES)
@pytest.mark.parametrize("run", DAMAGED)
def test_every_page_opens_what_there_is_of_a_damaged_run(shown, run, page):
    app = shown(page, run)
    assert not app.exception
    assert not app.error


def test_runs_lists_every_run_with_its_status(open_app, runs_folder):
    app = open_app(runs_folder)
    assert not app.exception
    frame = app.dataframe[0].value
    assert dict(zip(frame["run"], frame["status"], strict=True)) == {
        "whole": "complete",
        "failed": "failed",
        "partial": "partial",
        "no-steps": "complete",
        "broken": "unreadable",
    }
    assert "5 runs, from" in read(app)
    assert app.expander[0].label == "1 run cannot be read"
    assert "are not JSON" in read(app)


def test_runs_shows_the_numbers_of_the_digest(shown, runs_folder):
    digest = digest_run(open_run(runs_folder / "whole"))
    frame = shown("runs", "whole").dataframe[0].value.set_index("run")
    assert frame.loc["whole", "step time (ms)"] == digest.step_time_ns.median / 1e6
    assert frame.loc["whole", "exposed (ms)"] == digest.exposed_ns / 1e6
    assert frame.loc["whole", "overlap"] == digest.overlap_ratio


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param("whole", {"whole"}, id="name"),
        pytest.param("FAILED tag", {"failed"}, id="status and tag"),
        pytest.param("bfloat16", {"whole", "failed", "partial", "no-steps"}, id="plan"),
    ],
)
def test_search_keeps_the_runs_that_have_every_word(open_app, runs_folder, wanted, expected):
    app = open_app(runs_folder)
    app.text_input(key="search").set_value(wanted).run()
    assert set(app.dataframe[0].value["run"]) == expected


def test_search_without_a_match_says_so(open_app, runs_folder):
    app = open_app(runs_folder)
    app.text_input(key="search").set_value("nothing like it").run()
    assert "No run matches." in read(app)


def test_an_empty_folder_says_how_to_record(open_app, tmp_path):
    app = open_app(tmp_path)
    assert "There is no run here yet." in read(app)
    assert "torchrun" in app.code[0].value


@pytest.mark.parametrize("page", RUN_PAGES)
def test_a_page_about_a_run_says_so_where_there_is_none(open_app, tmp_path, page):
    app = open_app(tmp_path, page)
    assert not app.exception
    assert "There is no run here yet." in read(app)


def test_overview_says_the_verdict_first_and_then_the_digests_numbers(shown, runs_folder):
    digest = digest_run(open_run(runs_folder / "whole"))
    app = shown("overview", "whole")
    assert digest.verdict.sentence in read(app)
    assert digest.verdict.why in read(app)
    assert [metric.value for metric in app.metric] == [
        format_ns(digest.step_time_ns.median),
        format_ns(digest.exposed_ns),
        format_ratio(digest.overlap_ratio),
        format_bytes(digest.peak_allocated_bytes),
    ]


def test_overviews_step_adds_up(shown, runs_folder):
    digest = digest_run(open_run(runs_folder / "whole"))
    parts = shown("overview", "whole").dataframe[0].value
    assert parts["time (ms)"].iloc[:-1].sum() == pytest.approx(parts["time (ms)"].iloc[-1])
    assert parts["time (ms)"].iloc[-1] == digest.breakdown.step_time_ns / 1e6


def test_every_chart_of_the_overview_has_a_table_and_a_csv(shown):
    app = shown("overview", "whole")
    charts = [chart.proto for chart in app.get("plotly_chart")]
    assert len(charts) == 5
    assert all(chart.alt for chart in charts)
    assert len(app.dataframe) == len(charts) + 1  # and what is known about the run
    assert len(app.download_button) == len(charts)


def test_overview_says_how_its_numbers_were_obtained(shown):
    text = read(shown("overview", "whole"))
    assert "Recorded, measured." in text
    assert "6 of 8 finished steps are timed; left out: steps 0-1 (warm-up)." in text


def test_a_run_that_failed_is_announced_before_its_numbers(shown):
    app = shown("overview", "failed")
    assert "Rank 1 failed: out of memory in step 5." in app.warning[0].value.replace("\\", "")


def test_a_run_that_lacks_a_rank_names_it(shown):
    app = shown("overview", "partial")
    assert "Rank 1 of world size 2 is missing" in app.warning[0].value.replace("\\", "")


def test_a_run_without_a_step_shows_no_number_as_zero(shown):
    app = shown("overview", "no-steps")
    assert [metric.value for metric in app.metric][:3] == ["–", "–", "–"]


def test_an_unreadable_run_is_named_with_the_reason(shown):
    app = shown("overview", "broken")
    assert not app.exception
    assert "`broken` cannot be read." in read(app)
    assert "are not JSON" in app.error[0].value


@pytest.mark.parametrize("page", RUN_PAGES)
def test_names_from_a_run_are_never_markup(shown, page):
    app = shown(page, "failed")
    for element in (*app.markdown, *app.caption):
        assert not re.search(r"(?<![\\`])<(b|img|i)\b", element.value), element.value
        assert not re.search(r"(?<!\\):red\[", element.value)
    assert HOSTILE_NAME in read(app)


def test_the_address_chooses_run_step_ranks_and_unit(open_app, runs_folder):
    app = open_app(runs_folder, "timeline", run="failed", step="4", rank="1", unit=HOSTILE_UNIT)
    assert app.selectbox(key="run").value == "failed"
    assert app.query_params["step"] == "4"
    assert app.query_params["rank"] == "1"
    assert app.query_params["unit"] == HOSTILE_UNIT
    assert app.multiselect[0].value == [1]
    assert "of step 4" in read(app)


@pytest.mark.parametrize(
    "address",
    [
        pytest.param({"run": "../../etc"}, id="path as run"),
        pytest.param({"run": "whole", "step": "99"}, id="no such step"),
        pytest.param({"run": "whole", "step": "-1; drop"}, id="no number"),
        pytest.param({"run": "whole", "rank": "7"}, id="no such rank"),
        pytest.param({"run": "whole", "unit": "layers.99"}, id="no such unit"),
    ],
)
def test_what_the_address_names_wrongly_is_as_if_not_named(open_app, runs_folder, address):
    app = open_app(runs_folder, "timeline", **address)
    assert not app.exception
    assert not app.error
    assert app.query_params["run"] in ("whole", "failed", "partial", "no-steps")
    assert app.query_params["step"] in {str(step) for step in range(8)}
    assert "unit" not in app.query_params


def test_timeline_opens_at_the_median_step_and_says_how_long_it_waited(shown, runs_folder):
    breakdown = digest_run(open_run(runs_folder / "whole")).breakdown
    app = shown("timeline", "whole")
    assert app.query_params["step"] == str(breakdown.step)
    assert (
        f"{format_ns(breakdown.exposed_ns)} of the {format_ns(breakdown.step_time_ns)} of step "
        f"{breakdown.step}" in read(app)
    )


def test_timeline_lists_all_its_spans_as_a_table_once_asked(open_app, runs_folder):
    app = open_app(runs_folder, "timeline", run="whole")
    assert len(app.dataframe) == 0
    app.session_state["spans-panel"] = True
    frame = app.run().dataframe[0].value
    assert set(frame["rank"]) == {0, 1}
    assert f"{len(frame)} spans" in app.expander[0].label
    assert frame.loc[frame["what"] == "exposed all-gather", "exposed (ms)"].min() > 0


def test_timeline_follows_the_step_picker(open_app, runs_folder):
    app = open_app(runs_folder, "timeline", run="whole")
    [picker] = [box for box in app.selectbox if box.label == "Step"]
    picker.set_value(4).run()
    assert "of step 4" in read(app)
    assert app.query_params["step"] == "4"
    app.button(key=f"Next step of {picker.key}").click().run()
    assert app.query_params["step"] == "5"


def test_units_shows_one_row_a_unit_with_the_digests_numbers(shown, runs_folder):
    digest = digest_run(open_run(runs_folder / "whole"))
    app = shown("units", "whole")
    frame = app.dataframe[0].value
    assert frame["exposed (ms)"].tolist() == [unit.exposed_ns / 1e6 for unit in digest.units]


def test_units_shows_one_unit_in_detail_and_links_to_it(open_app, runs_folder):
    app = open_app(runs_folder, "units", run="whole", unit="norm, lm_head")
    assert "Unit** `norm, lm_head`" in read(app)
    assert app.query_params["unit"] == "norm, lm_head"


@pytest.mark.parametrize("measure", ["compute", "collective duration", "parameters"])
def test_units_bars_show_what_is_chosen(open_app, runs_folder, measure):
    app = open_app(runs_folder, "units", run="whole")
    app.button_group(key="measure").set_value(measure).run()
    assert not app.exception
