"""`fsdp-inspect plan memory`: its answers and its refusals."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from fsdp_inspect.cli import forecast_maker as forecaster
from fsdp_inspect.simulation.planning import builder_predictor as fit
from fsdp_inspect.store.reader import open_run
from tests.forked_process import ForkedProcess

SMALL = ("--preset", "tiny", "--set", "num_layers=2")
BUILDER = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from fsdp_inspect import ForecastTarget

def build(width=64, batch_size=1):
    print("building")
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(batch_size, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ForecastTarget(model=model, step=step, optimizer=optimizer, name="two layers")
"""
WITHOUT_ALLOWANCE = ("--allowance", "0B")


@pytest.fixture
def invoke(invoke, monkeypatch):
    """Like `invoke`, with a child that does not import torch and a search over few world sizes.

    `tests/simulation/planning/test_fit.py` tests the search up to 4096 ranks, whose forecast takes
    2 s.
    """
    forked = SimpleNamespace(Popen=ForkedProcess, PIPE=subprocess.PIPE)
    monkeypatch.setattr(forecaster, "subprocess", forked)
    monkeypatch.setattr(fit, "WORLD_SIZES", (1, 2, 4, 8, 16, 32))
    return invoke


@pytest.fixture
def builder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    return "mine:build"


def test_a_forecast_reports_what_it_does(invoke, tmp_path):
    said: list[str] = []
    settings = {"preset": "tiny", "num_layers": 1, "seq_len": 16}
    with forecaster.make_forecasts(
        forecaster.TRAINER, settings, name="tiny", gpus_per_node=8
    ) as maker:
        run = maker.forecast(tmp_path / "run", 2, {}, said.append)

    assert run.manifest.world_size == 2
    assert said == ["building the model", "step 1 of 2", "step 2 of 2"]


def test_a_table_by_world_size_and_what_fits(invoke, tmp_path):
    ended = invoke(
        "forecast", *SMALL, "--world-size", "2,8", "--fit", "8MiB", "--out", tmp_path / "runs",
        *WITHOUT_ALLOWANCE,
    )  # fmt: skip

    assert ended.code == 0, ended.err
    assert "on 2 ranks" in ended.out
    assert "= peak" in ended.out
    assert "Smallest world size (power of two) that is certain to fit:" in ended.out
    assert "Largest batch that is certain to fit on 2 ranks:" in ended.out
    assert "Predicted with torch" in ended.out
    assert "forecasting tiny on 8 ranks" in ended.err
    kept = open_run(tmp_path / "runs" / "tiny-8-ranks")
    assert kept.manifest.source == "predicted"
    assert not any("missing" in note for note in kept.notes)


@pytest.mark.slow
def test_the_fit_includes_an_estimated_allowance_that_is_shown_by_part(builder, invoke):
    ended = invoke("plan", "memory", builder, "--fit", "1GiB")

    words = " ".join(ended.out.split())
    assert ended.code == 1
    assert "Required with the allowance: 1.6" in words
    assert "It does not fit into 1.00 GiB on 8 ranks." in words
    assert "reserved and not allocated (predicted) + 1.30 GiB for the CUDA context" in words


def test_json_from_a_new_process_holds_what_the_table_shows(command):
    settings = ("--allocator", "max_split_size_mb:64")
    ended = command("plan", "memory", *SMALL, "--world-size", "4", "--json", *settings)

    printed = json.loads(ended.out)
    row = printed["rows"][0]
    assert row["world_size"] == 4
    assert row["peak_bytes"] == sum(category["bytes"] for category in row["categories"])
    assert printed["memory"]["memory"]["peak"]["bytes"] == row["peak_bytes"]
    assert printed["source"] == "predicted"
    assert printed["fit"] is None
    reserved = row["reserved"]
    assert reserved["origin"] == "predicted"
    assert reserved["allocator_settings"] == "max_split_size_mb:64"
    assert row["peak_bytes"] < reserved["peak_reserved_bytes"]
    assert reserved["expandable_peak_reserved_bytes"] % (2 << 20) == 0


@pytest.mark.slow
def test_a_builder_of_ones_own_is_found_from_the_current_folder(builder, invoke):
    ended = invoke(
        "forecast", builder, "--set", "width=256", "--fit", "1MiB", "--json", *WITHOUT_ALLOWANCE
    )

    printed = json.loads(ended.out)
    assert printed["name"] == "two layers"
    assert printed["num_parameters"] == 2 * (256 * 256 + 256)
    assert printed["fit"]["largest_batch_size"] > 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--world-size", "eight"), 2, "Expected a whole number from 1"),
        (("--fit", "much"), 2, "is not an amount of memory above 0"),
        (("--set", "batch_size"), 2, "is not a setting"),
        (("--device", "tpu"), 2, "neither cuda nor cpu"),
        (("mine:build", "--preset", "tiny"), 2, "Give one of the two"),
        (("--allowance", "1GiB", "--allowance-from", "x"), 2, "are both given"),
        (("--preset", "tiny", "--hf", "llama"), 2, "Expected one model"),
        (("--preset", "tiny", "--set", "preset=small"), 2, "preset is both tiny and small"),
        (("--set", "seq_len=8", "--set", "seq-len=9"), 2, "seq_len is both 8 and 9"),
    ],
    ids=["ranks", "fit", "set", "device", "both", "allowances", "models", "option", "twice"],
)
def test_wrong_use_is_refused_before_anything_runs(invoke, arguments, code, message):
    ended = invoke("plan", "memory", *arguments)

    assert ended.code == code
    assert message in " ".join(ended.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere:build",), "Module 'nowhere' cannot be imported"),
        (("mine:biuld",), "has no function 'biuld'"),
        (("mine:build", "--set", "depth=3"), "Unknown setting 'depth'"),
        (("--preset", "tiny", "--set", "batch_size=-1"), "batch_size"),
    ],
    ids=["module", "function", "keyword", "value"],
)
def test_what_cannot_be_forecast_says_why(builder, invoke, arguments, message):
    ended = invoke("plan", "memory", *arguments)

    assert ended.code == 2
    assert message in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_only_what_was_asked_for_is_kept_and_replaced_when_told(builder, invoke, tmp_path):
    out = tmp_path / "kept"
    asked = (
        *("forecast", builder, "--world-size", "4", "--fit", "1MiB", "--out", out),
        *WITHOUT_ALLOWANCE,
    )

    assert invoke(*asked).code == 0
    assert [path.name for path in out.iterdir()] == ["build-4-ranks"]
    again = invoke(*asked)
    assert again.code == 2
    assert "already exists" in again.err
    assert invoke(*asked, "--force").code == 0


def test_force_replaces_nothing_that_is_no_forecast(builder, invoke, runs_folder, tmp_path):
    out = tmp_path / "kept"
    shutil.copytree(runs_folder / "steady", out / "build-8-ranks")

    ended = invoke("plan", "memory", builder, "--out", out, "--force")

    assert ended.code == 2
    assert "is not a forecast" in ended.err
    assert open_run(out / "build-8-ranks").manifest.recorded_id == "hand-made"


@pytest.mark.slow
def test_the_highest_of_each_phase_is_told(invoke):
    ended = invoke("plan", "memory", *SMALL, "--world-size", "4")

    rows = [line.split() for line in ended.out.splitlines() if line.startswith("highest in")]
    assert [row[2] for row in rows][:2] == ["forward", "backward"]


def test_what_a_builder_does_not_take_is_said_and_the_rest_is_answered(builder, invoke, tmp_path):
    fixed = BUILDER.replace(", batch_size=1):", "):").replace("batch_size, width", "1, width")
    (tmp_path / "fixed.py").write_text(fixed)

    ended = invoke("plan", "memory", "fixed:build", "--fit", "10KiB", *WITHOUT_ALLOWANCE)

    words = " ".join(ended.out.split())
    assert ended.code == 1, ended.err
    assert "It does not fit into 10.0 KiB on 8 ranks" in words
    assert "The largest batch is unknown: the builder has no keyword batch_size" in words
    assert "No change was tried: the builder has none of the keywords" in words


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(("narrower", "saves"), [(64, False), (32, True)])
def test_only_changes_that_reduce_the_required_memory_are_listed(invoke, tmp_path, narrower, saves):
    changed = BUILDER.replace("width=64", "reshard_after_forward=None").replace(
        'print("building")', f"width = {narrower} if reshard_after_forward else 64"
    )
    (tmp_path / f"changed_{narrower}.py").write_text(changed)

    limits = ("--fit", "1KiB", "--allowance", "1MiB")
    ended = invoke("plan", "memory", f"changed_{narrower}:build", *limits)

    words = " ".join(ended.out.split())
    assert ended.code == 1, ended.err
    assert ("No memory is saved by reshard_after_forward=true." in words) is not saves
    assert ("With none of the changes below" in words) is saves
    rows = [line.split()[1:] for line in ended.out.splitlines() if line.startswith("reshard_after")]
    assert [row[1:4:2] for row in rows] == [["MiB", "KiB"]] * saves
    assert all(float(row[0]) > 1 for row in rows)  # with the allowance
