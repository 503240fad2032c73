"""Record what torch's own allocator does, for tests that have no CUDA build of torch.

    python -m tests.emulation.allocator.real_allocator.record PROGRAM [--extra N]

`PROGRAM` is the result of `build.py`. Writes `answers.json` (a checksum of all answers for each
combination of settings, device and seed) and `snapshots/` (memory snapshots). `--extra N` compares
N more seeds with the model, and writes nothing.
"""

import argparse
import gzip
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_inspect.emulation.allocator.settings import MIB, AllocatorSettings, parse_settings
from fsdp_inspect.trace.allocations import AllocationHistory
from tests.emulation.allocator.random_events import Event, ModelDriver, random_events
from tests.emulation.allocator.real_allocator.process import RealAllocator

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.json"
SNAPSHOTS = HERE / "snapshots"
NUM_EVENTS = 400
GARBAGE = "garbage_collection_threshold:0.4,per_process_memory_fraction:0.7"
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:40,max_non_split_rounding_mb:25",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[4:8,64:2,>:4]",
    "large_segment_size_mb:40",
    "expandable_segments:True,large_segment_size_mb:32",
    GARBAGE,
    f"{GARBAGE},max_split_size_mb:40",
    "expandable_segments:True,per_process_memory_fraction:0.6",
    "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:8",
)
DEVICES = (1 << 44, 3 << 30, 800 * MIB)


def cases(seeds: range) -> Iterator[tuple[AllocatorSettings, int]]:
    """Each combination of settings, device and seed."""
    for number, text in enumerate(SETTINGS):
        for device_bytes in DEVICES:
            for seed in seeds:
                yield parse_settings(text, device_bytes=device_bytes), 100 * seed + number


def possible_events(settings: AllocatorSettings, seed: int) -> list[Event]:
    """Random events, without uses of blocks whose allocation fails."""
    model = ModelDriver(settings)
    events: list[Event] = []
    failed: set[int] = set()
    for event in random_events(seed, NUM_EVENTS):
        if event[1] in failed and event[0] in "rf":
            continue
        events.append(event)
        if model.answer(event) == "full":
            failed.add(event[1])
    return events


def checksum(answers: list[str]) -> int:
    """The CRC-32 of all answers."""
    return zlib.crc32("\n".join(answers).encode())


def history_events(history: AllocationHistory) -> list[Event]:
    """The events of an allocation history."""
    columns = (history.storage.tolist(), history.bytes.tolist(), history.stream.tolist())
    return [
        ("a", storage, num_bytes, stream) if num_bytes > 0 else ("f", storage, 0, 0)
        for storage, num_bytes, stream in zip(*columns, strict=True)
    ]


def _record_answers(program: Path) -> None:
    rows = []
    for settings, seed in cases(range(1)):
        with RealAllocator(program, settings) as real:
            answers = real.answers(possible_events(settings, seed))
        rows.append(
            {
                "settings": settings.text,
                "device_bytes": settings.device_bytes,
                "seed": seed,
                "events": len(answers),
                "crc32": checksum(answers),
            }
        )
    lines = ",\n".join(json.dumps(row) for row in rows)
    ANSWERS.write_text(f"[\n{lines}\n]\n")


def _record_snapshots(program: Path) -> None:
    SNAPSHOTS.mkdir(exist_ok=True)
    training = history_events(_training_history())
    for name, text, device_bytes, events in (
        ("training", "", 1 << 44, training),
        ("training-expandable", "expandable_segments:True", 1 << 44, training),
        ("random", "", 1 << 44, None),
        ("random-expandable", "expandable_segments:True", 1 << 44, None),
        ("random-full", "", 800 * MIB, None),
        ("random-expandable-full", "expandable_segments:True", 800 * MIB, None),
    ):
        settings = parse_settings(text, device_bytes=device_bytes)
        with RealAllocator(program, settings) as real:
            real.answers(possible_events(settings, 0) if events is None else events)
            snapshot = real.snapshot()
        packed = gzip.compress(json.dumps(snapshot).encode(), mtime=0)
        (SNAPSHOTS / f"{name}.json.gz").write_bytes(packed)


def _training_history() -> AllocationHistory:
    """Three steps of a Llama of 8 layers on 8 ranks, as forecast."""
    from fsdp_inspect import forecast_memory
    from fsdp_inspect.store.reader import open_run
    from instrumented_trainer.forecasting import build

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        settings: dict[str, Any] = {"preset": "llama-1b", "num_layers": 8, "batch_size": 1}
        forecast_memory(build, path, world_size=8, settings=settings)
        history = open_run(path).allocations(0)
    assert history is not None
    return history


def _compare_more(program: Path, seeds: int) -> int:
    """Compare more seeds; returns the number of different ones."""
    different = events = 0
    for settings, seed in cases(range(1, seeds + 1)):
        possible = possible_events(settings, seed)
        model = ModelDriver(settings)
        with RealAllocator(program, settings) as real:
            different += real.answers(possible) != [model.answer(event) for event in possible]
        events += len(possible)
    print(f"{events} events, {different} of {len(SETTINGS) * len(DEVICES) * seeds} cases differ")
    return different


def main() -> int:
    """Record, or compare more."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--extra", type=int, default=0)
    options = parser.parse_args()
    if options.extra:
        return int(_compare_more(options.program, options.extra) > 0)
    _record_answers(options.program)
    _record_snapshots(options.program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
