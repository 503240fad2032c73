"""Keep the catalog of a folder of runs up to date: read the runs that are new or have changed."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fsdp_inspect.catalog.folders import CatalogFolder, RunsFolder
from fsdp_inspect.catalog.generations import (
    CatalogHead,
    code_version,
    publish,
    read_generation,
    read_head,
    remove_unused,
)
from fsdp_inspect.catalog.run_rows import read_rows
from fsdp_inspect.catalog.tables import RUNS, TABLES, to_table
from fsdp_inspect.errors import CatalogError
from fsdp_inspect.results import Result
from fsdp_inspect.trace.run import RunStatus

CATALOG_FOLDER = ".fsdp-inspect"
"""The folder of the catalog in a folder of runs; listings of runs ignore it."""
IN_RUNS = ".."
"""`CatalogHead.runs` of a catalog in that folder."""
_PUBLISH_EVERY_S = 30.0
_MOST_FRESH = 2_000
_TRIES = 5
_PUBLISH_COST = 10.0
"""A long index publishes what it has; publishing takes at most a tenth of the time."""

_Tables = dict[str, pa.Table]

Progress = Callable[[int, int], object]
"""Called with the number of runs read so far, and the number to read."""


@dataclass(frozen=True, slots=True)
class IndexResult(Result):
    """The result of indexing a folder of runs."""

    path: str
    """The folder of the catalog."""
    num_runs: int
    num_read: int
    """Runs that were new or had changed, and were read."""
    num_removed: int
    """Runs of the earlier catalog that no longer exist."""
    problems: dict[str, str]
    """The reasons why runs cannot be read, or have missing numbers, by run."""
    is_changed: bool
    """Whether a new generation was written."""


def index_runs(
    runs: str | Path,
    out: str | Path | None = None,
    *,
    rebuild: bool = False,
    on_progress: Progress | None = None,
) -> IndexResult:
    """Create or refresh the catalog of a folder of runs.

    Only runs whose files changed are read. The catalog is replaced atomically: at any moment,
    readers see a whole earlier or later state. Several processes may index one folder.

    Args:
        runs: The folder of runs.
        out: The folder of the catalog; default `.fsdp-inspect` in the folder of runs.
        rebuild: Read every run again.
        on_progress: Called with the number of runs read so far, and the number to read.

    Raises:
        CatalogError: The folder of runs does not exist, or the catalog cannot be written.
    """
    path = Path(runs)
    if not path.is_dir():
        raise CatalogError(
            f"Folder {str(runs)!r} not found. Expected a folder of runs. Name the folder that "
            "contains the run folders."
        )
    place = path / CATALOG_FOLDER if out is None else Path(out)
    where = IN_RUNS if out is None else str(path.absolute())
    indexing = _Indexing(RunsFolder(path), CatalogFolder(place), where, rebuild=rebuild)
    return indexing.run(on_progress or (lambda done, total: None))


@dataclass
class _Indexing:
    """One refresh of a catalog."""

    runs: RunsFolder
    folder: CatalogFolder
    where: str
    rebuild: bool
    fresh: dict[str, _Tables] = field(default_factory=dict)
    """Rows that this process computed and has not published yet, by run."""
    published: list[str] = field(default_factory=list)
    """The generations that this process wrote, oldest first."""
    next_look: float = 0.0
    """The time of the next publication of a part."""

    def run(self, on_progress: Progress) -> IndexResult:
        begun_ns = time.time_ns()
        base = self._base()
        tables = None if base is None else self._load(base)
        known = {} if tables is None else _known(tables[RUNS.name])
        states = self._states(known)
        unread = [run for run, state in states.items() if known.get(run, ("", ""))[0] != state]
        self.next_look = time.monotonic() + _PUBLISH_EVERY_S
        for done, run in enumerate(unread):
            on_progress(done, len(unread))
            rows = read_rows(run, partial(self.runs.open, run), states[run])
            self.fresh[run] = {
                table.name: to_table(table, rows.get(table.name, [])) for table in TABLES
            }
            self._publish_in_between(set(states), begun_ns)
        on_progress(len(unread), len(unread))
        gone = known.keys() - states.keys()
        is_changed = bool(unread or gone or tables is None or not (base and base.is_complete))
        if is_changed:
            self._publish(set(states), begun_ns, is_complete=True)
        return IndexResult(
            path=self.folder.label,
            num_runs=len(states),
            num_read=len(unread),
            num_removed=len(gone),
            problems=self._problems(),
            is_changed=is_changed,
        )

    def _base(self) -> CatalogHead | None:
        """The current head; None if there is none or its numbers are of other code."""
        try:
            head = read_head(self.folder)
        except CatalogError:
            return None  # it is replaced
        is_same = head is not None and head.written_by == code_version() and head.runs == self.where
        return head if is_same and not self.rebuild else None

    def _load(self, head: CatalogHead) -> _Tables | None:
        """All tables of a generation; None if one is gone or damaged."""
        found: _Tables = {}
        for table in TABLES:
            with suppress(CatalogError):
                rows = read_generation(self.folder, head, table)
                if rows is not None:
                    found[table.name] = rows
        return found if len(found) == len(TABLES) else None

    def _states(self, known: dict[str, tuple[str, str]]) -> dict[str, str]:
        """The fingerprint of every run in the folder."""
        running = {run for run, (_, status) in known.items() if status == RunStatus.RUNNING}
        return {
            run: self.runs.fingerprint(run, is_running=run in running).text
            for run in self.runs.find()
        }

    def _publish_in_between(self, listed: set[str], begun_ns: int) -> None:
        """Publish the rows of a long index from time to time, so that a kill loses few of them."""
        started = time.monotonic()
        if started > self.next_look or len(self.fresh) >= _MOST_FRESH:
            self._publish(listed, begun_ns, is_complete=False)
            cost = time.monotonic() - started
            self.next_look = time.monotonic() + max(_PUBLISH_EVERY_S, _PUBLISH_COST * cost)

    def _publish(self, listed: set[str], begun_ns: int, *, is_complete: bool) -> None:
        """Write a generation: the rows of this process, and for other runs the current ones.

        Another process may have published meanwhile. Its rows are as good as earlier ones: the next
        index reads the runs whose files have changed since.
        """
        kept = self._kept(listed)
        parts = {table.name: [kept[table.name]] for table in TABLES}
        for found in self.fresh.values():
            for name, rows in found.items():
                parts[name].append(rows)
        tables = {
            table.name: pa.concat_tables(parts[table.name]).sort_by(
                [(column, "ascending") for column in table.order]
            )
            for table in TABLES
        }
        num_runs = len(tables[RUNS.name])
        new = publish(
            self.folder,
            tables,
            runs=self.where,
            indexed_unix_ns=begun_ns,
            num_runs=num_runs,
            is_complete=is_complete and num_runs == len(listed),
        )
        self.published.append(new.generation)
        remove_unused(self.folder, self.published)
        self.fresh.clear()
        self.rebuild = False

    def _kept(self, listed: set[str]) -> _Tables:
        """The rows of the current generation of listed runs that this process did not compute."""
        found = None
        for _ in range(_TRIES):  # a generation may be removed while it is read
            head = self._base()
            found = None if head is None else self._load(head)
            if head is None or found is not None:
                break
        if found is None:
            return {table.name: table.schema.empty_table() for table in TABLES}
        kept = pa.array(sorted(listed - self.fresh.keys()), pa.string())
        return {
            name: rows.filter(pc.is_in(rows["run"], value_set=kept)) for name, rows in found.items()
        }

    def _problems(self) -> dict[str, str]:
        """The problems of all runs of the current generation."""
        head = self._base()
        table = (
            None if head is None else read_generation(self.folder, head, RUNS, ("run", "problem"))
        )
        rows = [] if table is None else table.to_pylist()
        return {row["run"]: row["problem"] for row in rows if row["problem"]}


def _known(runs: pa.Table) -> dict[str, tuple[str, str]]:
    """Fingerprint and status by run."""
    columns = (runs[name].to_pylist() for name in ("run", "fingerprint", "status"))
    return {run: (state, status or "") for run, state, status in zip(*columns, strict=True)}
