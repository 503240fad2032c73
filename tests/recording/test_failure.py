"""The history of allocations for a memory snapshot is limited and ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_inspect.recording import failure
from fsdp_inspect.recording.failure import MAX_HISTORY_ENTRIES, MemoryHistory


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    made: list[tuple[Any, dict[str, Any]]] = []

    def record(enabled: Any = "all", **options: Any) -> None:
        made.append((enabled, options))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
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
