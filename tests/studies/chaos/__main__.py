"""Kill recordings and let their disks fail at random moments: `make chaos`.

    make chaos SECONDS=600 ARGS="--seed 7"

Each case follows from the seed and its number, except for the moment in which the operating system
ends a process. After a kill, all rows before the last flush interval must be readable, in order and
once. After a fault, readable and dropped rows must add up to the appended rows.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.merging import merge_runs
from fsdp_inspect.store.reader import open_run
from tests.store.appending_process import (
    appending_rank,
    assert_only_the_last_interval_is_missing,
    wait_for_first_event,
)
from tests.store.run_files import assert_same_rows, make_manifest, write_run
from tests.studies.chaos.faults import FAULTS

INTERVAL_S = 0.1
NUM_STEPS = 3_000
_CODE = {
    "compaction": "from fsdp_inspect.store.compaction import compact_run as do",
    "merge": "from fsdp_inspect.store.merging import merge_runs as do",
}


def kill_ranks(folder: Path, choose: random.Random, num_ranks: int) -> None:
    """Kill all ranks of a run at one random moment."""
    run = folder / "run"
    create_run(run, make_manifest(world_size=num_ranks))
    with ExitStack() as stack:
        ranks = range(num_ranks)
        children = [
            stack.enter_context(appending_rank(run, rank, num_ranks, INTERVAL_S)) for rank in ranks
        ]
        for rank in ranks:
            wait_for_first_event(run, rank)
        time.sleep(choose.uniform(0, 4 * INTERVAL_S))
        for child in children:
            child.kill()
        for child in children:
            child.wait()
        killed_ns = time.monotonic_ns()
    found = open_run(run)
    for rank in ranks:
        assert_only_the_last_interval_is_missing(
            found, rank, killed_ns=killed_ns, interval_s=INTERVAL_S
        )
    compact_run(run)


def kill_compaction(folder: Path, choose: random.Random) -> None:
    """Kill a compaction, read the run, and compact it again."""
    run = write_run(folder / "run", num_steps=NUM_STEPS, compact=False)
    before = open_run(run).events(0)
    _kill_after_start("compaction", f"do(Path({str(run)!r}))", choose)
    assert_same_rows(open_run(run).events(0), before)
    assert not compact_run(run).skipped
    assert_same_rows(open_run(run).events(0), before)


def kill_merge(folder: Path, choose: random.Random) -> None:
    """Kill a merge, check that its parts are unchanged, and merge again."""
    parts = [
        write_run(folder / f"part-{rank}", ranks=[rank], num_steps=NUM_STEPS) for rank in (0, 1)
    ]
    before = [open_run(part).events(rank) for rank, part in enumerate(parts)]
    paths = ", ".join(f"Path({str(part)!r})" for part in parts)
    out = folder / "merged"
    _kill_after_start("merge", f"do([{paths}], Path({str(out)!r}))", choose)
    if not out.exists():
        merge_runs(parts, out)
    for rank, part in enumerate(parts):
        assert_same_rows(open_run(part).events(rank), before[rank])
    try:
        merged = open_run(out)
    except StoreError:  # killed before run.json: a message, and the parts are whole
        return
    for rank in {record.rank for record in merged.ranks}:
        assert_same_rows(merged.events(rank), before[rank])


def _kill_after_start(what: str, call: str, choose: random.Random) -> None:
    code = f"from pathlib import Path\n{_CODE[what]}\nprint('ready', flush=True)\n{call}\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(choose.uniform(0, 0.2))
        child.kill()


def break_disk(folder: Path, choose: random.Random, fault: str) -> None:
    """Record with a fault; readable and dropped rows are all rows."""
    run = folder / "run"
    create_run(run, make_manifest(world_size=1))
    command = [sys.executable, "-m", "tests.studies.chaos.faults", str(run), fault]
    done = subprocess.run(
        [*command, str(choose.randrange(2**32))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    appended, dropped = map(int, done.stdout.split())
    try:
        found = open_run(run).events(0)
    except (StoreError, KeyError):  # the rank's folder is gone
        assert fault == "deleted folder"
        assert dropped == appended
        return
    assert len(found) + dropped == appended, (len(found), dropped)
    keys = found.start_ns * 10 + found.kind
    assert len(np.unique(keys)) == len(found)
    assert dropped == 0 or f"Rank 0 dropped {dropped} rows of events" in done.stderr


CASES: dict[str, Callable[[Path, random.Random], None]] = {
    "kill one rank": lambda folder, choose: kill_ranks(folder, choose, 1),
    "kill all ranks": lambda folder, choose: kill_ranks(folder, choose, 2),
    "kill during compaction": kill_compaction,
    "kill during merge": kill_merge,
    **{
        fault: lambda folder, choose, fault=fault: break_disk(folder, choose, fault)  # type: ignore[misc]
        for fault in FAULTS
    },
}


def main() -> int:
    """Run cases alternately until the time is over; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CASES, default=None)
    options = parser.parse_args()
    done: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    names = [name for name in CASES if options.only in (None, name)]
    end, number = time.monotonic() + options.seconds, 0
    while time.monotonic() < end:
        name = names[number % len(names)]
        done[name] += 1
        if not _passes(name, f"{options.seed}/{number}"):
            failed[name] += 1
        number += 1
    print("| case | runs | failures |\n|---|---|---|")
    for name in names:
        print(f"| {name} | {done[name]} | {failed[name]} |")
    return 1 if failed else 0


def _passes(name: str, seed: str) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        CASES[name](folder, random.Random(seed))
    except Exception:  # one failed case does not end the others
        print(f"{name}, seed {seed}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
