"""What-if and `fsdp-inspect plan` find equal plans; the address keeps the choices."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from fsdp_inspect.cli.application import build_application
from fsdp_inspect.formatting import format_ns
from tests.app.test_pages import SAMPLES, codes_of, read

CHOICES = {
    "plan_model": "llama-8b",
    "plan_machines": "h100-nvlink",
    "plan_gpus": "8",
    "plan_memory": "40GiB",
    "plan_seq_len": "4096",
}


@pytest.fixture
def open_what_if(open_app):
    return lambda **address: open_app(SAMPLES, "what_if", run="tiny-2-ranks", **address)


def plan_command(app):
    return next(code for code in codes_of(app) if code.startswith("fsdp-inspect plan "))


def table(app, column):
    return next(one.value for one in app.dataframe if column in one.value.columns)


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({**CHOICES, "plan_model": "llama-70b", "plan_gpus": "1"}, id="does not fit"),
        pytest.param(CHOICES, id="fits", marks=pytest.mark.slow),
    ],
)
def test_the_page_and_the_printed_command_find_the_same_plan(open_what_if, choices):
    app = open_what_if(**choices, plan_search="yes")
    words = shlex.split(plan_command(app))[1:]
    words[words.index("--out") :] = ["--no-forecast", "--json"]
    result = CliRunner().invoke(build_application(), words)
    told = json.loads(result.output)

    text = read(app)
    assert ("Fits: " in text) == (result.exit_code == 0)
    shown = told["best"] or told["undecided"]
    if shown is None:
        assert "No plan fits" in text
        assert f"fits on {told['shortfall']['gpus']} GPUs" in text
    else:
        values = table(app, "low").set_index("value of")
        assert values.loc["step time", "value"] == format_ns(shown["step_time_ns"]["value"])
        assert len(values) == 10
    if told["undecided"] is not None:
        reason = told["undecided"]["reason"]
        assert "Cannot tell" in text
        assert reason[1:] in text
    rejected = table(app, "closest plan")
    assert rejected["plans"][0] == f"{told['rejected'][0]['count']:,}"


@pytest.mark.slow
def test_nothing_is_searched_until_the_user_asks(open_what_if):
    app = open_what_if(plan_model="llama-8b")
    assert not any(code.startswith("fsdp-inspect plan ") for code in codes_of(app))
    next(button for button in app.button if button.label == "Search plans").click().run()
    assert "--model llama-8b --gpus 64 --preset h200-ib400" in plan_command(app)
    assert app.query_params["plan_search"] == "yes"


def test_the_model_is_that_of_the_run_unless_the_user_chooses_another(open_what_if):
    app = open_what_if()
    assert app.selectbox(key="plan_model").value == "tiny"
    app.selectbox(key="plan_model").select("llama-70b").run()
    assert app.query_params["plan_model"] == "llama-70b"
