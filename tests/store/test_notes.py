import pytest

from fsdp_inspect.store.notes import note_step_counts
from fsdp_inspect.trace.run import RunStatus
from tests.store.run_files import make_record


def counts(*num_steps: int, status: RunStatus = RunStatus.COMPLETE) -> list[str]:
    records = [
        make_record(rank, num_steps=count, status=status) for rank, count in enumerate(num_steps)
    ]
    return note_step_counts(records)


@pytest.mark.parametrize("num_steps", [(), (3,), (5, 5, 5, 5)])
def test_equal_steps_need_no_note(num_steps):
    assert counts(*num_steps) == []


def test_ranks_with_other_numbers_of_steps_are_named():
    assert counts(10, 10, 7, 7, 10, 12) == [
        "The ranks completed different numbers of steps. 3 of 6 ranks: 10; ranks 2-3: 7; "
        "rank 5: 12."
    ]


def test_ranks_that_stopped_are_noted_elsewhere():
    assert counts(10, 7, status=RunStatus.CUT_OFF) == []
