"""The pytest plugin fails a test whose memory grew, and does not affect other tests.

Most sessions run in this process, which has loaded torch already.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp_inspect import forecast_memory
from tests.comparison.gate.changed_models import build

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[1]
PLUGIN = "fsdp_inspect.pytest_plugin"
LOADED_LATE = (
    "fsdp_inspect.recording.recorder",
    "fsdp_inspect.recording.verdict",
    "fsdp_inspect.report.check",
    "fsdp_inspect.report.memory_wording",
)

FORECASTS = """
import os
import pytest
from tests.comparison.gate.changed_models import build

PLANT = os.environ.get("PLANT", "nothing")


@pytest.mark.fsdp_memory("4 MiB", world_size=4)
def test_fits(fsdp_forecast):
    run = fsdp_forecast(build, plant=PLANT)
    assert run.manifest.world_size == 4


@pytest.mark.fsdp_memory(world_size=4)
def test_is_as_before(fsdp_forecast):
    fsdp_forecast("tests.comparison.gate.changed_models:build", plant=PLANT)


@pytest.mark.fsdp_memory("+50%", world_size=4)
class TestRoom:
    @pytest.mark.parametrize("where", ["here/there", "x"])
    def test_has_room(self, fsdp_forecast, where):
        fsdp_forecast(build, plant=PLANT)


@pytest.mark.fsdp_memory("+1 KiB", world_size=int(os.environ.get("RANKS", "4")))
def test_other_world_size(fsdp_forecast):
    fsdp_forecast(build)


@pytest.mark.fsdp_memory("4 MiB", world_size=4)
def test_measures_nothing(fsdp_forecast):
    pass
"""

RECORDS = """
import os
import pytest
import torch
import torch.distributed as dist
from tests.comparison.gate.changed_models import build

PLANT = os.environ.get("PLANT", "nothing")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_recorded(one_rank, fsdp_record):
    target = build(plant=PLANT)
    if PLANT == "leak":  # in every block: one block leaks less than the tolerance of 1%
        for block in target.model.blocks:
            block.kept = []
    with fsdp_record(target.model, target.optimizer) as recorder:
        for _ in range(2):
            with recorder.step():
                target.step()


def test_one_step_is_too_few(one_rank, fsdp_record):
    target = build()
    with fsdp_record(target.model, target.optimizer) as recorder:
        with recorder.step():
            target.step()


@pytest.mark.fsdp_memory("1 GiB", world_size=8)
def test_other_ranks(one_rank, fsdp_record):
    target = build()
    with fsdp_record(target.model, target.optimizer) as recorder:
        for _ in range(2):
            with recorder.step():
                target.step()
"""


@dataclass(frozen=True)
class Session:
    """Runs pytest in one folder repeatedly, with only this plugin."""

    pytester: pytest.Pytester
    monkeypatch: pytest.MonkeyPatch

    def run(self, *arguments: str, **environment: str) -> str:
        """The output of a session with these arguments and environment variables."""
        with self.monkeypatch.context() as patch:
            for name, value in {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}.items():
                patch.setenv(name, value)
            quiet = ("-p", "no:cacheprovider", "-W", "error")
            ended = self.pytester.runpytest_inprocess("-v", "-p", PLUGIN, *quiet, *arguments)
        return "\n".join([*ended.outlines, *ended.errlines])


@pytest.fixture(scope="module")
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load all modules that torch loads late, so that no session in this process does."""
    forecast_memory(build, tmp_path_factory.mktemp("loaded") / "run", world_size=4)
    for name in LOADED_LATE:
        importlib.import_module(name)


@pytest.fixture
def session(_loaded: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("COLUMNS", "120")
    return Session(pytester, monkeypatch)


def outcomes(printed: str) -> dict[str, str]:
    """The outcome of each test by name, from a session with -v."""
    lines = [line.split("::")[-1].split() for line in printed.splitlines() if "::" in line]
    return {words[0]: words[1] for words in lines if words[1:] and words[1].isupper()}


def part_of(printed: str, test: str) -> str:
    """The output about one failed test, in one line."""
    return " ".join(printed.split(f"_ {test} _")[1].split("\n___")[0].split())


# --- forecasts


@pytest.mark.slow
def test_a_forecast_is_held_against_its_limit_and_its_baseline(session: Session) -> None:
    session.pytester.makepyfile(test_memory=FORECASTS)

    printed = session.run("--fsdp-update-baselines")
    folder = session.pytester.path / "fsdp_baselines"
    assert sorted(path.name for path in folder.iterdir()) == [
        "test_memory.TestRoom.test_has_room-here-there-e9e09c26.json",
        "test_memory.TestRoom.test_has_room-x.json",
        "test_memory.test_is_as_before.json",
        "test_memory.test_other_world_size.json",
    ]
    assert "wrote fsdp_baselines/test_memory.test_is_as_before.json" in printed
    kept = json.loads((folder / "test_memory.test_is_as_before.json").read_text())
    assert (kept["run"]["world_size"], kept["times"]) == (4, {})

    unchanged = session.run()
    ended = outcomes(unchanged)
    assert ended.pop("test_measures_nothing") == "FAILED"
    assert set(ended.values()) == {"PASSED"}, unchanged
    assert "Nothing was measured" in part_of(unchanged, "test_measures_nothing")

    worse = session.run("-k", "before or fits or x]", PLANT="not resharded")
    ended = outcomes(worse)
    assert ended["test_is_as_before"] == ended["test_fits"] == "FAILED"
    assert ended["test_has_room[x]"] == "PASSED"
    exact = part_of(worse, "test_is_as_before")
    assert "peak_allocated_bytes rose by 256 KiB" in exact
    assert "at the peak of backward, in layers." in exact
    assert "unsharded parameter of layers.2 +256 KiB" in exact
    assert "`layers.2` has reshard_after_forward=False" in exact
    absolute = part_of(worse, "test_fits")
    assert "is 4.05 MiB, above the limit 4 MiB" in absolute
    assert "Memory at the peak by category: 4.05 MiB in memory step" in absolute
    assert "sharded parameter 896 KiB" in absolute


@pytest.mark.slow
def test_what_cannot_be_judged_is_no_pass(session: Session) -> None:
    session.pytester.makepyfile(test_memory=FORECASTS)
    select = ("-k", "other_world_size", "-rs")

    assert outcomes(session.run(*select, "--fsdp-skip-unjudged")) == {
        "test_other_world_size": "FAILED"  # without a baseline nothing is skipped
    }
    session.run(*select, "--fsdp-update-baselines")
    assert outcomes(session.run(*select, RANKS="8")) == {"test_other_world_size": "PASSED"}
    path = session.pytester.path / "fsdp_baselines" / "test_memory.test_other_world_size.json"
    baseline = json.loads(path.read_text())
    baseline["run"]["versions"]["torch"] = "1.0.0"
    path.write_text(json.dumps(baseline))
    failed = session.run(*select)
    assert outcomes(failed) == {"test_other_world_size": "FAILED"}
    reason = part_of(failed, "test_other_world_size")
    assert "The baseline has torch 1.0.0" in reason
    assert "Write a new baseline with --fsdp-update-baselines" in reason
    skipped = session.run(*select, "--fsdp-skip-unjudged")
    assert outcomes(skipped) == {"test_other_world_size": "SKIPPED"}
    assert "The baseline has torch 1.0.0" in " ".join(skipped.split())


@pytest.mark.slow
def test_an_update_keeps_limits_and_refuses_what_it_cannot_read(session: Session) -> None:
    session.pytester.makepyfile(test_memory=FORECASTS)
    select = ("-k", "is_as_before")
    path = session.pytester.path / "fsdp_baselines" / "test_memory.test_is_as_before.json"

    session.run(*select, "--fsdp-update-baselines")
    written = {**json.loads(path.read_text()), "limits": {"peak_allocated_bytes": "+1 MiB"}}
    path.write_text(json.dumps(written))
    assert "rewrote fsdp_baselines/" in session.run(*select, "--fsdp-update-baselines")
    assert json.loads(path.read_text())["limits"] == {"peak_allocated_bytes": "+1 MiB"}
    assert "unchanged fsdp_baselines/" in session.run(*select, "--fsdp-update-baselines")

    path.write_text("<<<<<<< ours")
    told = part_of(session.run(*select, "--fsdp-update-baselines"), "test_is_as_before")
    assert "Remove the file, and update again." in told
    assert path.read_text() == "<<<<<<< ours"


# --- recordings


def test_a_recorded_block_is_held_against_its_baseline(session: Session) -> None:
    session.pytester.makepyfile(test_steps=RECORDS)

    first = session.run()
    assert set(outcomes(first).values()) == {"FAILED"}, first
    told = part_of(first, "test_recorded")
    assert "Baseline not found: fsdp_baselines/test_steps.test_recorded.json" in told
    assert "pytest 'test_steps.py::test_recorded' --fsdp-update-baselines" in told
    assert "The marker has world_size=8, but 1 ranks" in part_of(first, "test_other_ranks")

    written = session.run("--fsdp-update-baselines")
    assert outcomes(written)["test_recorded"] == "PASSED"
    assert "No memory is recorded" in part_of(written, "test_one_step_is_too_few")
    assert outcomes(session.run("-k", "test_recorded")) == {"test_recorded": "PASSED"}

    leaking = session.run("-k", "test_recorded", PLANT="leak")
    assert outcomes(leaking) == {"test_recorded": "FAILED"}
    found = part_of(leaking, "test_recorded")
    assert "activation of layers.*" in found
    assert "at the peak of backward" in found
    assert "step_time" not in found


# --- wrong use, and no use


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"38 Gigs", world_size=4', "'38 Gigs'. Expected '38 GiB'"),
        ("38, world_size=4", "the limit is 38. Expected a text"),
        ('"1 GiB", "2 GiB", world_size=4', "takes one limit, got 2"),
        ('"1 GiB"', "has no world_size"),
        ('"1 GiB", world_size=0', "world_size is 0. Expected a number of ranks"),
        ('"1 GiB", worldsize=4', "unknown keyword 'worldsize'. Expected one of world_size"),
        ('"1 GiB", world_size=4, device_type="tpu"', "Expected 'cuda' or 'cpu'"),
    ],
    ids=["limit", "number", "two limits", "no ranks", "0 ranks", "unknown", "device"],
)
def test_a_wrong_marker_is_a_usage_error(session: Session, marker: str, message: str) -> None:
    session.pytester.makepyfile(
        test_wrong=f"import pytest\n\n@pytest.mark.fsdp_memory({marker})\n"
        "def test_it(fsdp_forecast): ...\n"
    )
    printed = session.run()

    assert "ERROR: test_wrong.py::test_it: " in printed
    assert message in printed
    assert "Traceback" not in printed


def test_a_marker_or_fixture_that_does_nothing_is_a_usage_error(session: Session) -> None:
    marked = "import pytest\n\n@pytest.mark.fsdp_memory('1 GiB')\ndef test_it(): ...\n"
    session.pytester.makepyfile(test_wrong=marked)
    assert "ERROR: test_wrong.py::test_it: the marker fsdp_memory has no effect" in session.run()

    session.pytester.makepyfile(test_wrong="def test_it(fsdp_forecast): ...\n")
    assert "world size. Expected a marker that sets it" in session.run()


def test_in_a_worker_of_xdist_a_wrong_marker_fails_its_test(session: Session) -> None:
    """A usage error would end the worker without a visible message."""
    session.pytester.makeconftest("def pytest_configure(config): config.workerinput = {}")
    session.pytester.makepyfile(
        "import pytest\n\n@pytest.mark.fsdp_memory('x', world_size=4)\n"
        "def test_it(fsdp_forecast): ...\n\ndef test_other(): ...\n"
    )
    printed = session.run()

    assert outcomes(printed) == {"test_it": "ERROR", "test_other": "PASSED"}
    assert "Expected '38 GiB'" in printed


def test_an_unused_plugin_loads_nothing_and_costs_nothing_to_speak_of(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    script = (
        "import sys, time, pytest\n"
        "begun = time.process_time()\n"
        f"import {PLUGIN}\n"
        "spent = time.process_time() - begun\n"
        f"code = pytest.main(['-q', '-p', '{PLUGIN}', '-p', 'no:cacheprovider'])\n"
        "heavy = {'torch', 'pandas', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "print('FOUND', int(code), sorted(heavy), round(spent * 1000))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    found = done.stdout.split("FOUND ")[1].split()
    assert found[:2] == ["0", "[]"]
    assert int(found[2]) < 200  # ms of processor time; torch takes a second
