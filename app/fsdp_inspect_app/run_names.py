"""Name the runs of the folder for people: the name of a run, then its short unique id."""

from collections import Counter
from collections.abc import Iterable

from fsdp_inspect.formatting import format_run
from fsdp_inspect.result_types import RunEntry

MOST_LETTERS = 48
"""The most letters of a name. Longer names lose their middle."""


def name_runs(entries: Iterable[RunEntry]) -> dict[str, str]:
    """The shown names of runs by their ids in the listing; no two are the same.

    A run is shown as its name and the end of the id that the recorder gave it: `llama-1b · 3e9c`.
    A run without a name is shown as its id in the listing. Copies have one name, so their ids in
    the listing follow it.
    """
    named = {entry.id: _name(entry) for entry in entries}
    longer = {run: f"{name} · {shorten(run)}" for run, name in named.items()}
    count, longer_count = Counter(named.values()), Counter(longer.values())
    return {
        run: name
        if count[name] == 1
        else (longer[run] if longer_count[longer[run]] == 1 else f"{name} · {run}")
        for run, name in named.items()
    }


def _name(entry: RunEntry) -> str:
    if not entry.name:
        return shorten(entry.id)
    whole = format_run(entry.run_id, entry.name)
    if whole == entry.run_id:
        return shorten(entry.name)
    return whole.replace(entry.name, shorten(entry.name), 1)


def shorten(name: str, most: int = MOST_LETTERS) -> str:
    """A name on one line, without its middle if it is long."""
    line = "".join(letter if letter.isprintable() else " " for letter in name)
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 1]}…{line[-end:]}"
