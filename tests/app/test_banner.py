"""The top of a page has the notes that qualify its numbers."""

from pathlib import Path

from fsdp_inspect_app.app_pages.runs.frames import frame_about

import fsdp_inspect
from fsdp_inspect.comparison.settings import describe_plan
from tests.app.conftest import start_app
from tests.app.test_pages import read

SAMPLES = Path(__file__).parents[2] / "samples"


def test_readings_that_the_machine_lacks_are_facts_about_the_run() -> None:
    run = fsdp_inspect.open_run(SAMPLES / "emulated-8-ranks-cuda")
    assert "NVLink" not in read(start_app(SAMPLES, "memory", run="emulated-8-ranks-cuda"))
    about = frame_about(run.manifest, run.summary()).set_index("fact")["value"]
    assert about["missing readings"] == run.notes[0]


def test_the_plan_of_the_facts_is_that_of_the_list_of_runs() -> None:
    run = fsdp_inspect.open_run(SAMPLES / "tiny-2-ranks")
    about = frame_about(run.manifest, run.summary()).set_index("fact")["value"]
    assert about["plan"] == describe_plan(run.manifest)
