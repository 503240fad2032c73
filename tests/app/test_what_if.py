"""What-if and the command give equal predictions for every setting; refusals are explained."""

import json
import re
import shlex
import shutil

import pytest
from fsdp_inspect_app.app_pages.what_if.simulation import (
    frame_parts,
    frame_peaks,
    prepare,
    simulate_knobs,
)
from fsdp_inspect_app.knobs import (
    AS_RECORDED,
    KNOBS_OF_NETWORK,
    KNOBS_OF_RANKS,
    KNOBS_OF_REDUCTION,
    command_of,
    knobs_of_units,
    pack_plan,
    recorded_values,
)
from fsdp_inspect_app.tables import HELD_LOOKS, draw_peaks, draw_steps
from typer.testing import CliRunner

from fsdp_inspect import Plan
from fsdp_inspect.cli.application import build_application
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.report.simulation import answer_simulation
from fsdp_inspect.simulation.changes import wrap
from fsdp_inspect.simulation.memory import Held
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Fsdp1Settings, UnitPlan
from tests.app.conftest import start_app
from tests.app.test_pages import SAMPLES, codes_of, read

RUN = "tiny-2-ranks"


@pytest.fixture(scope="module")
def run():
    return open_run(SAMPLES / RUN)


@pytest.fixture(scope="module")
def bench(run):
    return prepare(run)


@pytest.fixture(scope="module")
def knobs(bench):
    return [
        *knobs_of_units(bench.plan),
        *KNOBS_OF_REDUCTION,
        *KNOBS_OF_RANKS,
        *KNOBS_OF_NETWORK,
    ]


def simulate_by_command(command, *more):
    result = CliRunner().invoke(build_application(), [*shlex.split(command)[1:], *more, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def numbers_of(simulation):
    played = simulation.predicted
    return {
        "step_time_ns": played.step_time_ns,
        "exposed_ns": played.exposed_ns,
        "peak_bytes": played.peak_bytes,
        "parts_ns": played.parts_ns,
    }


SETTINGS = [
    pytest.param({}, id="as recorded"),
    pytest.param({"wrap": "every:2", "forward_prefetch": "1"}, id="units"),
    pytest.param({"reshard_after_forward": "false", "reduce_dtype": "bfloat16"}, id="reshard"),
    pytest.param(
        {"separate_reduce_scatter_group": "separate", "reduce_scatter_buffers": "2"}, id="queues"
    ),
    pytest.param({"microbatches": "2", "accumulation_sync": "last"}, id="accumulation"),
    pytest.param(
        {"world_size": "64", "bandwidth": "20GB/s", "latency": "50us"}, id="ranks and network"
    ),
]


@pytest.mark.parametrize("chosen", SETTINGS)
def test_the_command_gives_the_numbers_of_the_page(run, bench, knobs, chosen):
    shown = simulate_knobs(bench, run.manifest, bench.plan, chosen, knobs)
    printed = simulate_by_command(command_of(str(SAMPLES / RUN), chosen, knobs))
    assert {name: printed["predicted"][name] for name in numbers_of(shown)} == numbers_of(shown)
    assert (printed["low_ns"], printed["high_ns"]) == (shown.low_ns, shown.high_ns)
    assert printed["replay_error"] == shown.replay_error


def test_the_page_shows_what_it_plays(open_app, run, bench, knobs):
    chosen = {"wrap": "every:2", "forward_prefetch": "1", "bandwidth": "1GB/s"}
    app = open_app(SAMPLES, "what_if", run=RUN, **chosen)
    assert not app.exception
    shown = simulate_knobs(bench, run.manifest, bench.plan, chosen, knobs)
    assert answer_simulation(shown) in read(app)
    assert app.metric[0].value.replace("\\", "") == format_ns(shown.predicted.step_time_ns)
    assert app.metric[2].value.replace("\\", "") == format_bytes(shown.predicted.peak_bytes)
    assert codes_of(app)[0] == command_of(str(SAMPLES / RUN), chosen, knobs)


def test_turning_a_knob_moves_the_number_and_the_address(open_app):
    app = open_app(SAMPLES, "what_if", run=RUN)
    before = app.metric[0].value
    assert "bandwidth" not in app.query_params
    app.session_state["knobs of Network"] = True
    app.run()
    app.select_slider(key="bandwidth").set_value("10MB/s").run()
    assert not app.exception
    assert app.metric[0].value != before
    assert app.query_params["bandwidth"] == "10MB/s"
    app.button(key="reset").click().run()
    assert app.metric[0].value == before
    assert "bandwidth" not in app.query_params


def test_the_replays_error_stands_beside_the_prediction(open_app, bench):
    app = open_app(SAMPLES, "what_if", run=RUN)
    assert app.metric[3].label == "Self\\-check"
    assert "recorded step" in app.metric[3].help
    assert "%" in app.metric[3].value


@pytest.mark.parametrize(
    ("address", "said"),
    [
        pytest.param({"replicas": "2"}, "all_reduce", id="no all-reduce to learn from"),
        pytest.param({"replicas": "4"}, "Expected a multiple of 4", id="ranks do not divide"),
        pytest.param({"reshard_after_forward": "64"}, "divisor of the 2 ranks", id="group"),
        pytest.param({"plan": "nonsense"}, "plan in the address cannot be read", id="plan"),
    ],
)
def test_what_cannot_be_played_is_explained(open_app, address, said):
    app = open_app(SAMPLES, "what_if", run=RUN, **address)
    assert not app.exception
    assert "These settings cannot be simulated" in read(app)
    assert said in app.warning[0].value.replace("\\", "")


@pytest.mark.parametrize("text", ["9999", "-1", "<b>", "\0", "every:0"])
def test_a_setting_that_is_none_is_as_if_not_named(open_app, text):
    app = open_app(SAMPLES, "what_if", run=RUN, wrap=text, forward_prefetch=text, latency=text)
    assert not app.exception
    assert app.selectbox(key="wrap").value == AS_RECORDED
    assert "wrap" not in app.query_params


def test_a_plan_from_a_link_is_played_and_can_be_changed_further(open_app, bench, tmp_path):
    plan = wrap(bench.plan, "every:2")
    app = open_app(SAMPLES, "what_if", run=RUN, plan=pack_plan(plan), bandwidth="1GB/s")
    assert not app.exception
    assert "The plan of the address changes units" in read(app)
    assert codes_of(app)[0].endswith("--bandwidth 1GB/s --plan plan.toml")
    file = tmp_path / "plan.toml"
    plan.dump(file)
    printed = simulate_by_command(codes_of(app)[0].replace("plan.toml", str(file)))
    assert app.metric[0].value.replace("\\", "") == format_ns(printed["predicted"]["step_time_ns"])


def test_a_plan_of_another_model_is_explained(open_app):
    plan = Plan.from_dict({"units": [{"modules": ["other.7"]}, {"modules": [""]}]})
    app = open_app(SAMPLES, "what_if", run=RUN, plan=pack_plan(plan))
    assert not app.exception
    assert "These settings cannot be simulated" in read(app)


@pytest.mark.parametrize("name", ["whole", "partial", "no-steps", "failed"])
def test_a_run_that_cannot_be_played_says_why_and_what_to_do(shown, name):
    app = shown("what_if", name)
    assert not app.exception
    assert "This run cannot be simulated" in read(app)
    assert re.search(r"Expected .*\. .*[Rr]ecord ", read(app))  # the remedy of the error


def test_a_run_whose_plan_names_other_units_says_so(tmp_path):
    shutil.copytree(SAMPLES / RUN, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    del manifest["crc32"]
    manifest["plan"]["units"] = [{"modules": ["other.7"]}, {"modules": [""]}]
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    app = start_app(tmp_path, "what_if", run="run")
    assert not app.exception
    assert "This run cannot be simulated" in read(app)
    assert "other.7" in read(app)


def test_every_option_is_legal_for_the_command(bench, knobs):
    for knob in knobs:
        for text in knob.options:
            assert knob.read(text) is not None
            assert command_of("RUN", {knob.name: text}, knobs).startswith("fsdp-inspect simulate")


def test_what_was_recorded_is_said_beside_the_knobs(run, bench):
    assert recorded_values(bench.plan, run.manifest) == {
        "wrap": "8 units",
        "reshard_after_forward": "by unit",
        "checkpointing": "none",
        "forward_prefetch": "0",
        "backward_prefetch": "0",
        "param_dtype": "float32",
        "reduce_dtype": "float32",
        "reduce_scatter_buffers": "1",
        "world_size": "2",
        "replicas": "1",
        "microbatches": "1",
        "accumulation_sync": "every",
    }


def test_tables_and_charts_hold_the_numbers_and_add_up(run, bench, knobs):
    simulation = simulate_knobs(bench, run.manifest, bench.plan, {"wrap": "every:3"}, knobs)
    parts, peaks = frame_parts(simulation), frame_peaks(simulation)
    for column in parts.columns[1:]:
        assert parts[column].iloc[:-1].sum() == pytest.approx(parts[column].iloc[-1])
    peak = simulation.predicted.peak_bytes / (1 << 20)
    assert peaks["this plan, predicted (MiB)"].sum() == pytest.approx(peak)
    steps = draw_steps([("this plan", simulation.predicted.parts_ns)])
    widths = re.findall(r"width:([\d.]+)%", steps.markup)
    assert sum(map(float, widths)) == pytest.approx(100, rel=1e-3)
    assert format_ns(simulation.predicted.step_time_ns) in steps.markup
    peaks = draw_peaks([("this plan", simulation.predicted.peak_categories)])
    assert peaks.markup.count("chart-swatch") > 3


def test_every_category_of_a_played_peak_has_a_look():
    assert set(HELD_LOOKS) == {held.label for held in Held}


def test_ranks_that_do_not_exist_cannot_be_played(run, bench, knobs):
    with pytest.raises(FsdpInspectError):
        simulate_knobs(bench, run.manifest, bench.plan, {"replicas": "32"}, knobs)


def test_commands_quote_what_a_shell_would_obey(knobs):
    command = command_of("runs/a b; rm -rf x", {"wrap": "root"}, knobs)
    assert shlex.split(command) == [
        "fsdp-inspect", "simulate", "runs/a b; rm -rf x", "--wrap", "root",
    ]  # fmt: skip


def test_the_knobs_of_fsdp1_have_its_own_settings() -> None:
    units = tuple(UnitPlan(modules=(name,)) for name in ("", "layers.0", "layers.1"))
    knobs = {knob.name: knob for knob in knobs_of_units(Plan(units=units, fsdp1=Fsdp1Settings()))}
    assert knobs["backward_prefetch"].options == ("BACKWARD_PRE", "BACKWARD_POST", "none")
    assert knobs["backward_prefetch"].read("none") == "none"
    assert knobs["forward_prefetch"].options == ("0", "1")
    assert knobs["wrap"].options == ("root", "block", "split")
