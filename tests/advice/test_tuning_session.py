import json

import pytest

from fsdp_inspect.advice.tuning import (
    BASELINE,
    SESSION_FILE,
    TriedRun,
    TuningSession,
    read_session,
    write_session,
)
from fsdp_inspect.errors import StoreError

SESSION = TuningSession(
    command=["train.py", "{plan}"],
    budget=2,
    repeats=1,
    tried=[TriedRun(plan=BASELINE, round=0, folder="run", took_s=1.5)],
)


def test_a_session_comes_back_as_it_was(tmp_path):
    write_session(tmp_path / "tune", SESSION)
    assert read_session(tmp_path / "tune") == SESSION


def test_what_was_tried_is_found_by_plan_and_round():
    assert SESSION.find(BASELINE, 0) == SESSION.tried[0]
    assert SESSION.find(BASELINE, 1) is None
    assert SESSION.of_plan(1) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"session_version": 2}, "has version 2.*Update fsdp-inspect"),
        ({"budget": 0}, "budget is 0. Expected greater than 0"),
    ],
)
def test_a_session_that_cannot_be_used_is_refused(tmp_path, changes, complaint):
    write_session(tmp_path, SESSION)
    file = tmp_path / SESSION_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(StoreError, match=complaint):
        read_session(tmp_path)


def test_a_folder_that_cannot_be_written_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--runs-dir"):
        write_session(tmp_path / "file" / "tune", SESSION)
