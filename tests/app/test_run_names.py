"""Each run of a folder has a name of its own, which a person can read."""

import json
from pathlib import Path

import pytest
from fsdp_inspect_app.loading import MOST_LETTERS, name_runs, shorten

from fsdp_inspect.result_types import RunEntry
from fsdp_inspect.store.folder import list_runs
from tests.app.synthetic import make_run, write_run

LONG = "long-" * 80


def entry(folder: str, run_id: str = "", name: str = "") -> RunEntry:
    return RunEntry(folder, Path("/runs", folder), 0, run_id, name)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param(
            [entry("20261124-031135-llama-1b-f705", "20261124-031135-llama-1b-f705", "llama-1b")],
            ["20261124-031135-llama-1b-f705"],
            id="the folder's name, as in the terminal",
        ),
        pytest.param([entry("a/run", "20261124-f705", "")], ["run"], id="deep"),
        pytest.param([entry("broken")], ["broken"], id="unreadable"),
        pytest.param(
            [entry("a", "x-llama-f705", "llama"), entry("b", "x-llama-f705", "llama")],
            ["a", "b"],
            id="copies",
        ),
        pytest.param(
            [entry("monday/llama", "one"), entry("tuesday/llama", "two")],
            ["monday/llama", "tuesday/llama"],
            id="one name in two folders",
        ),
        pytest.param(
            [entry(f"{LONG}{end}{LONG}", "x", "llama") for end in "ab"],
            [f"{LONG}{end}{LONG}" for end in "ab"],
            id="folders that differ in the middle",
        ),
    ],
)
def test_names_are_unique_and_readable(entries, expected):
    assert list(name_runs(entries).values()) == expected


def test_a_long_name_keeps_its_ends():
    [name] = name_runs([entry(f"20261124-{LONG}-f705")]).values()
    assert len(name) == MOST_LETTERS
    assert name.startswith("20261124-long-")
    assert name.endswith("long--f705")
    assert shorten("short") == "short"


def test_the_listing_reads_the_names_of_a_manifest(tmp_path):
    run = make_run(num_steps=1)
    write_run(tmp_path / "whole", run)
    written = json.loads((tmp_path / "whole" / "run.json").read_text())
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"schema_version": 1, "run_id": "a", "na')
    (tmp_path / "other").mkdir()
    other = {"units": [{"name": "no run"}], "run_id": "a", "name": "b"}
    (tmp_path / "other" / "run.json").write_text(json.dumps(other))
    (tmp_path / "quoted").mkdir()
    quoted = {"schema_version": 1, "run_id": 'a "b" \\ é', "name": 'b\n"c"'}
    (tmp_path / "quoted" / "run.json").write_text(json.dumps(quoted))
    found = {one.id: (one.run_id, one.name) for one in list_runs(tmp_path)}
    assert found == {
        "whole": (written["run_id"], written["name"]),
        "torn": ("", ""),
        "other": ("", ""),
        "quoted": (quoted["run_id"], quoted["name"]),
    }
