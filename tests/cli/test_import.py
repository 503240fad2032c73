import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_inspect.cli.application import build_application
from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.importing.snapshots import FakeAllocator, train


@pytest.fixture
def trace(tmp_path):
    writer = TraceWriter()
    fsdp2_step(writer)
    return writer.write(tmp_path / "trace.json.gz")


def run_import(*arguments):
    return CliRunner().invoke(build_application(), ["import", *map(str, arguments)])


def test_import_says_what_came_of_it_and_what_to_do_next(trace, tmp_path):
    result = run_import(trace, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "1 rank of 2 imported (nccl), 1 step" in result.output
    assert "2 units: (root), layers.0" in result.output
    assert "note: Units come from FSDP's own ranges" in result.output
    assert "Next: fsdp-inspect show" in result.output


def test_import_as_json_names_the_run(trace, tmp_path):
    result = run_import(trace, "--out", tmp_path / "run", "--name", "theirs", "--json")
    assert result.stderr == ""  # no progress without a terminal
    imported = json.loads(result.stdout)
    assert imported["path"] == str(tmp_path / "run")
    assert (imported["num_collectives"], imported["units"]) == (5, ["", "layers.0"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["name"] == "theirs"


@pytest.mark.parametrize("command", ["summary", "breakdown", "exposed", "units", "memory", "ranks"])
def test_every_other_command_reads_an_import(trace, tmp_path, command):
    run_import(trace, "--out", tmp_path / "run")
    arguments = [command, str(tmp_path / "run"), "--json"]
    result = CliRunner().invoke(build_application(), arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_a_damaged_trace_is_said_and_leaves_nothing(tmp_path):
    (tmp_path / "trace.json").write_text("{")
    result = run_import(tmp_path / "trace.json", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "trace.json is cut off" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path):
    result = run_import(tmp_path / "nothing", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "Expected a file or a" in result.output


def test_what_is_neither_file_nor_folder_is_a_usage_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        result = run_import(path, "--out", tmp_path / "run")
        assert result.exit_code == 2
        assert "Expected a file or a folder" in result.output
    assert not (tmp_path / "run").exists()


def test_a_snapshot_has_no_steps_to_be_asked_for(tmp_path):
    path = train(FakeAllocator()).dump(tmp_path / "snapshot.pickle")
    result = run_import(path, "--out", tmp_path / "run", "--by-step")
    assert result.exit_code == 2
    assert "no ProfilerStep marks" in result.output
    result = run_import(path, "--out", tmp_path / "run", "--name", "peak", "--json")
    assert list(json.loads(result.output))[:3] == ["run_id", "source", "notes"]
    assert open_run(tmp_path / "run").manifest.name == "peak"


def test_a_snapshot_may_be_limited_in_memory(tmp_path):
    path = train(FakeAllocator()).dump(tmp_path / "snapshot.pickle")
    result = run_import(path, "--out", tmp_path / "run", "--max-size", "1KiB")
    assert result.exit_code == 1
    assert isinstance(result.exception, CorruptFileError)


@pytest.mark.parametrize("size", ["lots", "-1GiB", "12 apples", "0", "1e999GiB"])
def test_a_size_that_is_none_is_a_usage_error(trace, tmp_path, size):
    result = run_import(trace, "--out", tmp_path / "run", "--max-size", size)
    assert result.exit_code == 2


def test_a_limit_refuses_what_is_larger(trace, tmp_path):
    result = run_import(trace, "--out", tmp_path / "run", "--max-size", "1 KiB")
    assert result.exit_code == 1
    assert run_import(trace, "--out", tmp_path / "run", "--max-size", "1MiB").exit_code == 0
