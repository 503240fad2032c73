"""Keep the key numbers of runs in the user's cache folder, for later dashboards.

One small SQLite file serves all folders of runs: `findings.sqlite` in the folder of the environment
variable FSDP_INSPECT_CACHE (empty: no file), or else in `fsdp-inspect` below XDG_CACHE_HOME or
`~/.cache`. Nothing is written into a folder of runs, which may belong to other users. The file is
optional: a damaged file is removed, and a file that cannot be read or written is ignored. It holds
texts, which their reader checks.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.store.object_cache import user_cache_folder

MOST_KEPT = 50_000
"""The highest number of findings of all folders, about 50 MB. The oldest ones are removed first."""
_LOCKED_FOR_S = 2.0
"""The time to wait for another dashboard that writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS findings (
    version TEXT, folder TEXT, run TEXT, state TEXT, text TEXT, kept_unix_s REAL,
    PRIMARY KEY (version, folder, run)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class CachedFinding:
    """The finding about a run in one state of its files."""

    state: str
    text: str


@dataclass(frozen=True, slots=True)
class FindingsCache:
    """The findings of the runs in one folder. Several processes may use one file."""

    file: Path
    version: str
    """The version of the findings; findings of other versions are ignored."""
    folder: Path

    def load(self) -> dict[str, CachedFinding]:
        """The stored findings by the run's id; empty if nothing can be read."""
        found: dict[str, CachedFinding] = {}
        asked = "SELECT run, state, text FROM findings WHERE version = ? AND folder = ?"
        with self._quietly(), closing(self._open()) as database:
            rows = database.execute(asked, (self.version, str(self.folder)))
            found = {str(run): CachedFinding(str(state), str(text)) for run, state, text in rows}
        return found

    def keep(self, found: Mapping[str, CachedFinding]) -> None:
        """Store findings by the run's id and replace earlier ones; ignores errors of the file."""
        now = time.time()
        rows = [
            (self.version, str(self.folder), run, finding.state, finding.text, now)
            for run, finding in found.items()
        ]
        with self._quietly(), closing(self._open()) as database, database:
            database.executemany("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?, ?)", rows)
            [(count,)] = database.execute("SELECT count(*) FROM findings").fetchall()
            if count > MOST_KEPT:
                database.execute(
                    "DELETE FROM findings WHERE kept_unix_s <= (SELECT kept_unix_s FROM findings "
                    "ORDER BY kept_unix_s LIMIT 1 OFFSET ?)",
                    (count - MOST_KEPT - 1,),
                )

    def _open(self) -> sqlite3.Connection:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(self.file, timeout=_LOCKED_FOR_S)
        database.execute(_SCHEMA)
        return database

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Ignore all errors of the file; an error ends the block."""
        try:
            yield
        except sqlite3.OperationalError:  # locked, full or read-only: may work later
            pass
        except sqlite3.DatabaseError:
            with contextlib.suppress(OSError):
                self.file.unlink()
        except OSError:
            pass


def findings_file() -> Path | None:
    """The path of the cache; None if the user disabled it or there is no home folder."""
    folder = user_cache_folder()
    return None if folder is None else folder / "findings.sqlite"
