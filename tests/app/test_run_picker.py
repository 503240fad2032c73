"""The run picker of a large folder lists the newest runs and the chosen one."""

import pytest

from fsdp_inspect.store.records import encode_record
from fsdp_inspect.writing import replace_file
from tests.app.conftest import start_app
from tests.store.run_files import make_manifest


def write_manifests(folder, count):
    for number in range(count):
        (folder / f"run-{number:03}").mkdir()
        changes = {"run_id": f"run-{number:03}", "created_unix_ns": 1 + number}
        manifest = make_manifest().model_copy(update=changes)
        replace_file(folder / f"run-{number:03}" / "run.json", encode_record(manifest))


@pytest.mark.slow
def test_the_picker_lists_the_newest_500_runs_and_the_chosen_one(tmp_path):
    write_manifests(tmp_path, 503)
    picker = start_app(tmp_path, "runs", run="run-001").selectbox(key="run")
    assert picker.value == "run-001"
    assert len(picker.options) == 501
    assert picker.help.startswith("The newest 500 of 503 runs.")


@pytest.mark.slow
def test_the_picker_of_500_runs_lists_them_all(tmp_path):
    write_manifests(tmp_path, 500)
    picker = start_app(tmp_path, "runs").selectbox(key="run")
    assert (len(picker.options), picker.value, picker.help) == (500, "run-499", "")
