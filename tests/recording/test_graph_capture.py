"""While a CUDA graph is captured, every hook only calls the original function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.instruments import pause_during_capture
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable


class FakeGraph:
    """Replaces `torch.cuda.CUDAGraph`, which needs a GPU."""

    fails = False

    def capture_begin(self, pool: object = None) -> None:
        if self.fails:
            raise RuntimeError("out of memory in capture")

    def capture_end(self) -> None: ...


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    graph = type("FakeGraph", (FakeGraph,), dict(vars(FakeGraph)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return Session(HostClock(), lambda row: None, ProcessGroups())


def test_a_capture_is_an_event_from_its_begin_to_its_end(session: Session) -> None:
    rows: list[tuple[int, ...]] = []
    session.append = rows.append
    pause_during_capture(session, Patches())
    graph: Any = torch.cuda.CUDAGraph()
    before = session.clock.host_now()
    graph.capture_begin()
    graph.capture_end()
    after = session.clock.host_now()
    [row] = rows
    event = dict(zip(EventTable.DTYPES, row, strict=True))
    assert event["kind"] == EventKind.GRAPH_CAPTURE
    assert before <= event["start_ns"] <= event["end_ns"] <= after


def test_recording_pauses_from_begin_to_end_of_a_capture_and_says_so(session: Session) -> None:
    patches = Patches()
    pause_during_capture(session, patches)
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=None)
    assert not session.active
    graph.capture_end()
    assert session.active
    [problem] = session.problems
    assert problem.startswith("A CUDA graph was captured in step 0.")
    patches.undo()
    assert torch.cuda.CUDAGraph.capture_begin is FakeGraph.capture_begin


def test_a_capture_that_cannot_begin_ends_the_pause(session: Session) -> None:
    pause_during_capture(session, Patches())
    graph: Any = torch.cuda.CUDAGraph()
    graph.fails = True
    with pytest.raises(RuntimeError, match="out of memory in capture"):
        graph.capture_begin()
    assert session.active


def test_a_recording_that_has_ended_stays_ended_after_a_capture(session: Session) -> None:
    pause_during_capture(session, Patches())
    session.active = False
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    assert not session.active


def test_this_torch_captures_through_the_two_methods() -> None:
    # Pinned: torch 2.13. Users and CUDA graph trees enter `torch.cuda.graph`.
    from inspect import getsource

    assert "capture_begin(" in getsource(torch.cuda.graph.__enter__)
    assert "capture_end(" in getsource(torch.cuda.graph.__exit__)
