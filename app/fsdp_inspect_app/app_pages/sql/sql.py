"""Page SQL: read-only queries over the catalog of the folder of runs."""

import shlex
import threading

import pandas as pd
import streamlit as st

from fsdp_inspect.catalog.query import QueryResult
from fsdp_inspect.catalog.tables import TABLES
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import plural
from fsdp_inspect_app.cards import (
    show_card,
    show_code,
    show_csv_button,
    show_fold,
    show_headline,
    show_note,
    show_table,
)
from fsdp_inspect_app.catalog_reading import KnownCatalog, open_page, show_reading
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.wording import plain

_FIRST = (
    "SELECT run, step_time_ns, plain_step_time_ns, exposed_ns, peak_allocated_bytes FROM runs\n"
    "ORDER BY step_time_ns"
)
_TIMEOUT_S = 20.0
_MEMORY_BYTES = 1 << 30
_MOST_ROWS = 2_000
_AT_ONCE = threading.Semaphore(2)
"""Queries of all sessions that run at once; each is a process of its own."""
_ASKED_KEY = "query that was run"


def show_page() -> None:
    """Show the query, its rows, and the columns of the tables."""
    opened = open_page()
    if opened is None:
        return
    folder, entries, catalog, is_complete = opened
    answer = st.container()
    with st.form("query", border=False):
        sql = st.text_area("SQL (DuckDB, read-only)", _FIRST, key="sql", bind="query-params")
        if st.form_submit_button("Run", icon=":material/play_arrow:"):
            st.session_state[_ASKED_KEY] = sql
    asked = st.session_state.get(_ASKED_KEY)
    with answer:
        show_headline(plain(f"SQL over the catalog of {plural(len(entries), 'run')}."))
    if asked is not None:
        _show_rows(catalog, asked)
    _show_columns()
    show_note("The same in a terminal, after an index of the folder:")
    show_code(shlex.join(["fsdp-inspect", "store", "index", folder]), key="index")
    words = ["fsdp-inspect", "store", "query", " ".join((asked or sql).split()), "--runs", folder]
    show_code(shlex.join(words), key="query")
    if not is_complete:
        show_reading(folder, entries)


def _show_rows(catalog: KnownCatalog, sql: str) -> None:
    try:
        result = _run(catalog.generation, sql, catalog)
    except FsdpInspectError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    rows = result.rows()
    frame = frame_of(result.TABLE, rows[:_MOST_ROWS])
    more = f", the first {_MOST_ROWS:,} are shown" if len(rows) > _MOST_ROWS else ""
    with show_card(f"{plural(len(rows), 'row')}{more}", key="rows") as header:
        with header:
            show_csv_button(lambda: frame_of(result.TABLE, rows), key="rows")
        show_table(frame, key="rows", alt="Rows of the query")


@st.cache_resource(max_entries=8, show_spinner="Running the query")
def _run(generation: str, sql: str, _catalog: KnownCatalog) -> QueryResult:
    with _AT_ONCE:
        return _catalog.catalog.query(sql, timeout_s=_TIMEOUT_S, memory_bytes=_MEMORY_BYTES)


def _show_columns() -> None:
    rows = [
        {
            "table": table.name,
            "column": column.name,
            "unit": "text" if column.unit is None else column.unit.value,
            "definition": column.definition,
        }
        for table in TABLES
        for column in table.spec.columns
    ]
    with show_fold("Tables and columns", key="columns"):
        show_table(pd.DataFrame(rows), key="columns", alt="The columns of the tables")


show_page()
