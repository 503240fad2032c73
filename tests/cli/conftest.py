import sys
from pathlib import Path

import pytest

from tests.builders import steady_run, write_run
from tests.cli.tuning_session import CONFIG, tune
from tests.conftest import Ended


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory):
    """Two runs on the disk, `four` and `steady`; tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(steady_run(), folder / "steady")
    write_run(steady_run(world_size=4, run_id="four"), folder / "four")
    return folder


@pytest.fixture
def command(run_python):
    """The command line as a separate process: `command("show", folder, "summary")`."""

    def run(*arguments, cwd=None):
        done = run_python(
            *("-m", "fsdp_inspect", *map(str, arguments)),
            check=False,
            cwd=cwd or Path.cwd(),
            environment={"COLUMNS": "80", "NO_COLOR": "1"},
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """One tuning session under emulation: baseline, a plan, the baseline again.

    It runs on a virtual clock, so that the step times do not depend on the machine.
    """
    folder = tmp_path_factory.mktemp("tuned")
    config = folder / "config.toml"
    config.write_text(CONFIG.replace('[sharding]\nwrap = "block"\n', ""))  # the plan sets it
    trainer = [
        sys.executable,
        "-m",
        "tests.studies.validation.virtual_time",
        "instrumented_trainer",
    ]
    options = ["--config", config, "--record", "--runs-dir", "{runs}", "--name", "{name}"]
    return tune(folder / "runs", "--budget", "1", "--", *trainer, *options, "--plan", "{plan}")
