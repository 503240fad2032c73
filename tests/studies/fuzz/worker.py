"""Read inputs in a separate process, and describe each failure."""

import base64
import faulthandler
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HANG_S = 5.0
"""Limit of an input's processor time, which does not grow on a busy machine."""
STALL_S = 60.0
"""Limit of an input's time on the clock."""
MAX_RSS_BYTES = 2 << 30
"""Limit of a worker's resident memory, with a `--max-memory` of half of it."""


def work(pipe: Connection, folder: Path, seed: int) -> None:
    """Serve requests of the parent until it ends the process."""
    from tests.studies.fuzz.corpus import make_corpus

    warnings.simplefilter("ignore")
    corpus = make_corpus(folder / "work")
    pipe.send(("ready", 0))
    with catch_hangs():
        while True:
            target, start, seconds = pipe.recv()
            pipe.send(("done", _read_many(pipe, corpus, seed, target, start, seconds)))


class _HangError(BaseException):
    """An input took longer than `HANG_S` or `STALL_S`."""


@contextmanager
def catch_hangs() -> Iterator[None]:
    """Inside the block, end an input that takes longer than `HANG_S` or `STALL_S`."""
    before = {number: signal.signal(number, _hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hang(*_: object) -> None:
    raise _HangError


def _limit(hang_s: float, stall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, hang_s)
    signal.setitimer(signal.ITIMER_REAL, stall_s)


def _read_many(
    pipe: Connection, corpus: Any, seed: int, name: str, start: int, seconds: float
) -> tuple[int, list[dict[str, Any]], float, int]:
    from tests.studies.fuzz.corpus import seeded
    from tests.studies.fuzz.targets import find_target

    target = find_target(name)
    end = time.monotonic() + seconds
    number, slowest = start, 0.0
    failures: dict[str, dict[str, Any]] = {}
    while time.monotonic() < end:
        content = target.make(corpus, seeded(seed, name, number))
        pipe.send(("at", number))
        began = time.process_time()
        faulthandler.dump_traceback_later(2 * STALL_S, exit=True)  # for C code that ignores signals
        problem = read_one(target, corpus, content)
        faulthandler.cancel_dump_traceback_later()
        slowest = max(slowest, time.process_time() - began)
        if problem is not None:
            kind, text = problem
            failures.setdefault(kind, describe_failure(name, seed, number, content, kind, text))
        number += 1
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rss > MAX_RSS_BYTES:
        kind = f"{name}: {rss >> 20} MiB resident"
        failures[kind] = describe_failure(name, seed, number, b"", kind, "")
    return number - start, list(failures.values()), slowest, rss


def read_one(target: Any, corpus: Any, content: bytes) -> tuple[str, str] | None:
    """Read one input; returns None, or the kind of the failure and its traceback."""
    from tests.studies.fuzz.targets import CommandFailure, run_target

    _limit(HANG_S, STALL_S)
    try:
        run_target(target, corpus, content)
    except _HangError:
        return f"{target.name}: hang of {HANG_S:g} s in {_place()}", traceback.format_exc()
    except CommandFailure as error:
        return f"{target.name}: {_without_words(str(error))}", traceback.format_exc()
    except Exception as error:
        return f"{target.name}: {type(error).__name__} in {_place()}", traceback.format_exc()
    finally:
        _limit(0, 0)
    return None


def _without_words(text: str) -> str:
    return text.rpartition("fsdp-inspect: ")[2][:90]


def _place() -> str:
    """The innermost place in the project's own code."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "fsdp_inspect" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].name}"


def describe_failure(
    target: str, seed: int, number: int, content: bytes, kind: str, text: str
) -> dict[str, Any]:
    """The record of a failure, which is sufficient for a replay."""
    return {
        "target": target,
        "kind": kind,
        "seed": seed,
        "number": number,
        "content": base64.b64encode(content).decode(),
        "traceback": text,
    }
