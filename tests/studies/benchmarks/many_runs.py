"""Write a folder of many small runs, for the figures of the catalog.

A few runs are made with the store, of two ranks, 40 steps and four units. The others repeat their
tables as hard links, with a manifest of their own: id, time, commit, tag and configuration.

    python -m tests.studies.benchmarks.many_runs FOLDER --runs 10000
"""

import argparse
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.store.folder import read_manifest
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.writing import replace_file
from tests.studies.benchmarks.large_run import Shape, write_large_run

_SHAPE = Shape(num_ranks=2, num_steps=40, num_units=4)
_DISTINCT = 4
_FIRST_UNIX_NS = 1_767_225_600_000_000_000
_HOUR_NS = 3_600 * 10**9


def write_many_runs(folder: Path, num_runs: int) -> Path:
    """Write a folder of complete, compacted runs; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        sources = [
            write_large_run(Path(made) / str(number), _SHAPE, processes=1)
            for number in range(_DISTINCT)
        ]
        manifests = [read_manifest(source) for source in sources]
        for number in range(num_runs):
            at = number % _DISTINCT
            _repeat(sources[at], folder / f"run-{number:05d}", _manifest(manifests[at], number))
    return folder


def _repeat(source: Path, target: Path, manifest: RunManifest) -> None:
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True)
        elif path.name != "run.json":
            os.link(path, place)
    replace_file(target / "run.json", encode_record(manifest))


def _manifest(like: RunManifest, number: int) -> RunManifest:
    created = _FIRST_UNIX_NS + number * _HOUR_NS
    return like.model_copy(
        update={
            "run_id": f"run-{number:05d}",
            "name": f"nightly {number}",
            "created": datetime.fromtimestamp(created / 1e9, UTC).isoformat(),
            "created_unix_ns": created,
            "config": {"lr": [0.1, 0.01, 0.001][number % 3], "batch": 2 ** (number % 5)},
            "tags": ["main"] if number % 2 else ["pr"],
            "git_commit": f"{number // 5:040x}",
            "versions": {"torch": "2.13.0"},
        }
    )


def main() -> None:
    """Write the runs, and print the times of a first index and of one with nothing new."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=10_000)
    asked = parser.parse_args()
    if not asked.folder.exists():
        write_many_runs(asked.folder, asked.runs)
    for what in ("first", "nothing new", "nothing new"):
        begun = time.perf_counter()
        result = index_runs(asked.folder)
        print(f"{what}: {time.perf_counter() - begun:.2f} s, {result.num_read} read")


if __name__ == "__main__":
    main()
