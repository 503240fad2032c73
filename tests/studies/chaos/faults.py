"""Record events in a small training process while its disk fails at a random moment.

    python -m tests.studies.chaos.faults RUN FAULT SEED

It prints the number of appended and of dropped events.
"""

import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_inspect.store import streams, writer as writer_module
from fsdp_inspect.store.writer import RankWriter
from tests.store.run_files import event_row, make_record

NUM_BURSTS = 60
EVENTS_PER_BURST = 50


class HungOs:
    """The module `os` with writes that do not return until `may_return` is set."""

    def __init__(self) -> None:
        self.may_return = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, *arguments: Any) -> int:
        self.may_return.wait()
        return os.pwrite(*arguments)


def fill_disk(choose: random.Random, _run: Path) -> Callable[[], None]:
    """Limit the size of files at a random byte, as a full disk does."""
    size = choose.randrange(3_000, 60_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def take_descriptors(_choose: random.Random, _run: Path) -> Callable[[], None]:
    """Open files until none can be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return lambda: [os.close(each) for each in taken] and None


def hang(_choose: random.Random, _run: Path) -> Callable[[], None]:
    """Let each write wait."""
    hung = HungOs()
    streams.os = hung  # type: ignore[attr-defined]
    return hung.may_return.set


def jump_clock(choose: random.Random, _run: Path) -> Callable[[], None]:
    """Move the wall clock by up to ten days."""
    jump_ns, clock = int(choose.uniform(-10, 10) * 86_400e9), time.time_ns
    patch = mock.patch("time.time_ns", side_effect=lambda: clock() + jump_ns)
    patch.start()
    return patch.stop


def delete_folder(_choose: random.Random, run: Path) -> Callable[[], None]:
    """Delete the rank's folder; it exists again later."""
    folder = run / "attempt-000" / "rank-00000"
    shutil.rmtree(folder, ignore_errors=True)
    return lambda: folder.mkdir(parents=True, exist_ok=True)


FAULTS: dict[str, Callable[[random.Random, Path], Callable[[], None]]] = {
    "disk full": fill_disk,
    "no descriptors": take_descriptors,
    "hung disk": hang,
    "clock jump": jump_clock,
    "deleted folder": delete_folder,
}


def main() -> None:
    """Record with one fault, which ends at a random moment or never."""
    run, fault, choose = Path(sys.argv[1]), sys.argv[2], random.Random(int(sys.argv[3]))
    writer_module.STALL_TIMEOUT_S = 0.5
    writer = RankWriter(run, make_record(world_size=1), flush_interval_s=0.03)
    begins, ends = choose.randrange(NUM_BURSTS), choose.randrange(2 * NUM_BURSTS)
    repair: Callable[[], None] | None = None
    for burst in range(NUM_BURSTS):
        if burst == begins:
            repair = FAULTS[fault](choose, run)
        if repair is not None and burst == ends:
            repair()
        numbers = range(burst * EVENTS_PER_BURST, (burst + 1) * EVENTS_PER_BURST)
        writer.events.extend(event_row(number) for number in numbers)
        time.sleep(0.01)
    writer.close(compact=choose.random() < 0.5)
    print(NUM_BURSTS * EVENTS_PER_BURST, writer.record.dropped.get("events", 0))


if __name__ == "__main__":
    main()
