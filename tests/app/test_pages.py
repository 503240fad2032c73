"""Every page opens every run, with its headline first and the library's numbers."""

import dataclasses
import json
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from fsdp_inspect import Run
from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import format_bytes, format_cause, format_ns, format_ratio
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.advice import describe_recommendation
from fsdp_inspect.report.wording import format_error
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.host_work import COLLECTION, HostActivity, HostStop
from tests.analysis.test_plain_steps import changing, run_of
from tests.app.conftest import HOSTILE_UNIT, OpenApp
from tests.app.synthetic import MS, make_run, write_run
from tests.builders import RunBuilder, run_on, write_run as write_built
from tests.cases import mark_slow
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

SAMPLES = Path(__file__).parents[2] / "samples"
SAMPLE_IDS = sorted(
    path.parent.relative_to(SAMPLES).as_posix() for path in SAMPLES.glob("**/run.json")
)
PAGES = ("runs", "overview", "timeline", "units")
RUN_PAGES = PAGES[1:]
DAMAGED = ("failed", "partial", "no-steps")
NUM_EXPORTS = 3
"""Four files of the run, and the page itself."""


def read(app):
    """All Markdown of a page as shown to a reader."""
    headings = (*app.title, *app.header, *app.subheader)
    texts = [
        element.value
        for element in (*headings, *app.markdown, *app.caption, *app.warning, *app.info)
    ]
    texts += [one.proto.help for one in (*headings, *app.metric)]
    texts += [f"{one.label} {one.value} {one.delta}" for one in app.metric]
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", "\n".join(texts)).replace("\N{WORD JOINER}", "")


def given_to(app, component):
    """What each element of a component was given, in order."""
    protos = [element.proto for element in app.get("bidi_component")]
    return [json.loads(one.json) for one in protos if one.component_name == component]


def charts_of(app):
    """The charts of a page: markup, alt and what is told under the pointer."""
    return given_to(app, "fsdp_inspect_chart")


def codes_of(app, language=None):
    """The texts of the code blocks of a page; of one language, or of all."""
    blocks = given_to(app, "fsdp_inspect_code")
    return [block["text"] for block in blocks if language in (None, block["language"])]


def errors_of(app):
    """The errors of a page, without the problem of the run `failed`."""
    return [error.value for error in app.error if "in step 5" not in error.value]


@pytest.mark.parametrize(
    ("page", "chosen"),
    [("overview", {}), ("units", {}), ("units", {"unit": "layers.1"}), ("memory", {}),
     ("ranks", {}), ("ranks", {"rank": "0"}), ("what_if", {}), ("advice", {}), ("trends", {})],
)  # fmt: skip
def test_every_chart_has_explore_which_opens_its_figure(open_app, page, chosen):
    app = open_app(SAMPLES, page, run="hsdp-4-ranks", **chosen)
    buttons = [one.key for one in app.button if str(one.key).startswith("explore-")]
    assert len(buttons) == len(charts_of(app)) > 0
    app.button(buttons[0]).click().run()
    assert not app.exception
    assert len(app.get("plotly_chart")) == 1


@pytest.mark.parametrize("page", RUN_PAGES)
@pytest.mark.parametrize("sample", mark_slow(SAMPLE_IDS, but=SAMPLE_IDS[:1]))
def test_every_page_opens_every_sample(open_app, sample, page):
    app = open_app(SAMPLES, page, run=sample)
    assert not app.exception
    assert not errors_of(app)
    assert app.query_params["run"] == sample


@pytest.mark.parametrize("page", RUN_PAGES)
@pytest.mark.parametrize("run", DAMAGED)
def test_every_page_opens_what_there_is_of_a_damaged_run(shown, run, page):
    app = shown(page, run)
    assert not app.exception
    assert not errors_of(app)


def test_runs_lists_every_run_with_its_status(open_app, runs_folder):
    app = open_app(runs_folder)
    assert not app.exception
    frame = app.dataframe[0].value
    assert dict(zip(frame["folder"], frame["status"], strict=True)) == {
        "whole": "complete",
        "failed": "failed",
        "partial": "partial",
        "no-steps": "complete",
        "broken": "unreadable",
        "newer": "unreadable",
    }
    assert "Shortest step: " in read(app)
    assert app.expander[0].label == "2 runs cannot be read"
    assert "invalid JSON" in read(app)


def test_runs_shows_the_numbers_of_the_digest(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    frame = shown("runs", "whole").dataframe[0].value.set_index("folder")
    assert frame.loc["whole", "step time (ms)"] == digest.step_time_ns.typical / 1e6
    assert frame.loc["whole", "exposed (ms)"] == digest.exposed_ns / 1e6
    assert frame.loc["whole", "overlap (%)"] == 100 * digest.overlap_ratio


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
    assert set(app.dataframe[0].value["folder"]) == expected


def test_search_without_a_match_says_so(open_app, runs_folder):
    app = open_app(runs_folder)
    app.text_input(key="search").set_value("nothing like it").run()
    assert "No run matches." in read(app)


def test_the_fastest_run_is_one_among_runs_of_its_model(open_app):
    text = read(open_app(SAMPLES))
    assert ", of `async-prefetch-2-ranks`" in text
    assert "of its model" in text


def test_an_empty_folder_says_how_to_record(open_app, tmp_path):
    app = open_app(tmp_path)
    assert "No run found." in read(app)
    assert "torchrun" in codes_of(app)[0]


def test_overview_recommends_what_advice_does(open_app, tmp_path):
    sample = shutil.copytree(SAMPLES / "tiny-2-ranks", tmp_path / "run")
    app = open_app(tmp_path, "overview", run="run")
    assert "Searching for the best change" in read(app)
    (search,) = (each for each in threading.enumerate() if each.name == "search")
    search.join(60)
    app.run()

    advice = Run(open_run(sample)).advise()
    assert advice.plan is not None
    first = advice.plan.suggestions[0]
    text = read(app)
    assert describe_recommendation(advice) in text
    assert f"{first.what}: saves {format_ns(first.saved_ns)} a step" in text
    error = format_error(advice.plan.replay_error)
    assert f"Self-check {error} error of the simulated step" in text
    assert "Searching for the best change" not in read(app)
    app.switch_page("app_pages/advice/advice.py").run()
    assert f"1. {first.what}" in read(app)


@pytest.mark.parametrize("page", RUN_PAGES)
def test_a_page_about_a_run_says_so_where_there_is_none(open_app, tmp_path, page):
    app = open_app(tmp_path, page)
    assert not app.exception
    assert "No run found." in read(app)


def test_overview_says_the_verdict_first_and_then_the_digests_numbers(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    app = shown("overview", "whole")
    assert digest.verdict.sentence in read(app)
    assert digest.verdict.why in read(app)
    assert digest.verdict.because in read(app)
    values = [metric.value.replace("\\", "") for metric in app.metric]
    assert values[:3] == [
        format_ns(digest.step_time_ns.typical),
        format_ns(digest.exposed_ns),
        format_bytes(digest.peak_allocated_bytes),
    ]
    assert values[-5:] == [
        format_ns(digest.step_time_ns.typical),
        format_ns(digest.exposed_ns),
        format_ratio(digest.overlap_ratio),
        format_bytes(digest.peak_allocated_bytes),
        "66.0 GiB",  # of 80 GiB, 14 GiB and 1 MiB reserved on rank 1
    ]


def test_pages_call_exposed_communication_unknown_if_an_import_shows_no_collective(
    open_app, tmp_path
):
    write_built(run_on(["a", "b"], source="imported"), tmp_path / "import")
    overview = open_app(tmp_path, "overview", run="import")
    assert "Exposed communication is unknown" in read(overview)
    assert "No exposed wait" not in read(overview)
    [overlap] = [tile for tile in overview.metric if tile.label == "Overlap"]
    assert overlap.delta == ""
    assert "No exposed wait" not in read(open_app(tmp_path, "units", run="import"))


def test_overview_shows_three_units_and_folds_the_rest(open_app):
    app = open_app(SAMPLES, "overview", run="hsdp-4-ranks")
    owners = Run(open_run(SAMPLES / "hsdp-4-ranks")).summary().exposed.owners
    assert sum(owner.exposed_ns > 0 for owner in owners) > 3
    links = [link.proto.label for link in app.get("page_link")]
    assert sum("mostly" in label for label in links) <= 3
    assert [panel.label.replace("\\", "") for panel in app.expander] == [
        "All numbers",
        "Waits of all units",
        "Step time and loss over steps",
        "Findings and further steps",
        "About this run",
    ]


def test_the_evidence_of_a_wait_for_data_is_such_a_wait(open_app, tmp_path):
    builder, start = RunBuilder(world_size=1), 0
    rank = builder.rank(0)
    for step in range(8):
        data_ns = 60 * MS * (step % 2)  # every second step finds its batch ready
        rank.step(step, start, start + 200 * MS)
        rank.add(EventKind.DATA, start, start + data_ns, phase=Phase.DATA)
        rank.add(EventKind.FORWARD, start + data_ns, start + 200 * MS, phase=Phase.FORWARD)
        start += 200 * MS
    write_built(builder.build(), tmp_path / "run")
    app = open_app(tmp_path, "overview", run="run")
    assert "The step is input-bound" in read(app)
    (link,) = (one.proto for one in app.get("page_link") if "Show evidence" in one.proto.label)
    query = parse_qs(link.query_string)
    assert int(query["step"][0]) % 2 == 1
    assert query["range"] == [f"0-0-{60 * MS}"]
    app = open_app(tmp_path, "timeline", **{name: values[0] for name, values in query.items()})
    assert not app.exception


def test_overview_defines_its_words_and_states_what_a_list_leaves_out(open_app):
    text = read(open_app(SAMPLES, "overview", run="hsdp-4-ranks"))
    names = ("spread_ratio", "self_check_ratio", "run_delay_ratio", "blocking_ns", "step_time_ns")
    for name in (*names, "fsdp_copies_ns"):
        assert find_metric(name).definition in text, name
    owners = measure_summary(open_run(SAMPLES / "hsdp-4-ranks")).exposed.owners
    waits = [owner.exposed_ns for owner in owners if owner.exposed_ns]
    assert len(waits) > 8
    assert f"The largest 8 of {len(waits)}: {format_ns(sum(waits[:8]))} of " in text


def test_overviews_step_adds_up(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    parts = shown("overview", "whole").dataframe[0].value
    assert parts["time (ms)"].iloc[:-1].sum() == pytest.approx(parts["time (ms)"].iloc[-1])
    assert parts["time (ms)"].iloc[-1] == digest.breakdown.step_time_ns / 1e6


def test_every_chart_of_the_overview_has_a_table_and_a_csv(open_app, runs_folder):
    app = open_app(runs_folder, "overview", run="whole")
    charts = charts_of(app)
    assert len(charts) == 4
    assert all(chart["alt"] for chart in charts)
    for key in ("step-times", "loss"):  # of any length, so they are made when they are opened
        app.session_state[f"table-{key}"] = True
    app.run()
    assert len(app.dataframe) == len(charts)
    assert len(app.download_button) == len(charts) + NUM_EXPORTS


def test_overview_says_how_its_numbers_were_obtained(shown):
    text = read(shown("overview", "whole"))
    assert "Recorded, measured." in text
    assert "6 of 8 completed steps are timed; left out: steps 0-1 (warm-up)." in text


def test_a_run_that_failed_is_announced_before_its_numbers(shown):
    app = shown("overview", "failed")
    assert (
        app.error[0]
        .value.replace("\\", "")
        .startswith("Rank 1 failed with out of memory in step 5")
    )


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
    assert "invalid JSON" in app.error[0].value


HOSTILE_FOLDER = "<b>name :red[x] $a$"


@pytest.mark.parametrize("page", RUN_PAGES)
def test_names_from_a_run_are_never_markup(open_app, runs_folder, tmp_path, page):
    shutil.copytree(runs_folder / "failed", tmp_path / HOSTILE_FOLDER)
    app = open_app(tmp_path, page, run=HOSTILE_FOLDER)
    for element in (*app.markdown, *app.caption):
        assert not re.search(r"(?<![\\`])<(b|img|i)\b", element.value), element.value
        assert not re.search(r"(?<!\\):red\[", element.value)
    assert HOSTILE_FOLDER in read(app)


def test_the_address_chooses_run_step_ranks_and_unit(open_app, runs_folder):
    app = open_app(runs_folder, "timeline", run="failed", step="4", rank="1", unit=HOSTILE_UNIT)
    assert app.selectbox(key="run").value == "failed"
    assert app.query_params["step"] == "4"
    assert app.query_params["rank"] == "1"
    assert app.query_params["unit"] == HOSTILE_UNIT
    assert app.multiselect[0].value == [1]
    assert "Step 4, rank " in read(app)


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
    assert not errors_of(app)
    assert app.query_params["run"] in ("whole", "failed", "partial", "no-steps")
    assert app.query_params["step"] in {str(step) for step in range(8)}
    assert "unit" not in app.query_params


def test_timeline_opens_at_the_step_closest_to_the_typical_one(shown, runs_folder):
    breakdown = measure_summary(open_run(runs_folder / "whole")).breakdown
    app = shown("timeline", "whole")
    run = open_run(runs_folder / "whole")
    step = measure_step_breakdown(run, rank=breakdown.rank, step=breakdown.closest_step)
    assert app.query_params["step"] == str(breakdown.closest_step)
    assert (
        f"Step {breakdown.closest_step}, rank {breakdown.rank}: {format_ns(step.exposed_ns)} of "
        f"{format_ns(step.step_time_ns)} exposed." in read(app)
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
    assert "Step 4, rank " in read(app)
    assert app.query_params["step"] == "4"
    app.button(key=f"Next step of {picker.key}").click().run()
    assert app.query_params["step"] == "5"


def test_units_shows_one_row_a_unit_with_the_digests_numbers(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    app = shown("units", "whole")
    frame = app.dataframe[0].value
    assert frame["exposed (ms)"].tolist() == [unit.exposed_ns / 1e6 for unit in digest.units]


def test_units_shows_the_kernels_of_profiled_steps(open_app, tmp_path):
    trace = TraceWriter()
    fsdp2_step(trace)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "runs" / "traced")
    kernels = open_run(tmp_path / "runs" / "traced").kernels(0)
    assert kernels is not None
    every = open_app(tmp_path / "runs", "units", run="traced")
    assert any(chart["alt"].startswith("Kernels by unit") for chart in charts_of(every))
    one = open_app(tmp_path / "runs", "units", run="traced", unit="layers.0")
    tables = [table.value for table in (*every.dataframe, *one.dataframe) if "kind" in table.value]
    groups, kinds, own = tables
    assert set(own["unit"]) == {"layers.0"}
    assert groups["time (ms)"].sum() == pytest.approx(kinds["time (ms)"].sum())
    of_unit = groups[groups["unit"] == "layers.0"]
    assert own["time (ms)"].tolist() == of_unit["time (ms)"].tolist()


def test_units_shows_one_unit_in_detail_and_links_to_it(open_app, runs_folder):
    app = open_app(runs_folder, "units", run="whole", unit="norm, lm_head")
    assert "`norm, lm_head`: " in read(app)
    assert app.query_params["unit"] == "norm, lm_head"


@pytest.mark.parametrize(
    "measure",
    mark_slow(("compute", "collective duration", "parameters"), but=("collective duration",)),
)
def test_units_bars_show_what_is_chosen(open_app, runs_folder, measure):
    app = open_app(runs_folder, "units", run="whole")
    app.button_group(key="bars").set_value(measure).run()
    assert not app.exception


def test_overview_names_the_causes_of_the_step_that_its_bar_shows(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    text = read(shown("overview", "whole"))
    for cause, duration in digest.exposed.causes_ns.items():
        assert f"{format_cause(cause)} **{format_ns(duration)}**" in text


def test_overview_leads_to_the_timeline_at_the_unit_that_is_waited_for_most(shown, runs_folder):
    digest = measure_summary(open_run(runs_folder / "whole"))
    links = {link.proto.label: link.proto for link in shown("overview", "whole").get("page_link")}
    shown_me = parse_qs(links["Show evidence"].query_string)
    assert links["Show evidence"].page == "timeline"
    assert shown_me == {
        "run": ["whole"],
        "step": [str(digest.breakdown.closest_step)],
        "rank": [str(digest.breakdown.rank)],
        "unit": ["norm, lm_head"],
    }


def test_overviews_top_units_lead_to_their_pages(shown):
    links = [link.proto for link in shown("overview", "whole").get("page_link")]
    top = [parse_qs(link.query_string)["unit"] for link in links if "norm" in link.label]
    assert top == [["norm, lm_head"]]
    assert [link.page for link in links if "norm" in link.label] == ["units"]


def test_overview_exports_the_run(shown):
    app = shown("overview", "whole")
    labels = [button.proto.label for button in app.download_button]
    assert labels[:2] == ["Report (HTML, one file)", "All numbers (JSON)"]


def test_a_link_to_the_name_of_a_run_opens_it_if_it_is_the_only_one(open_app, tmp_path):
    for folder in ("1-mine-be1e", "2-other-af00", "3-other-af01"):
        builder = RunBuilder(["a"], name=folder.split("-")[1])
        builder.rank(0).step(0, 0, 1000)
        write_built(builder.build(), tmp_path / folder)
    app = open_app(tmp_path, "overview", run="mine")
    assert app.selectbox(key="run").value == "1-mine-be1e"
    assert "was not found" not in read(app)
    app = open_app(tmp_path, "overview", run="other")
    assert "of the link means 2 runs: `2-other-af00`, `3-other-af01`" in read(app)


def test_a_link_to_a_run_that_is_not_here_says_so_until_another_is_chosen(open_app, runs_folder):
    app = open_app(runs_folder, "overview", run="last-weeks")
    assert "Run `last-weeks` of the link was not found" in read(app)
    app.selectbox(key="run").set_value("whole").run()
    assert "last-weeks" not in read(app)


def test_the_palette_sends_the_list_of_runs_once(open_app, runs_folder):
    """The same list on another page of another run is the same message, which Streamlit caches."""
    pages = [open_app(runs_folder, "units", run="whole"), open_app(runs_folder, run="partial")]
    lists = [given_to(page, "fsdp_inspect_palette_runs") for page in pages]
    assert lists[0] == lists[1]
    assert "whole" in lists[0][0]["runs"]
    for page in pages:
        [palette] = given_to(page, "fsdp_inspect_command_palette")
        assert {entry["kind"] for entry in palette["entries"]} == {"Page", "Unit"}


def test_findings_lead_to_the_page_that_shows_them(shown):
    text = read(shown("overview", "whole"))
    assert "The run follows its plan" in text
    labels = [link.proto.label for link in shown("overview", "whole").get("page_link")]
    assert "Show in Units" in labels


@pytest.mark.parametrize(
    ("run", "page", "expected"),
    [
        pytest.param(
            "failed", "diagnosis", "Rank 1 failed with out of memory in step 5", id="failed"
        ),
        pytest.param("partial", "units", "fsdp-inspect store merge", id="partial"),
        pytest.param("newer", "overview", "newer version of FSDP Inspect", id="newer schema"),
        pytest.param("no-steps", "units", "No timed step yet", id="no steps"),
    ],
)
def test_every_state_of_a_run_says_what_to_do(shown, run, page, expected):
    assert expected in read(shown(page, run))


def test_a_run_of_a_newer_schema_says_how_to_update(shown):
    app = shown("overview", "newer")
    assert "pip install --upgrade fsdp-inspect" in codes_of(app)[0]


def test_a_units_page_names_its_neighbours_and_why_it_is_waited_for(open_app, runs_folder):
    app = open_app(runs_folder, "units", run="whole", unit="layers.3")
    labels = [link.proto.label for link in app.get("page_link")]
    assert {"Previous: `layers.2`", "Next: `layers.4`", "All units"} <= set(labels)
    titles = " ".join(element.value for element in app.header)
    for title in (
        "Exposed waits by cause",
        "Collectives over steps",
        "Prefetch",
        "Memory over step ",
    ):
        assert title in titles.replace("\\", "")


def test_a_unit_with_recorded_parameters_lists_them_with_their_shapes(open_app, tmp_path):
    run = make_run()
    first, *others = run.manifest.units
    unit = first.model_copy(update={"parameters": {"embed.weight": [512, 64], "scale": []}})
    manifest = run.manifest.model_copy(update={"units": [unit, *others]})
    write_run(tmp_path / "run", dataclasses.replace(run, manifest=manifest))
    app = open_app(tmp_path, "units", run="run", unit="(root)")
    frame = next(table.value for table in app.dataframe if "parameter" in table.value.columns)
    assert frame.to_dict("list") == {
        "parameter": ["embed.weight", "scale"],
        "shape": ["512 x 64", "scalar"],
        "parameters": [32768, 1],
    }


def test_pins_and_a_baseline_come_from_the_address_and_lead_the_list(open_app, runs_folder):
    app = open_app(runs_folder, pin="failed", baseline="whole")
    frame = app.dataframe[0].value
    assert frame["folder"].tolist()[:2] == ["whole", "failed"]
    assert frame["mark"].tolist()[:2] == ["baseline", "pinned"]
    assert frame["step time vs baseline (%)"][0] == 0
    assert app.query_params["baseline"] == "whole"


@pytest.mark.parametrize("page", mark_slow(("runs", "overview", "units"), but=("overview",)))
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("../secret", id="dots"),
        pytest.param("/etc/passwd", id="absolute"),
        pytest.param("linked", id="link"),
        pytest.param("whole/../../secret", id="dots below a run"),
        pytest.param("whole\0", id="NUL"),
    ],
)
def test_no_parameter_of_an_address_names_a_file(open_app, linked_folder, value, page):
    names = ("run", "unit", "step", "rank", "pin", "baseline", "with", "bars", "search")
    app = open_app(linked_folder[0], page, **dict.fromkeys(names, value))
    assert not app.exception
    assert not errors_of(app)
    assert app.query_params["run"] in ("whole", ["whole"])
    assert "SECRET" not in read(app)


@pytest.fixture(scope="module")
def linked_folder(tmp_path_factory):
    """A folder with one run and a link to a run outside of it, and the outside run."""
    folder = tmp_path_factory.mktemp("linked")
    secret = folder / "secret"
    manifest = make_run(num_steps=3).manifest.model_copy(update={"run_id": "SECRET"})
    write_run(secret, dataclasses.replace(make_run(num_steps=3), manifest=manifest))
    write_run(folder / "runs" / "whole", make_run(num_steps=3))
    (folder / "runs" / "linked").symlink_to(secret)
    return folder / "runs", secret


def test_a_run_that_is_a_link_out_of_the_folder_is_named_and_not_read(open_app, linked_folder):
    app = open_app(linked_folder[0])
    assert app.dataframe[0].value["folder"].tolist() == ["whole"]
    assert "Links to places outside this folder are not shown: `linked`" in read(app)


def test_a_link_inside_a_run_that_leads_out_of_the_folder_is_refused(open_app, tmp_path):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=3))
    record = tmp_path / "runs" / "run" / "attempt-000" / "rank-00000" / "rank.json"
    (tmp_path / "outside.json").write_bytes(record.read_bytes())
    record.unlink()
    record.symlink_to(tmp_path / "outside.json")
    app = open_app(tmp_path / "runs", "overview", run="run")
    assert not app.exception
    assert "is a link to a place outside the folder of runs" in app.error[0].value.replace("\\", "")


def test_overview_states_what_stops_the_host_within_the_parts(open_app, tmp_path):
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step in range(8):
        rank.step(step, 1000 * step, 1000 * step + 1000)
    stop = HostStop(what=COLLECTION, count=8, num_steps=8, duration_ns=8 * 50)
    rank.record["host_work"] = HostActivity(num_steps=8, stops=[stop])
    write_built(builder.build(), tmp_path / "collects")
    app = open_app(tmp_path, "overview", run="collects")
    assert not app.exception
    assert "garbage collection 5%" in read(app)
    assert "Other (1.00 µs): it contains forward and backward, if any" in read(app)


def test_overview_says_which_steps_its_numbers_describe(open_app: OpenApp, tmp_path: Path) -> None:
    write_run(tmp_path / "changed", run_of(changing()))

    text = read(open_app(tmp_path, "overview", run="changed")).replace("\\", "")

    assert "These figures describe detailed steps of 100 ms, but the" in text
