"""Keep notes, stars and saved views in the user's data folder.

One SQLite file serves all dashboards of the user: `notes.sqlite` in the folder of the environment
variable FSDP_INSPECT_DATA (empty: no file), or else in `fsdp-inspect` below XDG_DATA_HOME or
`~/.local/share`. Nothing is written into a folder of runs, which may be read-only or belong to
other users. Notes and stars belong to the id of a run, so a copy of the run has them, too. Views
belong to a folder of runs.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import StoreError

DATA_VARIABLE = "FSDP_INSPECT_DATA"
"""The environment variable with the folder of the file; empty: no file."""
LONGEST_NOTE = 2_000
LONGEST_NAME = 80
"""The most letters of the name of a view."""
LONGEST_QUERY = 8_000
MOST_VIEWS = 200
"""The most views of one folder of runs."""
_LOCKED_FOR_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS notes (
    run TEXT PRIMARY KEY, is_starred INTEGER NOT NULL, text TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS views (
    folder TEXT, name TEXT, page TEXT NOT NULL, query TEXT NOT NULL, PRIMARY KEY (folder, name)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class RunNote:
    """What the user noted about a run."""

    is_starred: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class SavedView:
    """A page with its address, under a name."""

    name: str
    page: str
    """The name of the page's file."""
    query: str
    """The parameters of the address, encoded."""


@dataclass(frozen=True, slots=True)
class UserStore:
    """The notes, stars and views of the user. Several processes may use one file.

    Reading a file that does not exist gives nothing. Each method raises `StoreError` if the file
    cannot be read or written; the file is never replaced.
    """

    file: Path

    def notes(self) -> dict[str, RunNote]:
        """All notes and stars by the id that the recorder gave the run."""
        if not self._exists():
            return {}
        with self._open() as database:
            rows = database.execute("SELECT run, is_starred, text FROM notes").fetchall()
        return {str(run): RunNote(bool(star), str(text)) for run, star, text in rows}

    def keep_note(self, run_id: str, note: RunNote) -> None:
        """Replace the note and the star of a run."""
        text = _plain(note.text.strip()[:LONGEST_NOTE])
        with self._open() as database:
            if note.is_starred or text:
                row = (_plain(run_id), int(note.is_starred), text)
                database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", row)
            else:
                database.execute("DELETE FROM notes WHERE run = ?", (_plain(run_id),))

    def views(self, folder: Path) -> list[SavedView]:
        """The views of a folder of runs, by name."""
        if not self._exists():
            return []
        asked = "SELECT name, page, query FROM views WHERE folder = ? ORDER BY name"
        with self._open() as database:
            rows = database.execute(asked, (_plain(folder),)).fetchall()
        return [SavedView(str(name), str(page), str(query)) for name, page, query in rows]

    def keep_view(self, folder: Path, view: SavedView) -> None:
        """Save a view, instead of the view of the same name."""
        name = _plain(" ".join(view.name.split())[:LONGEST_NAME])
        if not name:
            raise StoreError("The view has no name. Expected a name. Enter one.")
        if len(view.query) > LONGEST_QUERY:
            raise StoreError(
                f"The address of this page has {len(view.query)} characters. Expected at most "
                f"{LONGEST_QUERY}. Choose fewer runs."
            )
        others = sum(one.name != name for one in self.views(folder))
        if others >= MOST_VIEWS:
            raise StoreError(
                f"There are {others} saved views. Expected at most {MOST_VIEWS}. Delete one."
            )
        with self._open() as database:
            row = (_plain(folder), name, _plain(view.page), _plain(view.query))
            database.execute("INSERT OR REPLACE INTO views VALUES (?, ?, ?, ?)", row)

    def remove_view(self, folder: Path, name: str) -> None:
        """Delete a view, if it exists."""
        with self._open() as database:
            row = (_plain(folder), _plain(name))
            database.execute("DELETE FROM views WHERE folder = ? AND name = ?", row)

    def _exists(self) -> bool:
        with self._reporting():
            return self.file.exists()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._reporting():
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=_LOCKED_FOR_S)) as database, database:
                database.executescript(_SCHEMA)
                yield database

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise StoreError(
                f"Notes and views cannot be read from or saved in {str(self.file)!r}: {error}. "
                "Expected an SQLite file that this user may write. Move the file away, or name "
                f"another folder in {DATA_VARIABLE}."
            ) from error


def _plain(text: object) -> str:
    """The text as SQLite can store it: bytes of a path that are no UTF-8 become escapes."""
    return str(text).encode(errors="backslashreplace").decode()


def user_store() -> UserStore | None:
    """The store of the user; None if it is disabled or there is no home folder."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen is not None:
        return UserStore(Path(chosen, "notes.sqlite")) if chosen else None
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        data = named if named.is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return UserStore(data / "fsdp-inspect" / "notes.sqlite")
