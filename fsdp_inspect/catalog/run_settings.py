"""Look up any setting of the runs of a catalog, to filter, group and split them."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

FACTS = (
    "model",
    "world_size",
    "plan",
    "tags",
    "git_commit",
    "status",
    "source",
    "device",
    "backend",
    "sharder",
    "torch",
    "name",
)
"""Columns of the table of runs that can be chosen like settings."""


def setting_names(runs: pa.Table) -> list[str]:
    """The names of all facts and settings of the runs, facts first."""
    names: set[str] = set()
    chunks: list[Any] = runs["settings"].chunks
    for chunk in chunks:
        names.update(pc.unique(chunk.keys).to_pylist())
    return [*FACTS, *sorted(names)]


def values_of_setting(runs: pa.Table, name: str) -> list[tuple[str, ...]]:
    """The values of a fact or a setting of each run, as text.

    Only `tags` has several values. A run without the setting has none.
    """
    if name == "tags":
        return [tuple(tags or ()) for tags in runs["tags"].to_pylist()]
    if name in FACTS:
        values = runs[name].to_pylist()
    else:
        values = pc.map_lookup(
            runs["settings"], query_key=pa.scalar(name), occurrence="first"
        ).to_pylist()
    return [() if value in (None, "") else (str(value),) for value in values]
