"""A failure of the training: its traceback, and the history of allocations for a snapshot."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording import failure
from fsdp_inspect.recording.attachment import Attachment
from fsdp_inspect.recording.failure import (
    MAX_HISTORY_ENTRIES,
    MemoryHistory,
    find_communication_error,
    hide_own_frames,
)
from fsdp_inspect.recording.patches import wrap_call
from fsdp_inspect.recording.sharders.find import find_sharder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    made: list[tuple[Any, dict[str, Any]]] = []

    def record(enabled: Any = "all", **options: Any) -> None:
        made.append((enabled, options))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(
        failure, "is_history_enabled", lambda: False
    )  # a CUDA build asks the driver
    return made


def test_the_history_is_limited_in_entries_and_stacks_and_ends(
    calls: list[tuple[Any, dict[str, Any]]],
) -> None:
    history = MemoryHistory()
    history.start()
    [(enabled, options)] = calls
    assert enabled == "all"
    assert options == {"context": "alloc", "stacks": "python", "max_entries": MAX_HISTORY_ENTRIES}
    history.stop()
    history.stop()
    assert [enabled for enabled, _ in calls] == ["all", None]


def test_a_history_of_the_script_s_own_is_left_alone(
    calls: list[tuple[Any, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "is_history_enabled", lambda: True)
    history = MemoryHistory()
    history.start()
    history.stop()
    assert not calls


class _Guard:
    active = True

    def fail(self, error: BaseException) -> None:
        raise AssertionError


def _raise() -> None:
    raise ValueError("of the script")


def test_the_recorder_is_not_in_the_traceback_of_the_script() -> None:
    wrapped = wrap_call(_raise, lambda: None, None, _Guard())

    def again() -> None:
        try:
            wrapped()
        except ValueError as error:
            raise RuntimeError("again") from error

    with pytest.raises(RuntimeError) as caught:
        again()
    hide_own_frames(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    names = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    assert names == ["again", "_raise"]


def test_an_error_of_the_recorder_keeps_its_frames() -> None:
    with pytest.raises(RecordingError) as caught:
        find_sharder(torch.nn.Linear(1, 1))
    hide_own_frames(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "find_sharder"


def test_an_allocator_without_a_history_costs_the_snapshot_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory.")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    problems: list[str] = []
    attachment: Any = SimpleNamespace(
        _options=SimpleNamespace(memory_snapshot=True),
        _device=torch.device("cuda"),
        session=SimpleNamespace(problem=problems.append),
    )
    Attachment._start_history(attachment).stop()
    [problem] = problems
    assert problem.startswith("There will be no memory snapshot")
    assert "backend:cudaMallocAsync" in problem


def _fail(action: Any) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError


def _raise_own() -> None:
    raise RuntimeError("the feature store timed out")


def _raise_native() -> None:
    torch.zeros(2) @ torch.zeros(3)


def _wrap_native() -> None:
    try:
        _raise_native()
    except RuntimeError as error:
        raise ValueError("the step failed") from error


@pytest.mark.parametrize(
    ("action", "is_of_torch"),
    [
        (_raise_own, False),
        (_raise_native, True),
        (_wrap_native, True),
        (lambda: int("x"), False),
        (
            lambda: next(iter(DataLoader([1], num_workers=0, collate_fn=lambda _: _raise_own()))),
            False,
        ),
    ],
)
def test_an_error_of_native_code_is_told_from_one_that_python_code_raises(
    action: Any, is_of_torch: bool
) -> None:
    assert bool(find_communication_error(_fail(action))) is is_of_torch
