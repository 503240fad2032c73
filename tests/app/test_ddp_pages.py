"""Pages about a run of DDP: its buckets are simulated, and no page uses words of FSDP for it."""

import json
import re
import shlex
import threading
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from fsdp_inspect.formatting import format_ns
from fsdp_inspect.report.wording import format_error
from fsdp_inspect.simulation.simulate import measure_self_check
from fsdp_inspect.store.reader import open_run
from tests.app.conftest import OpenApp, start_app
from tests.app.test_pages import charts_of, codes_of, read
from tests.builders import write_run
from tests.conftest import Invoke
from tests.simulation.test_buckets import BLOCKS, assign, run_of

PAGES = ("overview", "units", "memory", "ranks", "advice", "what_if", "timeline", "diagnosis")
LAUNCH = ["torchrun", "--nproc-per-node", "2", "train.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    code = {"launch": LAUNCH, "launched_at": 3}
    write_run(run_of(assign(BLOCKS, 2.0), code=code, backend="gloo"), folder / "ddp")
    return folder


def tiles(app: AppTest) -> dict[str, str]:
    return {each.label.replace("\\", ""): each.value.replace("\\", "") for each in app.metric}


def test_other_buckets_have_the_numbers_of_the_command(
    folder: Path, open_app: OpenApp, invoke: Invoke
) -> None:
    app = open_app(folder, "what_if", run="ddp")
    assert not app.exception
    recorded = tiles(app)["Predicted step"]
    [cap] = [each for each in app.select_slider if each.key == "bucket_cap"]
    cap.set_value("50").run()
    assert app.query_params["bucket_cap"] == "50"
    assert tiles(app)["Predicted step"] != recorded
    [command] = [each for each in codes_of(app, "bash") if "simulate" in each]
    assert "--bucket-cap 50" in command
    ended = invoke(*shlex.split(command)[1:], "--json")
    found = json.loads(ended.out)
    assert tiles(app)["Predicted step"] == format_ns(found["predicted"]["step_time_ns"])
    assert tiles(app)["Self-check"] == format_error(found["replay_error"])
    [chart] = charts_of(app)
    assert chart["markup"].count("chart-row") == 4
    assert "There is no prediction file" in read(app)


def test_overlap_is_an_option_without_a_value(folder: Path, invoke: Invoke) -> None:
    app = start_app(folder, "what_if", run="ddp", overlap="false")
    [command] = [each for each in codes_of(app, "bash") if "simulate" in each]
    assert command.endswith(" --no-overlap")
    assert invoke(*shlex.split(command)[1:]).code == 0


def test_the_self_check_is_one_number(folder: Path, open_app: OpenApp) -> None:
    error = format_error(measure_self_check(open_run(folder / "ddp")))
    app = open_app(folder, "overview", run="ddp")
    for search in [each for each in threading.enumerate() if each.name == "search"]:
        search.join(60)
    app.run()
    assert tiles(app)["Self-check"] == error
    assert tiles(start_app(folder, "what_if", run="ddp"))["Self-check"] == error


def test_advice_opens_what_if_and_refuses_nothing_that_it_does(folder: Path) -> None:
    text = read(start_app(folder, "advice", run="ddp"))
    assert "DDP has buckets instead of a plan" in text
    assert "cannot be simulated" not in text


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_the_sharder_and_have_no_placeholder(folder: Path, page: str) -> None:
    app = start_app(folder, page, run="ddp")
    assert not app.exception
    text = "\n".join([read(app), *codes_of(app, "bash")])
    assert "DDP" in text
    for words in ("kept after forward", "reshard_after_forward", "compute 0.0 ns", "requires NCCL"):
        assert words not in text
    assert not re.search(r"fsdp-inspect [a-z ]+ RUN\b|--nproc-per-node N\b", text)


def test_the_recorded_launch_is_the_whole_command(folder: Path) -> None:
    assert open_run(folder / "ddp").manifest.launch_line == shlex.join(LAUNCH)
