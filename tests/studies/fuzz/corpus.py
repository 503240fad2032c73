"""Make the valid files from which inputs are mutated, once in a folder of the harness."""

import contextlib
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fsdp_inspect_app.user_store import RunNote, SavedView, UserStore

from fsdp_inspect.advice.prediction_creation import PredictionOrigin, make_prediction
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.comparison.gate.baseline import (
    Baseline,
    make_baseline,
    read_baseline,
    render_baseline,
)
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, read_runs
from fsdp_inspect.results import to_plain
from fsdp_inspect.run import Run
from fsdp_inspect.simulation.predictions.ledger import append_entries
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import EVENTS
from fsdp_inspect.store.streams import RowEncoder
from fsdp_inspect.trace.allocations import AllocationsRecord
from fsdp_inspect.trace.black_box import encode as encode_black_box
from fsdp_inspect.trace.live_memory import (
    LiveBytes,
    LiveMemoryRecord,
    LiveMoment,
    OutOfMemoryRecord,
)
from fsdp_inspect.trace.network_probe import NetworkProbe, ProbedMessage
from fsdp_inspect.trace.numerics import NumericsStep, Observation, Place, Update, encode_step
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource
from tests.boxes import Call, make_box
from tests.builders import steady_run, write_run
from tests.importing.flight_recorder_dumps import WAITING, entry
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.importing.snapshots import FakeAllocator, train
from tests.prediction_records import outcome

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny-2-ranks"
RANK = "attempt-000/rank-00000"
_STACKS = """\
{"clock_ns": 5, "training_thread": "0x01", "threads": {"0x01": "MainThread"}}
Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/train.py", line 12 in main
"""
BUDGET = b"""\
[limits]
peak_allocated_bytes = "38 GiB"
step_time_ns = "+5%"
"category.activation" = "+256 MiB"
"""


DAMAGED_RUNS = ("runs/first", "sample")
_ANALYSES = (
    *("summary", "breakdown", "exposed", "units", "memory", "ranks", "step_times", "scalars"),
    *("lifetime", "numerics"),
)


class Measured(NamedTuple):
    """What a user reads about a run."""

    numbers: str
    """The results of the analyses, as JSON."""
    notes: frozenset[str]
    """The notes about missing or damaged data."""


def measure_all(folder: Path) -> Measured:
    """Measure a run with the analyses whose numbers a damaged file can change.

    Raises:
        FsdpInspectError: A file is damaged, or data is missing.
    """
    run = Run(open_run(folder))
    found = {name: to_plain(getattr(run, name)()) for name in _ANALYSES}
    return Measured(json.dumps(found, default=str), frozenset(run.notes))


@dataclass(frozen=True)
class Corpus:
    """The valid files, in one folder."""

    folder: Path

    @property
    def sample(self) -> Path:
        """A recorded run of two ranks, compacted."""
        return self.folder / "sample"

    @property
    def live(self) -> Path:
        """A small run whose tables are streams."""
        return self.folder / "live"

    @property
    def compacted(self) -> Path:
        """The same run, compacted."""
        return self.folder / "compacted"

    def content(self, name: str) -> bytes:
        """The bytes of a valid file."""
        return (self.folder / "kept" / name).read_bytes()

    def file(self, name: str) -> Path:
        """The path of the file that an input replaces."""
        return self.folder / name

    @contextlib.contextmanager
    def replaced(self, name: str, content: bytes) -> Iterator[Path]:
        """Replace a file by an input; afterwards the file is valid again."""
        path = self.file(name)
        path.write_bytes(content)
        try:
            yield path
        finally:
            path.write_bytes(self.content(name))

    @cached_property
    def reading(self) -> GateMeasurements:
        """The measurements of the sample, for the gate."""
        return read_runs([open_run(self.sample)])

    @cached_property
    def baseline(self) -> Baseline:
        """The baseline of the sample."""
        return read_baseline(self.folder / "kept" / "baseline.json")

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog of two runs."""
        return open_catalog(self.folder / "kept" / "runs")

    @cached_property
    def clean(self) -> dict[str, Measured]:
        """The numbers and the notes of the runs whose files are exchanged or damaged, by folder."""
        return {name: measure_all(self.folder / name) for name in DAMAGED_RUNS}

    @cached_property
    def runs(self) -> list[Run]:
        """The sample, opened once."""
        return [Run(open_run(self.sample))]


def make_corpus(folder: Path) -> Corpus:
    """Write all valid files into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = Corpus(folder)
    shutil.copytree(SAMPLE, corpus.sample)
    _write_streams(corpus.live)
    _write_runs(folder)
    sample = open_run(corpus.sample)
    Plan.from_dict(sample.manifest.plan).dump(folder / "plan.toml")
    (folder / "budget.toml").write_bytes(BUDGET)
    reading = read_runs([sample])
    (folder / "baseline.json").write_text(render_baseline(make_baseline(reading)))
    prediction = make_prediction(
        sample, Run(sample).simulate(), PredictionOrigin(made_by="simulate")
    )
    (folder / "prediction.json").write_text(prediction.model_dump_json(indent=1))
    append_entries(folder / "predictions.jsonl", [prediction, outcome()])
    message = ProbedMessage(kind="all_gather", ranks=[0, 1], bytes=64, count=3, duration_ns=9)
    probe = NetworkProbe(world_size=2, backend="gloo", device_type="cpu", messages=[message])
    (corpus.sample / "network.json").write_bytes(encode_record(probe))
    (corpus.sample / RANK / "black_box.bin").write_bytes(
        encode_black_box(make_box([Call(0), Call(1), Call(2, has_finished=False)], (0, 1)))
    )
    (corpus.sample / RANK / "stacks.txt").write_text(_STACKS)
    place = Observation(0, Place.PARAMETER, 0, 9, 1, None, 4.0, ("bfloat16",))
    step = NumericsStep(3, (place,), (Update(0, 9, 8, 0.5),))
    (corpus.sample / RANK / "numerics.jsonl").write_bytes(encode_step(step) * 3)
    failed = _failed_allocation(sample.manifest.recorded_id)
    (corpus.sample / RANK / "out_of_memory.json").write_bytes(encode_record(failed))
    alive = _live_memory(sample)
    (corpus.sample / RANK / "live_memory.json").write_bytes(encode_record(alive))
    (corpus.sample / RANK / "allocations.json").write_bytes(
        encode_record(_allocations(sample.manifest.recorded_id))
    )
    trace = TraceWriter()
    fsdp2_step(trace)
    trace.write(folder / "trace.json")
    entries = [entry(0), entry(1), entry(2, **WAITING)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    (folder / "dump_rank_0.json").write_text(
        json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
    )
    allocator = FakeAllocator()
    train(allocator)
    allocator.dump(folder / "snapshot.pickle")
    shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"))
    folder.with_name(f"{folder.name}-kept").rename(folder / "kept")
    return corpus


def _write_runs(folder: Path) -> None:
    """Write compacted runs, a catalog of two of them, and the notes of a user."""
    for name, run in (
        ("compacted", steady_run()),
        ("runs/first", steady_run()),
        ("runs/other", steady_run(num_steps=6, created_unix_ns=5)),
    ):
        write_run(run, folder / name, is_identified=name.startswith("runs"))
        compact_run(folder / name)
    index_runs(folder / "runs")
    UserStore(folder / "notes.sqlite").keep_note("run", RunNote(is_starred=True, text="fast"))
    UserStore(folder / "notes.sqlite").keep_view(folder, SavedView("v", "ranks", "run=a"))


def _failed_allocation(run_id: str) -> OutOfMemoryRecord:
    """The report of a failed allocation, with a step before it."""
    live = [LiveBytes(unit=1, category="activation", place="net.py:8", bytes=1000, count=2)]
    return OutOfMemoryRecord(
        run_id=run_id,
        rank=0,
        requested_bytes=512,
        limit_bytes=1200,
        allocated_bytes=1000,
        step=5,
        phase="forward",
        unit=1,
        live_from="storage_tracker",
        live=live,
        reference=LiveMoment(step=4, phase="forward", unit=1, bytes=1000, live=live),
    )


def _allocations(run_id: str) -> AllocationsRecord:
    """Three allocations on two streams, two of them freed."""
    events = [512, 30 << 20, 0, 9 << 20, -1]
    return AllocationsRecord(run_id=run_id, rank=0, events=events, streams=[0, 1])


def _live_memory(sample: RunSource) -> LiveMemoryRecord:
    """The live memory of the sample's memory step, all from one line."""
    live = [LiveBytes(unit=1, category="activation", place="net.py:8", bytes=1000, count=2)]
    moments = [
        LiveMoment(step=one.step, phase=one.phase, unit=one.unit, bytes=1000, live=live)
        for one in measure_memory(sample).phases
    ]
    return LiveMemoryRecord(run_id=sample.manifest.recorded_id, rank=0, moments=moments)


def _write_streams(folder: Path) -> None:
    """Write a small run whose events of rank 0 are an open stream of several batches."""
    write_run(steady_run(), folder)
    rows = list(
        zip(*(c.tolist() for c in open_run(folder).events(0).columns().values()), strict=True)
    )
    for name in ("events.parquet", "summary.parquet"):
        (folder / RANK / name).unlink()
    (folder / "summary.parquet").unlink(missing_ok=True)
    encoder = RowEncoder(EVENTS)
    batches = [encoder.encode(encoder.pack(rows[at : at + 20])[0], at) for at in (0, 20, 40)]
    (folder / RANK / EVENTS.live_name).write_bytes(encoder.header + b"".join(batches))


@contextlib.contextmanager
def captured(words: list[str]) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Set the command line's arguments, and collect its output."""
    out, err = io.StringIO(), io.StringIO()
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    with (
        mock.patch.object(sys, "argv", ["fsdp-inspect", *words]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield out, err


def read_json(content: bytes) -> object:
    """Plain values of a valid file."""
    return json.loads(content)


def seeded(seed: int, target: str, number: int) -> random.Random:
    """The random numbers of one input, equal on every machine."""
    return random.Random(f"{seed}:{target}:{number}")
