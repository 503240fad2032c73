"""Declare the tables of a catalog: runs, units, ranks and steps.

Each table has one column specification, which gives the Parquet files, the SQL tables, DataFrames
and pages their columns. Every table begins with `run`, the id of the run: its path below the folder
of runs. Numbers are those of `fsdp-inspect show` and `fsdp-inspect show RUN units`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fsdp_inspect.analysis.units import UnitCosts
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    metric_column,
    number_column,
    text_column,
    value_column,
)
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.trace.codes import PARTS_OF_STEP

PARTS = tuple(f"{part.label}_ns" for part in PARTS_OF_STEP)
"""The columns of the parts of the typical step, which add up to `step_time_ns`."""
_LISTS: dict[str, pa.DataType] = {
    "tags": pa.list_(pa.string()),
    "settings": pa.map_(pa.string(), pa.string()),
    "step_times_ns": pa.list_(pa.int64()),
}
"""The types of columns with several values."""
_TYPES: dict[MetricUnit | None, pa.DataType] = {
    None: pa.string(),
    MetricUnit.NS: pa.int64(),
    MetricUnit.BYTES: pa.int64(),
    MetricUnit.COUNT: pa.int64(),
}


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """One table of a catalog."""

    name: str
    spec: TableSpec
    order: tuple[str, ...]
    """The columns that order the rows; together they identify a row."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, with label, unit and definition as metadata."""
        described = self.spec.describe()
        return pa.schema(
            [
                pa.field(column.name, _type_of(column)).with_metadata(
                    {key: value for key, value in described[column.name].items() if value}
                )
                for column in self.spec.columns
            ],
            metadata={"title": self.spec.title},
        )


def _type_of(column: Column) -> pa.DataType:
    if column.name in _LISTS:
        return _LISTS[column.name]
    if column.unit is MetricUnit.COUNT and column.name.endswith("_per_step"):
        return pa.float64()  # a mean over steps
    return _TYPES.get(column.unit, pa.float64())


def _field(name: str) -> Callable[[Any], Any]:
    return lambda row: row.get(name)


def _from_row(*columns: Column) -> tuple[Column, ...]:
    """The columns for rows that are dictionaries."""
    return tuple(replace(column, value=_field(column.name)) for column in columns)


_RUN = text_column("run", "The run: its path below the folder of runs.")
_STEP_TIME = metric_column("step_time_ns")
_EXPOSED = metric_column("exposed_ns")
_COMMUNICATION = metric_column("communication_ns")


RUNS = CatalogTable(
    "runs",
    TableSpec(
        "Runs of the catalog",
        _from_row(
            _RUN,
            text_column("problem", "The reason why the run cannot be read; empty: none."),
            text_column("run_id", "The id that the recorder gave the run."),
            text_column("name", "The name that the user gave the run."),
            text_column("created", "The start of the run, ISO 8601, UTC."),
            number_column("created_unix_ns", "The start of the run, ns since 1970."),
            text_column("status", "How the run ended, or `running`."),
            text_column("training", "The first mistake of the training; empty: none is known."),
            text_column("source", "`recorded`, `emulated`, `imported` or `predicted`."),
            number_column("world_size", "The number of ranks of the job.", label="ranks"),
            number_column("num_ranks", "The number of ranks that wrote data."),
            number_column("num_steps", "The number of completed steps.", label="steps"),
            number_column("num_timed_steps", "The number of steps that times use."),
            text_column("model", "The class of the model."),
            metric_column("num_parameters"),
            number_column("num_units", "The number of units."),
            text_column(
                "plan",
                "The plan in a few words, with an id: only equal plans of a model share it, as far "
                "as the runs recorded their plans.",
            ),
            text_column("backend", "The backend of torch.distributed."),
            text_column("sharder", "The code that made the units."),
            text_column("device", "The device's name, or its type."),
            text_column("torch", "The version of torch."),
            text_column("git_commit", "The commit of the training code."),
            text_column("tags", "The tags of the run."),
            _STEP_TIME,
            value_column(
                "plain_step_time_ns",
                MetricUnit.NS,
                "The typical time of the plain steps, if it differs clearly from the step time, "
                "which describes the detailed steps; empty: it does not.",
                label="plain steps",
            ),
            value_column(
                "step_time_median_ns",
                MetricUnit.NS,
                "Median over the timed steps.",
                label="median step time",
            ),
            value_column(
                "step_time_p90_ns",
                MetricUnit.NS,
                "90th percentile of the steps.",
                label="p90 step time",
            ),
            _COMMUNICATION,
            _EXPOSED,
            metric_column("overlap_ratio"),
            metric_column("communication_bytes"),
            number_column("collectives_per_step", "The number of collectives of a step."),
            metric_column("peak_allocated_bytes"),
            metric_column("peak_reserved_bytes"),
            metric_column("goodput_ratio"),
            metric_column("wall_ns"),
            value_column("loss", MetricUnit.NUMBER, "The last logged loss.", label="loss"),
            *map(metric_column, PARTS),
            text_column(
                "step_times_ns",
                "The course of the step time: medians of at most 40 equal parts of the run.",
            ),
            text_column(
                "settings",
                "All settings as text, by group and name: `config.lr`, `versions.torch`.",
            ),
            text_column("fingerprint", "The state of the run's files when it was read."),
        ),
    ),
    ("run",),
)
UNITS = CatalogTable(
    "units",
    TableSpec("Units of all runs", _from_row(_RUN, *UnitCosts.TABLE.columns)),
    ("run", "index"),
)
RANKS = CatalogTable(
    "ranks",
    TableSpec(
        "Ranks of all runs",
        _from_row(
            _RUN,
            number_column("rank", "The global rank."),
            text_column("host", "The host of the rank."),
            text_column("device", "The device of the rank."),
            text_column("status", "How the rank ended, or `running`."),
            number_column("num_steps", "The number of timed steps.", label="steps"),
            _STEP_TIME,
            _COMMUNICATION,
            _EXPOSED,
            metric_column("overlap_ratio"),
            metric_column("peak_allocated_bytes"),
            metric_column("peak_reserved_bytes"),
        ),
    ),
    ("run", "rank"),
)
STEPS = CatalogTable(
    "steps",
    TableSpec(
        "Steps of all runs, condensed",
        _from_row(
            _RUN,
            number_column("part", "The number of the part, from 0; a run has at most 40."),
            number_column("first_step", "The first timed step of the part."),
            number_column("last_step", "The last timed step of the part."),
            number_column("num_steps", "The number of timed steps of the part.", label="steps"),
            value_column(
                "step_time_ns", MetricUnit.NS, "Median step time of the part.", label="step time"
            ),
            value_column(
                "communication_ns", MetricUnit.NS, "Median of the part.", label="communication"
            ),
            value_column("exposed_ns", MetricUnit.NS, "Median of the part.", label="exposed"),
        ),
    ),
    ("run", "part"),
)
TABLES = (RUNS, UNITS, RANKS, STEPS)
"""The tables of a catalog."""


def to_table(table: CatalogTable, rows: list[dict[str, Any]]) -> pa.Table:
    """Make an Arrow table of rows."""
    schema = table.schema
    return pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in rows], schema=schema
    )


# --- Look up any setting of the runs of a catalog, to filter, group and split them.

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
