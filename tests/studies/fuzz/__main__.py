"""Feed mutated inputs to every reader, importer, command and page loader: `make fuzz`.

    make fuzz SECONDS=600          go on for ten minutes where the last call ended
    make fuzz REPLAY=FILE          read the input of one failure again, with its traceback

The inputs follow from the seed, the target and their number, so each can be made again. The state
file in `build/fuzz` has the number of inputs by target; a later call goes on from there. A worker
process reads the inputs. If one kills it or exceeds a time limit, the parent notes a failure
and starts another worker. Each kind of failure is saved with its input as a file.
"""

import argparse
import base64
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.studies.fuzz.worker import (
    HANG_S,
    STALL_S,
    catch_hangs,
    describe_failure,
    read_one,
    work,
)

MAX_MEMORY = "1GiB"
"""`--max-memory` of the harness."""
SLICE_S = 2.0
"""The time of a target in each round, for the smallest share."""
FOLDER = Path("build/fuzz")


def main() -> int:
    """Run or replay; returns the exit code."""
    options = _parse()
    os.environ["FSDP_INSPECT_MAX_MEMORY"] = MAX_MEMORY
    if options.replay:
        return _replay(options.replay)
    return _run(options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: the state file's, or 1")
    parser.add_argument("--only", default=None, help="one target")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--replay", type=Path, default=None)
    return parser.parse_args()


# --- the state


def _load_state(options: argparse.Namespace) -> dict[str, Any]:
    path = options.folder / "state.json"
    state = {"seed": options.seed or 1, "counts": {}, "failures": {}, "slowest_s": 0.0, "rss": 0}
    if path.exists():
        saved = json.loads(path.read_text())
        if options.seed in (None, saved["seed"]):
            return dict(saved)
    return state


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    unfinished = folder / "state.json.tmp"
    unfinished.write_text(json.dumps(state, indent=1))
    unfinished.replace(folder / "state.json")


# --- the parent


def _run(options: argparse.Namespace) -> int:
    from tests.studies.fuzz.targets import TARGETS

    options.folder.mkdir(parents=True, exist_ok=True)
    state = _load_state(options)
    targets = [target for target in TARGETS if options.only in (None, target.name)]
    end = time.monotonic() + options.seconds
    # Each round gives each target a slice by its share, so a short call also visits all targets.
    total = sum(target.share for target in targets)
    slice_s = max(0.2, min(SLICE_S * 60, options.seconds) / max(total, 1))
    worker = _Worker(options.folder, state["seed"])
    new: Counter[str] = Counter()
    try:
        while time.monotonic() < end:
            for target in targets:
                start = state["counts"].get(target.name, 0)
                left = min(slice_s * target.share, end - time.monotonic())
                if left <= 0:
                    break
                done, failures, slowest, rss = worker.read(target.name, start, left)
                state["counts"][target.name] = start + done
                state["slowest_s"] = max(state["slowest_s"], slowest)
                state["rss"] = max(state["rss"], rss)
                for failure in failures:
                    new[failure["kind"]] += 1
                    _save_failure(options.folder, state, failure)
                _save_state(options.folder, state)
    finally:
        worker.stop()
    _report(state, new)
    return 1 if new else 0


def _save_failure(folder: Path, state: dict[str, Any], failure: dict[str, Any]) -> None:
    state["failures"][failure["kind"]] = state["failures"].get(failure["kind"], 0) + 1
    name = "".join(c if c.isalnum() else "-" for c in failure["kind"])[:100]
    path = folder / "failures" / f"{name}.json"
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(failure, indent=1))
    print(f"failure: {failure['kind']}\n  make fuzz REPLAY={path}", flush=True)


def _report(state: dict[str, Any], new: Counter[str]) -> None:
    counts = state["counts"]
    print(f"seed {state['seed']}, {sum(counts.values()):,} inputs so far:")
    for name, count in counts.items():
        print(f"  {count:>9,}  {name}")
    print(f"slowest input {state['slowest_s']:.2f} s, resident memory {state['rss'] >> 20:,} MiB")
    print(f"failures of this call: {sum(new.values()):,} of {len(new)} kinds")


class _Worker:
    """A process that reads inputs, and is replaced when an input kills it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._process: Any = None

    def read(
        self, target: str, start: int, seconds: float
    ) -> tuple[int, list[dict[str, Any]], float, int]:
        """Read inputs for some time: number, failures, slowest input and resident memory."""
        if self._process is None or not self._process.is_alive():
            self._start()
        self._pipe.send((target, start, seconds))
        number = start
        while self._pipe.poll(seconds + 2 * STALL_S + 30):
            try:
                kind, value = self._pipe.recv()
            except (EOFError, ConnectionError):
                break
            if kind == "done":
                return tuple(value)  # type: ignore[return-value]
            number = value
        self.stop()
        return number - start + 1, [self._killed(target, number)], HANG_S, 0

    def _killed(self, target: str, number: int) -> dict[str, Any]:
        from tests.studies.fuzz.corpus import Corpus, seeded
        from tests.studies.fuzz.targets import find_target

        corpus = Corpus(self._folder / "work")
        content = find_target(target).make(corpus, seeded(self._seed, target, number))
        return describe_failure(
            target, self._seed, number, content, f"{target}: hang or killed", ""
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, self._folder, self._seed))
        self._process.start()
        theirs.close()
        self._pipe.recv()  # the corpus is ready

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _replay(path: Path) -> int:
    from tests.studies.fuzz.corpus import make_corpus
    from tests.studies.fuzz.targets import find_target

    failure = json.loads(path.read_text())
    corpus = make_corpus(FOLDER / "replay")
    content = base64.b64decode(failure["content"])
    with catch_hangs():
        problem = read_one(find_target(failure["target"]), corpus, content)
    print("passes now" if problem is None else f"{problem[0]}\n{problem[1]}")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
