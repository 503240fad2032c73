"""Define the targets of the harness: the maker and the reader of each input.

A reader passes if it returns or raises an `FsdpInspectError`. A command passes if it exits without
an internal error. Everything else is a failure.
"""

import base64
import json
import os
import random
import shutil
import tempfile
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fsdp_inspect_app.user_store import RunNote, SavedView, UserStore

from fsdp_inspect.advice.tuning import TuningSession, read_session
from fsdp_inspect.analysis.memory.reserved import predict_reserved
from fsdp_inspect.catalog.catalog import open_catalog
from fsdp_inspect.catalog.index import CATALOG_FOLDER
from fsdp_inspect.cli import main
from fsdp_inspect.comparison.gate.baseline import make_baseline, read_baseline
from fsdp_inspect.comparison.gate.check import check_run
from fsdp_inspect.comparison.gate.limits import read_budget
from fsdp_inspect.comparison.gate.measurements import read_runs
from fsdp_inspect.comparison.verification.verification import verify_prediction
from fsdp_inspect.diagnosis.fitting_plans import search_plans
from fsdp_inspect.diagnosis.out_of_memory import read_out_of_memory
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.importing.flight_recorder import import_dumps
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.report.check import render_junit, render_markdown
from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.report.json import render_json
from fsdp_inspect.report.out_of_memory import (
    describe_fitting_plans,
    describe_memory_at_failure,
    out_of_memory_to_dict,
)
from fsdp_inspect.report.outcomes import render_query, render_query_csv
from fsdp_inspect.results import to_plain
from fsdp_inspect.run import Run
from fsdp_inspect.simulation.predictions.ledger import (
    measure_track_record,
    read_ledger,
    read_prediction,
)
from fsdp_inspect.simulation.scenario import resolve_plan
from fsdp_inspect.store import compacted
from fsdp_inspect.store.checksums import checksum_text
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS, FOOTER_CHECKSUM_KEY, FOOTER_KEY, MEMORY, SUMMARY
from fsdp_inspect.store.streams import RowEncoder
from fsdp_inspect.trace.plan import Plan
from tests.studies.fuzz.corpus import DAMAGED_RUNS, RANK, Corpus, captured, measure_all
from tests.studies.fuzz.mutation import (
    NUMBERS,
    json_input,
    mutate_bytes,
    toml_input,
    word,
)

ANALYSES = (
    *("summary", "breakdown", "exposed", "units", "memory", "ranks", "step_times", "scalars"),
    *("simulate", "advise", "report"),
)
READS = ("summary", "breakdown", "exposed", "units", "memory", "ranks", "runs")
FLAGS = (
    *("--json", "--rank", "--step", "--unit", "--plan", "--wrap", "--bandwidth", "--latency"),
    *("--baseline", "--budget", "--memory-limit", "--time-limit", "--format", "--out", "--ranks"),
    *("--steps", "--world-size", "--replicas", "--microbatches", "--forward-prefetch", "--once"),
    *("--node-bandwidth", "--node-latency", "--param-dtype", "--checkpointing", "--max-memory"),
    *("--update", "--markdown", "--junit", "--take", "--details", "--max-size", "--by-step"),
    *("--accumulation-sync", "--reshard-after-forward", "--repeat", "--port", "--max-mb", "--"),
)
COMMANDS = (
    *("runs", "summary", "breakdown", "exposed", "units", "memory", "ranks", "compare", "simulate"),
    *("advise", "verify", "check", "import", "compact", "merge", "export", "report"),
)


class CommandFailure(Exception):
    """A command printed a traceback or an internal error, or has a wrong exit code."""


@dataclass(frozen=True)
class Target:
    """One reader, importer, command or page loader."""

    name: str
    share: int
    """The number of inputs, relative to other targets."""
    make: Callable[[Corpus, random.Random], bytes]
    read: Callable[[Corpus, bytes], object]


def run_target(target: Target, corpus: Corpus, content: bytes) -> None:
    """Read one input.

    Raises:
        Exception: Any error that a user would see as a traceback.
    """
    try:
        target.read(corpus, content)
    except FsdpInspectError as error:
        if not str(error):
            raise CommandFailure("an error without a message") from error


# --- runs


def _analyse(folder: Path, content: bytes) -> None:
    """Open a run like all commands, and measure it for one input in 24."""
    run = open_run(folder)
    _ = run.ranks, run.notes, run.status
    run.summary()
    choice = zlib.crc32(content)
    if choice % 24 == 0:
        analysis = ANALYSES[choice // 24 % len(ANALYSES)]
        result = getattr(Run(run), analysis)()
        if analysis != "report":
            json.dumps(to_plain(result), default=str)
    elif choice % 24 < 4:
        run.events(0), run.memory(0), run.devices(0), run.scalars(0)


def _read_manifest(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("compacted/run.json", content) as path:
        entries = list_runs(path.parent)
        assert [entry.manifest or entry.problem for entry in entries]
        _analyse(path.parent, content)


def _read_rank(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced(f"compacted/{RANK}/rank.json", content) as path:
        _analyse(path.parents[2], content)


def _read_probe(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("sample/network.json", content) as path:
        run = open_run(path.parent)
        _ = run.network_probe
        if zlib.crc32(content) % 24 == 0:
            Run(run).simulate()


def _diagnose_with(name: str) -> Callable[[Corpus, bytes], None]:
    def diagnose(corpus: Corpus, content: bytes) -> None:
        with corpus.replaced(f"sample/{RANK}/{name}", content):
            diagnosis_to_dict(Run(open_run(corpus.file("sample"))).diagnose())

    return diagnose


def _read_failure(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced(f"sample/{RANK}/out_of_memory.json", content):
        run = open_run(corpus.file("sample"))
        found = read_out_of_memory(run, [0])
        if found is None:
            return
        searches = zlib.crc32(content) % 20 == 0  # a search takes a second
        searched = search_plans(run, found, name_file=str) if searches else None
        render_json(out_of_memory_to_dict(found, searched))
        list(describe_memory_at_failure(found))
        if searched is not None:
            list(describe_fitting_plans(found, searched))


def _read_live_memory(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced(f"sample/{RANK}/live_memory.json", content):
        make_baseline(read_runs([open_run(corpus.file("sample"))]))


def _read_allocations(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced(f"sample/{RANK}/allocations.json", content):
        predict_reserved(open_run(corpus.file("sample")), rank=0)


def _reader_of(run: str, name: str) -> Callable[[Corpus, bytes], None]:
    def read(corpus: Corpus, content: bytes) -> None:
        with corpus.replaced(f"{run}/{RANK}/{name}", content):
            _analyse(corpus.file(run), content)

    return read


def _read_run_summary(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("compacted/summary.parquet", content) as path:
        _analyse(path.parent, content)


def _read_statistics(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("compacted/statistics.parquet", content) as path:
        _analyse(path.parent, content)


def _bytes_of(name: str) -> Callable[[Corpus, random.Random], bytes]:
    return lambda corpus, rng: mutate_bytes(rng, corpus.content(name))


def _json_of(name: str) -> Callable[[Corpus, random.Random], bytes]:
    return lambda corpus, rng: json_input(rng, corpus.content(name))


def _nasty_table(rng: random.Random, file: Any, table: Any) -> Any:
    """A table with unusual values at some places and correct checksums."""
    columns = {name: values.copy() for name, values in table.columns().items()}
    for _ in range(rng.choice((1, 1, 2, 8))):
        name = rng.choice(list(columns))
        values = columns[name]
        if not len(values):
            continue
        chosen = slice(None) if rng.random() < 0.2 else rng.randrange(len(values))
        if values.dtype.kind == "f":
            values[chosen] = rng.choice((np.nan, np.inf, -np.inf, 1e308, -1.0, 0.0))
        else:
            limits = np.iinfo(values.dtype)
            number = rng.choice((*NUMBERS, 7, 100, -2))
            values[chosen] = min(max(number, int(limits.min)), int(limits.max))
    return file.table.from_columns(columns)


def _parquet_with(corpus: Corpus, rng: random.Random, name: str, file: Any) -> bytes:
    place = corpus.file("scratch.parquet")
    with (corpus.file("kept") / name).open("rb") as source:
        contents = compacted.read_compacted(source, file, name)
    table = _nasty_table(rng, file, contents.table)
    fields = contents.details.model_dump(include={"reduction", "ranks"}, exclude_none=True)
    details = {key: value for key, value in fields.items() if file is SUMMARY and value}
    with np.errstate(all="ignore"):
        compacted.write_compacted(
            place, file, table, covered_rows=contents.covered_rows, details=details
        )
    return place.read_bytes()


def _values_of(name: str, file: Any) -> Callable[[Corpus, random.Random], bytes]:
    return lambda corpus, rng: _parquet_with(corpus, rng, name, file)


def _false_footer(corpus: Corpus, rng: random.Random) -> bytes:
    """A Parquet file with a wrong footer and a correct checksum."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(corpus.file(f"kept/compacted/{RANK}/events.parquet"))
    footer = json.loads(table.schema.metadata[FOOTER_KEY])
    text = json_input(rng, json.dumps(footer).encode()).decode("latin-1")
    marks = {FOOTER_KEY: text.encode(), FOOTER_CHECKSUM_KEY: checksum_text(text).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(marks), sink, store_schema=False)
    return bytes(sink.getvalue().to_pybytes())


def _stream_values(corpus: Corpus, rng: random.Random) -> bytes:
    """An event stream with unusual values and correct checksums."""
    table = _nasty_table(rng, EVENTS, open_run(corpus.file("kept/live")).events(0))
    encoder = RowEncoder(EVENTS)
    columns = table.columns()
    rows = list(zip(*(values.tolist() for values in columns.values()), strict=True))
    packed, _ = encoder.pack(rows)
    return encoder.header + encoder.encode(packed, rng.choice((0, 0, 0, 5, 2**40)))


# --- files of other ranks and runs, and single bits


def _files_of_runs(corpus: Corpus) -> list[str]:
    """The files of the runs that are damaged or exchanged, and of another run."""
    kept = corpus.file("kept")
    folders = (kept / name for name in (*DAMAGED_RUNS, "runs/other"))
    found = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return sorted(str(file.relative_to(kept)) for file in found)


def _make_exchange(corpus: Corpus, rng: random.Random) -> bytes:
    """A file in the place of another rank's or run's file."""
    files = [name for name in _files_of_runs(corpus) if name.endswith((".parquet", ".json"))]
    to = rng.choice([name for name in files if not name.startswith("runs/other")])
    alike = [name for name in files if Path(name).name == Path(to).name and name != to]
    return json.dumps([to, rng.choice(alike if alike and rng.random() < 0.8 else files)]).encode()


def _read_exchange(corpus: Corpus, content: bytes) -> None:
    to, other = json.loads(content)
    _require_note(corpus, to, corpus.content(other))


def _make_bit(corpus: Corpus, rng: random.Random) -> bytes:
    name = rng.choice([name for name in _files_of_runs(corpus) if "other" not in name])
    return json.dumps([name, rng.randrange(len(corpus.content(name)) * 8)]).encode()


def _read_bit(corpus: Corpus, content: bytes) -> None:
    name, bit = json.loads(content)
    changed = bytearray(corpus.content(name))
    changed[bit // 8] ^= 1 << bit % 8
    _require_note(corpus, name, bytes(changed))


def _require_note(corpus: Corpus, name: str, content: bytes) -> None:
    """Measure a run with another content of a file: a changed number needs a note or an error.

    Raises:
        CommandFailure: A number changed, and nothing states why.
    """
    run = next(each for each in DAMAGED_RUNS if name.startswith(each))
    clean = corpus.clean[run]
    with corpus.replaced(name, content):
        found = measure_all(corpus.file(run))
    if found.numbers != clean.numbers and found.notes <= clean.notes:
        raise CommandFailure(f"fsdp-inspect: {name} changes numbers without a note")


# --- catalogs, queries and notes


def _make_catalog(corpus: Corpus, rng: random.Random) -> bytes:
    kept = corpus.file("kept")
    files = sorted((kept / "runs" / CATALOG_FOLDER).rglob("*"))
    chosen = rng.choice([file for file in files if file.is_file()])
    content = chosen.read_bytes()
    is_json = chosen.suffix == ".json" and rng.random() < 0.5
    changed = json_input(rng, content) if is_json else mutate_bytes(rng, content)
    return str(chosen.relative_to(kept)).encode() + b"\n" + changed


def _read_catalog(corpus: Corpus, content: bytes) -> None:
    name, _, changed = content.partition(b"\n")
    with corpus.replaced(name.decode(), changed):
        catalog = open_catalog(corpus.file("runs"))
        for rows in (catalog.runs, catalog.units, catalog.ranks, catalog.steps):
            render_json(rows())


_SQL = (
    *(
        "SELECT",
        "FROM",
        "runs",
        "units",
        "steps",
        "ranks",
        "JOIN",
        "USING (run)",
        "WHERE",
        "*",
        ",",
    ),
    *("run", "sum(exposed_ns)", "GROUP BY", "ORDER BY", "1", "/ 0", "'=1+1'", "NULL", "AS x", "("),
    *(")", "TIMESTAMP 'infinity'", "INTERVAL '1' DAY", "range(100000000)", "[1, 2]", "{'a': 1}"),
    *("CAST('x' AS BLOB)", "'\\xff'::BLOB", "9223372036854775807", "1e400", "UNION", "WITH a AS ("),
    *(
        "getenv('HOME')",
        "read_csv('/etc/passwd')",
        "ATTACH",
        "COPY",
        "PRAGMA",
        "SET",
        ";",
        "--",
        "'",
    ),
    *("uuid()", "DATE '9999-12-31'", "1::DECIMAL(38, 9)", "repeat('a', 1000000000)", "\0", "é"),
)


def _make_query(corpus: Corpus, rng: random.Random) -> bytes:
    starts = ("SELECT * FROM runs", "SELECT run, unit FROM units", "SELECT ", "")
    return " ".join([rng.choice(starts), *rng.choices(_SQL, k=rng.randrange(8))]).encode()


def _run_query(corpus: Corpus, content: bytes) -> None:
    found = corpus.catalog.query(content.decode(), timeout_s=2.0)
    render_json(found), render_query_csv(found), render_query(found)


def _read_notes(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("notes.sqlite", content) as path:
        store = UserStore(path)
        name = content[:40].decode("latin-1")
        store.notes(), store.views(Path(os.fsdecode(content[-9:])))
        store.keep_note(name, RunNote(text=os.fsdecode(content[-99:])))
        store.keep_view(path.parent, SavedView(name, "ranks", name))
        store.remove_view(path.parent, name)


# --- files of settings


def _make_plan(corpus: Corpus, rng: random.Random) -> bytes:
    content = corpus.content("plan.toml")
    return toml_input(rng, content, tomllib.loads(content.decode()))


def _read_plan(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("plan.toml", content) as path:
        plan = Plan.load(path)
    plan.to_toml()
    run = corpus.runs[0]
    resolved = resolve_plan(plan, run.manifest)
    if zlib.crc32(content) % 16 == 0:
        run.simulate(resolved)


def _make_budget(corpus: Corpus, rng: random.Random) -> bytes:
    content = corpus.content("budget.toml")
    return toml_input(rng, content, tomllib.loads(content.decode()))


def _read_budget(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("budget.toml", content) as path:
        budget = read_budget(path)
    check_run(corpus.reading, corpus.baseline, budget)


def _read_baseline(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("baseline.json", content) as path:
        baseline = read_baseline(path)
    result = check_run(corpus.reading, baseline)
    render_json(result), render_markdown([result]), render_junit([result])


def _read_prediction(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("prediction.json", content) as path:
        prediction = read_prediction(path)
    if zlib.crc32(content) % 16 == 0:
        json.dumps(to_plain(verify_prediction(prediction, [corpus.runs[0].source])), default=str)


def _make_ledger(corpus: Corpus, rng: random.Random) -> bytes:
    lines = corpus.content("predictions.jsonl").splitlines()
    return b"\n".join(json_input(rng, line) for line in lines)


def _read_ledger(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("predictions.jsonl", content) as path:
        measure_track_record(read_ledger(path))


def _make_session(corpus: Corpus, rng: random.Random) -> bytes:
    session = TuningSession(command=["train"], environment={}, budget=3, repeats=1)
    return json_input(rng, session.model_dump_json().encode())


def _read_session(corpus: Corpus, content: bytes) -> None:
    folder = corpus.file("session")
    folder.mkdir(exist_ok=True)
    (folder / "session.json").write_bytes(content)
    read_session(folder)


# --- importers


def _import_trace(corpus: Corpus, content: bytes) -> None:
    out = corpus.file("imported")
    shutil.rmtree(out, ignore_errors=True)
    with corpus.replaced("trace.json", content) as path:
        import_traces(path, out)
    _analyse(out, content)


def _import_snapshot(corpus: Corpus, content: bytes) -> None:
    out = corpus.file("imported")
    shutil.rmtree(out, ignore_errors=True)
    with corpus.replaced("snapshot.pickle", content) as path:
        import_snapshot(path, out)
    _analyse(out, content)


def _import_dump(corpus: Corpus, content: bytes) -> None:
    out = corpus.file("imported")
    shutil.rmtree(out, ignore_errors=True)
    with corpus.replaced("dump_rank_0.json", content) as path:
        import_dumps(path, out)
    _analyse(out, content)
    Run(open_run(out)).diagnose()


# --- commands


def _make_words(corpus: Corpus, rng: random.Random) -> bytes:
    words = [rng.choice(COMMANDS)]
    files = ("plan.toml", "budget.toml", "baseline.json", "prediction.json", "predictions.jsonl")
    for _ in range(rng.randrange(6)):
        kind = rng.randrange(5)
        if kind == 0:
            words.append(rng.choice(FLAGS))
        elif kind == 1:
            words += [rng.choice(FLAGS), word(rng)]
        elif kind == 2:
            words.append(f"FOLDER/{rng.choice(('live', 'compacted', 'nothing'))}")
        elif kind == 3:
            words.append(f"FOLDER/{rng.choice(files)}")
        else:
            words.append(word(rng))
    return json.dumps(words).encode()


def _run_command(corpus: Corpus, content: bytes) -> None:
    words = [
        word.replace("FOLDER", str(corpus.folder)).replace("/etc", "").replace("/dev/zero", "")
        for word in json.loads(content)
    ]
    command(words)
    _restore(corpus)


def _restore(corpus: Corpus) -> None:
    """Undo the changes of a command."""
    for name in ("plan.toml", "budget.toml", "baseline.json", "prediction.json"):
        if corpus.file(name).read_bytes() != corpus.content(name):
            corpus.file(name).write_bytes(corpus.content(name))
    live = f"live/{RANK}/events.arrows"
    if not corpus.file(live).exists():  # `compact` removes the streams
        shutil.rmtree(corpus.live)
        shutil.copytree(corpus.file("kept/live"), corpus.live)


def command(words: list[str]) -> None:
    """Run a command in this process.

    Raises:
        CommandFailure: The command shows a traceback or an internal error.
    """
    with captured(words) as (out, err):
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    printed = out.getvalue() + err.getvalue()
    if "Traceback" in err.getvalue() or "internal error" in err.getvalue():
        raise CommandFailure(f"{words!r:.200}: {err.getvalue()[-600:]}")
    if code not in (None, 0, 1, 2):
        raise CommandFailure(f"{words!r:.200} exits with {code}: {printed[-300:]}")


def _command_on_manifest(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("compacted/run.json", content) as path:
        command([READS[zlib.crc32(content) % len(READS)], str(path.parent)])


def _command_on_events(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced(f"compacted/{RANK}/events.parquet", content):
        command([READS[zlib.crc32(content) % len(READS)], str(corpus.compacted)])


def _command_on_baseline(corpus: Corpus, content: bytes) -> None:
    with corpus.replaced("baseline.json", content) as path:
        command(["check", str(corpus.sample), "--baseline", str(path)])


# --- loaders of the dashboard


def _make_page_input(corpus: Corpus, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return json_input(rng, corpus.content("compacted/run.json"))
    packed = zlib.compress(_make_plan(corpus, rng), 9)
    return base64.urlsafe_b64encode(mutate_bytes(rng, packed) if rng.random() < 0.5 else packed)


def _load_page(corpus: Corpus, content: bytes) -> None:
    from fsdp_inspect_app.app_pages.what_if.simulation import prepare
    from fsdp_inspect_app.catalog_reading import RunIndex
    from fsdp_inspect_app.knobs import unpack_plan

    if not content.startswith(b"{"):
        resolve_plan(unpack_plan(content.decode("latin-1")), corpus.runs[0].manifest)
        return
    with corpus.replaced("compacted/run.json", content) as path:
        entries = list_runs(path.parent)
        with tempfile.TemporaryDirectory() as out:
            found = RunIndex(path.parent, Path(out)).find(entries, patience_s=5)
        if not found.is_complete:
            raise CommandFailure("the thread of the run list ended without a result")
        prepare(open_run(path.parent))


TARGETS = (
    Target("run.json", 10, _json_of("compacted/run.json"), _read_manifest),
    Target("rank.json", 10, _json_of(f"compacted/{RANK}/rank.json"), _read_rank),
    Target("network.json", 6, _json_of("sample/network.json"), _read_probe),
    Target(
        "black_box.bin",
        4,
        _bytes_of(f"sample/{RANK}/black_box.bin"),
        _diagnose_with("black_box.bin"),
    ),
    Target(
        "numerics.jsonl",
        2,
        _bytes_of(f"sample/{RANK}/numerics.jsonl"),
        _diagnose_with("numerics.jsonl"),
    ),
    Target("out_of_memory.json", 6, _json_of(f"sample/{RANK}/out_of_memory.json"), _read_failure),
    Target("live_memory.json", 3, _json_of(f"sample/{RANK}/live_memory.json"), _read_live_memory),
    Target("allocations.json", 3, _json_of(f"sample/{RANK}/allocations.json"), _read_allocations),
    Target("stacks.txt", 2, _bytes_of(f"sample/{RANK}/stacks.txt"), _diagnose_with("stacks.txt")),
    Target(
        "events.parquet",
        6,
        _bytes_of(f"compacted/{RANK}/events.parquet"),
        _reader_of("compacted", "events.parquet"),
    ),
    Target(
        "summary.parquet",
        6,
        _bytes_of(f"compacted/{RANK}/summary.parquet"),
        _reader_of("compacted", "summary.parquet"),
    ),
    Target("run summary", 4, _bytes_of("compacted/summary.parquet"), _read_run_summary),
    Target("statistics", 4, _bytes_of("compacted/statistics.parquet"), _read_statistics),
    Target("false footer", 4, _false_footer, _reader_of("compacted", "events.parquet")),
    Target(
        "event values",
        4,
        _values_of(f"compacted/{RANK}/events.parquet", EVENTS),
        _reader_of("compacted", "events.parquet"),
    ),
    Target(
        "memory values",
        2,
        _values_of(f"sample/{RANK}/memory.parquet", MEMORY),
        _reader_of("sample", "memory.parquet"),
    ),
    Target(
        "summary values", 4, _values_of("compacted/summary.parquet", SUMMARY), _read_run_summary
    ),
    Target(
        "events.arrows",
        6,
        _bytes_of(f"live/{RANK}/events.arrows"),
        _reader_of("live", "events.arrows"),
    ),
    Target("stream values", 4, _stream_values, _reader_of("live", "events.arrows")),
    Target("files of others", 4, _make_exchange, _read_exchange),
    Target("single bits", 4, _make_bit, _read_bit),
    Target("catalog", 4, _make_catalog, _read_catalog),
    Target("query", 2, _make_query, _run_query),
    Target("notes", 4, _bytes_of("notes.sqlite"), _read_notes),
    Target("plan", 20, _make_plan, _read_plan),
    Target("budget", 20, _make_budget, _read_budget),
    Target("baseline", 20, _json_of("baseline.json"), _read_baseline),
    Target("prediction", 20, _json_of("prediction.json"), _read_prediction),
    Target("ledger", 20, _make_ledger, _read_ledger),
    Target("session", 20, _make_session, _read_session),
    Target("trace", 3, _json_of("trace.json"), _import_trace),
    Target("snapshot", 3, _bytes_of("snapshot.pickle"), _import_snapshot),
    Target("flight recorder", 4, _json_of("dump_rank_0.json"), _import_dump),
    Target("command words", 4, _make_words, _run_command),
    Target("command on run.json", 2, _json_of("compacted/run.json"), _command_on_manifest),
    Target(
        "command on events",
        2,
        _values_of(f"compacted/{RANK}/events.parquet", EVENTS),
        _command_on_events,
    ),
    Target("command on baseline", 2, _json_of("baseline.json"), _command_on_baseline),
    Target("page loaders", 4, _make_page_input, _load_page),
)


def find_target(name: str) -> Target:
    """The target with a name."""
    return next(target for target in TARGETS if target.name == name)
