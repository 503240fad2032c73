import json
import multiprocessing

import pytest

from fsdp_inspect.errors import PredictionError
from fsdp_inspect.simulation.predictions.ledger import (
    LEDGER_FILE,
    append_entries,
    find_ledger,
    read_ledger,
)
from fsdp_inspect.simulation.predictions.records import Ledger
from tests.prediction_records import outcome, prediction


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / LEDGER_FILE


def test_what_is_written_is_read_in_order(path):
    append_entries(path, [prediction(), outcome()])
    append_entries(path, [prediction(prediction_id="p2")])
    assert read_ledger(path) == Ledger(
        predictions=(prediction(), prediction(prediction_id="p2")), outcomes=(outcome(),)
    )


def test_a_ledger_that_is_not_there_is_empty(path):
    assert read_ledger(path) == Ledger()


def test_a_ledger_that_cannot_be_read_is_empty_and_says_why(path):
    path.mkdir(parents=True)
    ledger = read_ledger(path)
    assert ledger.predictions == ()
    assert ledger.notes == (f"Cannot read {path}: Is a directory.",)


def test_a_line_that_was_cut_off_is_left_out_and_said_and_the_next_one_stands(path):
    append_entries(path, [prediction(), outcome()])
    path.write_bytes(path.read_bytes()[:-20])
    append_entries(path, [prediction(prediction_id="p2")])
    ledger = read_ledger(path)
    assert [each.prediction_id for each in ledger.predictions] == ["p1", "p2"]
    assert ledger.outcomes == ()
    assert ledger.notes == ("1 line of predictions.jsonl is truncated or damaged and ignored.",)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"schema_version": 2}, "from a newer version of fsdp-inspect"),
        ({"kind": "wager"}, "of an unknown kind"),
        ({"entry": {"prediction_id": ""}}, "truncated or damaged"),
    ],
)
def test_lines_that_this_version_cannot_read_are_left_out_and_said(path, changes, note):
    append_entries(path, [outcome(), outcome(prediction_id="p2")])
    first, second = path.read_text().splitlines()
    path.write_text(f"{json.dumps({**json.loads(first), **changes})}\n{second}\n")
    ledger = read_ledger(path)
    assert [each.prediction_id for each in ledger.outcomes] == ["p2"]
    assert note in ledger.notes[0]


def test_a_line_of_a_newer_minor_version_is_read_without_what_is_unknown(path):
    append_entries(path, [outcome()])
    line = json.loads(path.read_text())
    line["entry"]["mood"] = "good"
    path.write_text(json.dumps(line) + "\n")
    assert read_ledger(path).outcomes == (outcome(),)


def _append(path, name):
    for number in range(25):
        append_entries(path, [outcome(prediction_id=f"{name}-{number}", sentence="x" * 9000)])


def test_two_writers_at_once_lose_and_mix_nothing(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    ledger = read_ledger(path)
    ids = {each.prediction_id for each in ledger.outcomes}
    assert ids == {f"{name}-{number}" for name in "ab" for number in range(25)}
    assert ledger.notes == ()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictionError, match="Cannot write the prediction history"):
        append_entries(tmp_path / "file" / LEDGER_FILE, [outcome()])


def test_the_ledger_lies_beside_the_run_or_one_folder_above(tmp_path):
    run = tmp_path / "tune" / "run"
    assert find_ledger(run) == tmp_path / "tune" / LEDGER_FILE
    (tmp_path / LEDGER_FILE).write_text("")
    assert find_ledger(run) == tmp_path / LEDGER_FILE
