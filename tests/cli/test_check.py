"""`fsdp-inspect check` and its three exit codes, in every output format."""

import json
import sys
from xml.etree import ElementTree

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.comparison.gate.baseline import read_baseline
from tests.comparison.gate.changed_models import build


@pytest.fixture(scope="module")
def forecasts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasts")
    for plant in ("nothing", "renamed", "not resharded"):
        forecast_memory(
            build, folder / plant.replace(" ", "-"), world_size=4, settings={"plant": plant}
        )
    forecast_memory(build, folder / "wider", world_size=8)
    return folder


@pytest.fixture(scope="module")
def baseline(forecasts, tmp_path_factory):
    from fsdp_inspect.cli import main

    path = tmp_path_factory.mktemp("baselines") / "planted.json"
    arguments = ["check", forecasts / "nothing", "--baseline", path, "--update"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fsdp-inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return path


def test_an_unchanged_program_holds(invoke, forecasts, baseline):
    ended = invoke("check", forecasts / "renamed", "--baseline", baseline)

    assert ended.code == 0
    assert "passes" in ended.out


def test_a_regression_exits_with_1_and_says_where(invoke, forecasts, baseline):
    ended = invoke("check", forecasts / "not-resharded", "--baseline", baseline)

    words = " ".join(ended.out.split())
    assert ended.code == 1
    assert "peak_allocated_bytes rose by 256 KiB" in words
    assert "unsharded parameter of layers.2" in words
    assert "reshard_after_forward=False" in words
    assert "config.plant: nothing -> not resharded" in words


def test_another_world_size_is_a_cause(invoke, forecasts, baseline):
    ended = invoke("check", forecasts / "wider", "--baseline", baseline)

    assert ended.code == 0
    assert "machine.world_size: 4 -> 8" in ended.out


def test_json_has_the_verdict_and_the_evidence(invoke, forecasts, baseline):
    ended = invoke("check", forecasts / "not-resharded", "--baseline", baseline, "--json")

    printed = json.loads(ended.out)
    assert (ended.code, printed["exit_code"], printed["outcome"]) == (1, 1, "regression")
    assert printed["growth"][0]["units"] == ["layers.2"]
    assert printed["phase"] == "backward"


def test_one_verdict_in_every_form(invoke, forecasts, baseline, tmp_path):
    run = forecasts / "not-resharded"
    summary, report = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.write_text("# Job\n")
    ended = invoke(
        *("check", run, "--baseline", baseline, "--format", "github"),
        *("--format", f"markdown={summary}", "--format", f"junit={report}"),
    )

    assert ended.code == 1
    assert ended.out.startswith("::error title=FSDP Inspect::Model: peak_allocated_bytes rose")
    assert summary.read_text().startswith("# Job\n### FSDP Inspect: Model: regression")
    suite = ElementTree.fromstring(report.read_text()).find("testsuite")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["peak_allocated_bytes", "peak_forward_bytes", "peak_backward_bytes"]
    assert suite.get("failures") == "3"


def test_a_budget_is_an_absolute_limit(invoke, forecasts, tmp_path):
    budget = tmp_path / "budget.toml"
    budget.write_text('[limits]\npeak_allocated_bytes = "4 MiB"\n')

    assert invoke("check", forecasts / "nothing", "--budget", budget).code == 0
    assert invoke("check", forecasts / "not-resharded", "--budget", budget).code == 1


@pytest.mark.parametrize("has_baseline", [False, True])
def test_memory_above_a_budget_that_did_not_rise_has_no_increase_to_explain(
    invoke, forecasts, baseline, tmp_path, has_baseline
):
    budget = tmp_path / "budget.toml"
    budget.write_text('[limits]\npeak_allocated_bytes = "1 MiB"\n')
    options = ["--baseline", baseline] if has_baseline else []

    ended = invoke("check", forecasts / "nothing", "--budget", budget, *options)

    assert ended.code == 1
    assert "above the limit 1 MiB" in ended.out
    assert "increase" not in ended.out
    assert "cause" not in ended.out


@pytest.mark.parametrize("metric", ["peak_allocated_bytes", "step_time_ns"])
def test_a_relative_limit_without_a_baseline_says_so(invoke, forecasts, tmp_path, metric):
    budget = tmp_path / "budget.toml"
    budget.write_text(f'[limits]\n{metric} = "+2%"\n')

    ended = invoke("check", forecasts / "nothing", "--budget", budget)

    assert ended.code == 2
    assert f"{metric} cannot be judged: its limit +2% is relative" in " ".join(ended.out.split())


def test_a_limit_in_the_baseline_is_kept_by_an_update(invoke, forecasts, baseline, tmp_path):
    copy = tmp_path / "baseline.json"
    written = json.loads(baseline.read_text())
    written["limits"] = {
        name: "+1 MiB" for name in ("peak_allocated_bytes", *written["memory"]) if "peak" in name
    }
    copy.write_text(json.dumps(written))

    assert invoke("check", forecasts / "not-resharded", "--baseline", copy).code == 0
    invoke("check", forecasts / "nothing", "--baseline", copy, "--update")
    assert read_baseline(copy).limits == written["limits"]
    assert copy.read_text() == copy.read_text().rstrip() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Expected either runs or --record"),
        (("x",), "Nothing to compare with: --baseline"),
        (("x", "--baseline", "missing.json"), "No run found at"),
        (("x", "--baseline", "b.json", "--repeat", "5"), "--repeat and --out require --record"),
        (("x", "--baseline", "b.json", "--json", "--format", "junit"), "Expected either --json or"),
        (("--record", "true", "--baseline", "b.json"), "{runs} is missing in the command"),
        (("--record", "a ' {runs}", "--baseline", "b.json"), "invalid command"),
        (("--record", "no-such-program {runs}", "--baseline", "b.json"), "'no-such-program'"),
        (("--record", "true {runs}", "--baseline", "b.json"), "The command recorded 0 runs."),
    ],
    ids=[
        "nothing",
        "no baseline",
        "no run",
        "nothing to repeat",
        "two forms",
        "no placeholder",
        "open quote",
        "no program",
        "no recording",
    ],
)
def test_wrong_use_exits_with_2(invoke, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    ended = invoke("check", *arguments)

    assert ended.code == 2
    assert message in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


def test_what_cannot_be_written_exits_with_2_and_a_regression_stays_one(
    invoke, forecasts, baseline, tmp_path
):
    taken = tmp_path / "file"
    taken.write_text("")
    reports = ("--format", f"junit={taken / 'junit.xml'}")

    holds = invoke("check", forecasts / "nothing", "--baseline", baseline, *reports)
    grown = invoke("check", forecasts / "not-resharded", "--baseline", baseline, *reports)
    update = invoke("check", forecasts / "nothing", "--baseline", taken / "b.json", "--update")

    assert (holds.code, grown.code, update.code) == (2, 1, 2)
    assert "the result cannot be written" in holds.err
    assert "cannot be written" in update.err


def test_a_run_without_memory_or_times_makes_no_baseline(invoke, runs_folder, tmp_path):
    path = tmp_path / "empty.json"
    ended = invoke("check", runs_folder / "steady", "--baseline", path, "--update")

    assert (ended.code, path.exists()) == (2, False)
    assert "No memory is recorded in a step after warm-up" in ended.err


def test_runs_that_are_no_repeats_cannot_be_judged(invoke, forecasts, baseline):
    runs = [forecasts / "nothing", forecasts / "renamed"]
    ended = invoke("check", *runs, "--baseline", baseline)

    assert ended.code == 2
    assert "Expected repeats of one program" in " ".join(ended.out.split())


def test_recorded_runs_are_kept_where_asked(invoke, forecasts, baseline, tmp_path):
    copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2] + '/run')"
    command = f'{sys.executable} -c "{copy}" {forecasts / "not-resharded"} {{runs}}'
    given = ("--record", command, "--repeat", "2", "--baseline", baseline)

    gone = invoke("check", *given)
    kept = invoke("check", *given, "--out", tmp_path / "kept")
    again = invoke("check", *given, "--out", tmp_path / "kept")

    assert (gone.code, kept.code, again.code) == (1, 1, 2)
    assert "--out DIR" in gone.err
    assert "--out DIR" not in kept.err
    assert (tmp_path / "kept" / "2" / "run" / "run.json").exists()
    assert "Expected a new folder" in again.err


def test_a_missing_baseline_says_how_to_make_one(invoke, forecasts, tmp_path):
    ended = invoke("check", forecasts / "nothing", "--baseline", tmp_path / "none.json")

    assert ended.code == 2
    assert "--update" in ended.err


@pytest.mark.slow
@pytest.mark.distributed
def test_runs_are_recorded_first_and_times_want_five(invoke, tmp_path):
    trainer = (
        f"{sys.executable} -m instrumented_trainer --preset tiny --num-layers 2 --steps 6 "
        "--emulate world_size=4,bandwidth=10GB/s --runs-dir {runs}"
    )
    path = tmp_path / "recorded.json"

    made = invoke("check", "--record", trainer, "--baseline", path, "--update")
    again = invoke("check", "--record", trainer, "--baseline", path)

    assert made.code == 0, made.err
    assert read_baseline(path).times == {}
    assert again.code == 0, again.out


def test_one_run_is_no_repeat_of_itself(invoke, forecasts, baseline):
    run = forecasts / "nothing"

    ended = invoke("check", run, run.parent / "." / "nothing", "--baseline", baseline)

    assert ended.code == 2
    assert "is given 2 times. Expected repeats, each recorded on its own." in ended.err
