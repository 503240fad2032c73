import json

import pytest
import typer

from fsdp_inspect.cli.export import DEFAULT_MAX_MB, parse_numbers
from fsdp_inspect.report.perfetto import DEFAULT_LIMIT_MB
from tests.report.perfetto.trace_reader import read_trace


def test_a_trace_is_written_and_says_how_to_open_it(invoke, runs_folder, tmp_path):
    out = tmp_path / "trace.json.gz"
    ended = invoke("export", runs_folder / "four", "--format", "perfetto", "--out", out)
    assert ended.code == 0, ended.err
    assert "https://ui.perfetto.dev" in ended.out
    assert len(read_trace(out).threads) == 5


def test_steps_and_ranks_narrow_a_trace(invoke, runs_folder, tmp_path):
    out = tmp_path / "trace.json"
    invoke(
        "export", runs_folder / "four", "--format", "perfetto", "--out", out,
        "--steps", "1-2", "--ranks", "3",
    )  # fmt: skip
    trace = read_trace(out)
    assert [one.name for one in trace.on("step")] == ["step 1", "step 2"]
    assert set(trace.threads) == {"rank 3", "about this run"}


@pytest.mark.parametrize("table_format", ["csv", "parquet"])
def test_tables_are_written_into_a_folder(invoke, runs_folder, tmp_path, table_format):
    out = tmp_path / "tables"
    ended = invoke(
        "export", runs_folder / "steady", "--format", table_format, "--out", out, "--json"
    )
    written = json.loads(ended.out)
    assert {table["file"] for table in written["tables"]} == {
        file.name for file in out.iterdir()
    } | {"memory." + table_format, "devices." + table_format}
    assert written["ranks"] == [0, 1]


def test_what_lies_there_is_replaced_only_with_force(invoke, runs_folder, tmp_path):
    out = tmp_path / "trace.json"
    out.write_text("mine")
    arguments = ("export", runs_folder / "steady", "--format", "perfetto", "--out", out)
    refused = invoke(*arguments)
    assert (refused.code, out.read_text()) == (1, "mine")
    assert "--force" in refused.err
    assert invoke(*arguments, "--force").code == 0
    read_trace(out)


def test_a_name_that_perfetto_would_not_know_is_refused(invoke, runs_folder, tmp_path):
    ended = invoke(
        "export", runs_folder / "steady", "--format", "perfetto", "--out", tmp_path / "trace.pb"
    )
    assert ended.code == 2
    assert "trace.pb.json.gz" in ended.err


def test_tables_are_not_written_into_what_looks_like_one_file(invoke, runs_folder, tmp_path):
    ended = invoke(
        "export", runs_folder / "steady", "--format", "csv", "--out", tmp_path / "run.csv"
    )
    assert ended.code == 2
    assert "run-tables" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["5-3", "a", "1,,2", "-1", "1-", "0-99999999999"])
def test_a_list_that_is_none_is_a_wrong_command_line(invoke, runs_folder, tmp_path, text):
    ended = invoke(
        "export", runs_folder / "steady", "--format", "csv", "--out", tmp_path / "out",
        f"--steps={text}",
    )  # fmt: skip
    assert ended.code == 2
    assert "--steps" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_lists_of_numbers_read_as_people_write_them():
    assert parse_numbers("3-5, 8,4", option="--steps") == [3, 4, 5, 8]
    assert parse_numbers(None, option="--steps") is None
    with pytest.raises(typer.BadParameter, match="3-5,8"):
        parse_numbers("", option="--steps")


def test_the_default_limit_is_that_of_the_presenter():
    assert DEFAULT_MAX_MB == DEFAULT_LIMIT_MB
