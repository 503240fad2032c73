"""Garbage collections as events, and in the black box while they run."""

import _thread
import gc
import inspect
import os
import sys
import time
from pathlib import Path

import pytest

from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.host_stops import StopCounter
from fsdp_inspect.recording.instruments import GarbageCollections
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.black_box import EMPTY_HEADER, decode
from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.host_work import COLLECT_CALL, COLLECTION
from fsdp_inspect.trace.tables import EventTable

NUM_OBJECTS = 200_000


class Looking:
    """An object in a cycle that reads the black box when it is collected."""

    def __init__(self, box: BlackBoxWriter, seen: list) -> None:
        self.itself, self.box, self.seen = self, box, seen

    def __del__(self) -> None:
        self.seen.append(decode(self.box.contents()).header.collection)


@pytest.fixture
def rows() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def collections(rows):
    box = BlackBoxWriter(lambda: 5)
    box.write_header(EMPTY_HEADER)
    session = Session(HostClock(), rows.append, ProcessGroups(), black_box=box)
    patches, found = Patches(), GarbageCollections(session)
    found.attach(patches)
    yield found
    patches.undo()
    assert not any(getattr(each, "__self__", None) is found for each in gc.callbacks)


def test_a_collection_is_an_event_with_its_times(collections, rows):
    kept = [[] for _ in range(NUM_OBJECTS)]
    gc.collect()
    collections.end_step()
    del kept

    table = EventTable.from_rows([dict(zip(EventTable.DTYPES, row, strict=True)) for row in rows])
    full = table.where((table.flags & EventFlag.FULL_COLLECTION) != 0)
    assert set(table.kind.tolist()) == {EventKind.GARBAGE_COLLECTION}
    assert len(full) >= 1
    assert (full.end_ns > full.start_ns).all()


def test_the_black_box_names_the_line_while_the_collection_runs(collections):
    box, seen = collections._session.black_box, []
    Looking(box, seen)
    gc.collect()

    [collection] = seen
    assert collection is not None
    assert collection.place.startswith(str(Path(__file__)))
    assert decode(box.contents()).header.collection is None


def test_a_forked_child_changes_nothing(collections):
    """A worker of the data loader shares the memory of the black box."""
    box, seen = collections._session.black_box, []
    pid = os.fork()
    if pid == 0:
        Looking(box, seen)
        gc.collect()
        os._exit(0 if seen == [None] else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_collection_below_which_no_python_code_runs_is_counted(collections, rows, monkeypatch):
    """At the end of the interpreter, and in a thread of another library."""
    gc.collect()  # what earlier tests left
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    session = collections._session
    session.stops = stops = StopCounter(session)
    kept = [[] for _ in range(NUM_OBJECTS)]
    gc.disable()
    stops._now.clear()
    _thread.start_new_thread(inspect.unwrap(gc.collect), ())
    end = time.monotonic() + 20
    while not stops._now and not errors and time.monotonic() < end:
        time.sleep(0.01)
    gc.enable()
    del kept
    stops.end_step(counts=True)

    assert errors == []
    found = [stop for stop in stops.describe().stops if stop.what == COLLECTION]
    assert [stop.place for stop in found] == [""]


def test_a_collection_for_which_the_script_asks_has_its_line(collections):
    session = collections._session
    session.stops = stops = StopCounter(session)
    kept = [[] for _ in range(NUM_OBJECTS)]
    gc.collect()
    line = sys._getframe().f_lineno - 1
    stops.end_step(counts=True)
    del kept

    asked = [stop for stop in stops.describe().stops if stop.reason == COLLECT_CALL]
    assert [(stop.what, stop.place.rpartition(":")[2]) for stop in asked] == [
        (COLLECTION, str(line))
    ]
