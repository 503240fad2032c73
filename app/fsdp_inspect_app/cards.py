"""Show results in cards: a title, a chart, a note, and the table with its CSV.

The headline is a heading of level 1, the title of a card one of level 2, and a title inside a card
one of level 3. Everything is also added to the page's sheet, which can be saved as a file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.elements.lib.column_types import ColumnConfig

from fsdp_inspect.formatting import MISSING, capitalize, num_decimals
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.wording import define_terms, format_metric
from fsdp_inspect.results import FIGURES
from fsdp_inspect_app.drawn_chart import Click, show_chart
from fsdp_inspect_app.page_sheet import (
    SheetCode,
    SheetMarkup,
    SheetTable,
    SheetText,
    SheetTiles,
    SheetTitle,
    page_sheet,
)
from fsdp_inspect_app.tables import to_csv
from fsdp_inspect_app.wording import plain

_SCALED = ("(ms)", "(GB/s)", "(MiB)")
"""The ends of the names of columns whose values share a unit and a number of decimals."""
THREE_DIGITS = "%.3g"
"""The format of numbers that each have three digits."""
_EXPLORING_KEY = "a figure is open"
_MANY = 999.5
"""From this value on, three digits do not reach the decimal point."""


def show_headline(markdown: str) -> None:
    """Show the headline of the page."""
    page_sheet().headline = markdown
    with st.container(key="headline"):
        st.title(markdown, anchor=False)


def show_section(title: str) -> None:
    """Show the title of a part of the page that has no frame."""
    page_sheet().add(SheetTitle(title, 2))
    st.header(plain(title), anchor=False)


def show_markup(markup: str) -> None:
    """Show HTML in which text from the run is escaped."""
    page_sheet().add(SheetMarkup(markup))
    st.html(markup)


def show_title(title: str, *, markdown: str = "") -> None:
    """Show a title inside a card, with Markdown after it."""
    page_sheet().add(SheetTitle(title, 3))
    st.subheader(f"{plain(title)}{markdown}", anchor=False)


def show_text(markdown: str, **options: Any) -> None:
    """Show text; options as for `st.markdown`. Empty text takes no place."""
    if not markdown:
        return
    page_sheet().add(SheetText(markdown))
    st.markdown(markdown, **options)


def show_note(markdown: str, **options: Any) -> None:
    """Show a note below a result; options as for `st.caption`."""
    page_sheet().add(SheetText(markdown, is_note=True))
    st.caption(markdown, **options)


@dataclass(frozen=True, slots=True)
class Tile:
    """A key number."""

    label: str
    value: str
    detail: str | None = None
    """A smaller text below the value."""
    definition: str | None = None
    """The tooltip, as plain text."""


def metric_tile(name: str, value: str, detail: str | None = None, definition: str = "") -> Tile:
    """The tile of a metric: its label, a value as text, and its definition unless one is given."""
    metric = find_metric(name)
    return Tile(capitalize(metric.label), value, detail, definition or f"{metric.definition}.")


def metric_tiles(names: Sequence[str], result: object) -> list[Tile]:
    """The tiles of the metrics that a result has, with their definitions.

    Args:
        names: Names of metrics, which are the attributes of the result.
        result: Missing attributes, and those that are None, have no tile.
    """
    values = {name: getattr(result, name, None) for name in names}
    return [
        metric_tile(name, format_metric(name, value))
        for name, value in values.items()
        if value is not None
    ]


def show_tiles(tiles: Sequence[Tile], *, border: bool = True) -> None:
    """Show key numbers in rows that fill the width, however many there are.

    All of their texts are plain: Streamlit shows each part of a metric as Markdown.
    """
    shown = tuple((tile.label, tile.value, tile.detail or "") for tile in tiles)
    page_sheet().add(SheetTiles(shown))
    with st.container(horizontal=True, gap="small"):
        for tile in tiles:
            st.metric(
                plain(tile.label),
                plain(tile.value),
                None if tile.detail is None else plain(tile.detail),
                delta_color="off",
                delta_arrow="off",
                border=border,
                height="stretch",
                help=None if tile.definition is None else plain(tile.definition),
            )


def show_caveats(caveats: Sequence[str]) -> None:
    """Show the first sentence of each caveat, and all of them on request; the texts are plain."""
    if not caveats:
        return
    firsts = [f"{caveat.partition('. ')[0].removesuffix('.')}." for caveat in caveats]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.warning("  \n".join(map(plain, firsts)), icon=":material/warning:")
        if [*caveats] != firsts:
            with st.popover("Details", type="tertiary", key="caveats"):
                show_text("\n".join(f"- {plain(caveat)}" for caveat in caveats))


def show_chart_card(  # noqa: PLR0913 (every argument is a part of the card, most by name)
    title: str,
    chart: Chart | None,
    frame: pd.DataFrame | Callable[[], pd.DataFrame],
    *,
    key: str,
    alt: str,
    note: str,
    below: str = "",
    on_click: Callable[[Click], None] | None = None,
) -> None:
    """A chart with its table and CSV, and its figure for **Explore**.

    Args:
        title: What it shows.
        chart: The chart; None: there is no value to draw.
        frame: The same numbers, or a function that makes the table when it is opened.
        key: Unique on the page; also the name of the CSV file.
        alt: The chart in one sentence, for screen readers.
        note: How the numbers were obtained; the tooltip of the title.
        below: Markdown below the chart.
        on_click: As for `show_chart`.
    """
    with show_card(title, key=key, note=with_terms(note, alt, below)) as header:
        with header:
            show_explore_button(chart, key=key, title=title)
            show_table_button(frame, key=key, alt=title)
        show_chart(chart, key=key, alt=alt, on_click=on_click)
        if below:
            show_text(below)


@contextmanager
def show_fold(title: str, *, key: str) -> Iterator[None]:
    """A part of the page that is folded until it is opened; the title is plain text."""
    page_sheet().add(SheetTitle(title, 2))
    with st.expander(plain(title), key=f"fold-{key}"):
        yield


def show_table_card(title: str, frame: pd.DataFrame, *, key: str, alt: str, note: str = "") -> None:
    """A table with its CSV.

    Args:
        title: What it shows, as plain text.
        frame: As for `show_table`.
        key: Unique on the page; also the name of the CSV file.
        alt: As for `show_table`.
        note: A note below the table, as plain text.
    """
    with show_card(title, key=key) as header:
        with header:
            show_csv_button(frame, key=key)
        show_table(frame, key=f"{key}-rows", alt=alt)
        if note := with_terms(note, *frame):
            show_note(plain(note))


def show_empty_card(title: str, reason: str, *, key: str) -> None:
    """A card that states why it is empty."""
    with show_card(title, key=key):
        show_note(plain(reason))


def with_terms(note: str, *texts: str) -> str:
    """A note with the definitions of our words in it and in the texts beside it."""
    return " ".join(filter(None, (note, define_terms(" ".join((note, *texts))))))


@contextmanager
def show_card(title: str, *, key: str, note: str = "") -> Iterator[DeltaGenerator]:
    """A frame with a title, which contains everything that the block shows.

    Args:
        title: The title, as plain text.
        key: Unique on the page.
        note: The tooltip of the title, as plain text.

    Yields:
        The title's row, for buttons.
    """
    with st.container(border=True, key=f"card-{key}", gap="xsmall", height="stretch"):
        header = st.container(horizontal=True, vertical_alignment="center")
        header.header(
            plain(title), anchor=False, width="stretch", help=plain(note) if note else None
        )
        page_sheet().add(SheetTitle(title, 2))
        yield header
        if note:
            page_sheet().add(SheetText(plain(note), is_note=True))


def show_explore_button(chart: Chart | None, *, key: str, title: str) -> None:
    """A button that opens a chart as a Plotly figure: zoom, values, legend, PNG.

    Args:
        chart: The chart; without one there is no button.
        key: Unique on the page.
        title: The title of the dialog.
    """
    if chart is not None and st.button(
        "Explore", type="tertiary", icon=":material/zoom_in:", key=f"explore-{key}"
    ):
        _explore(chart, key, title)


def is_exploring() -> bool:
    """Whether a figure is open, which a rerun of the page would close."""
    return bool(st.session_state.get(_EXPLORING_KEY))


def stop_exploring() -> None:
    """Note that no figure is open: at the start of each run of the page, and after the dialog."""
    st.session_state[_EXPLORING_KEY] = False


def _explore(chart: Chart, key: str, title: str) -> None:
    st.session_state[_EXPLORING_KEY] = True

    @st.dialog(plain(title), width="large", on_dismiss=stop_exploring)
    def show() -> None:
        figures = import_module(FIGURES)  # when the dialog opens, because Plotly takes seconds
        st.plotly_chart(figures.plot_chart(chart), key=f"figure-{key}", width="stretch")

    show()


def show_table_button(
    frame: pd.DataFrame | Callable[[], pd.DataFrame], *, key: str, alt: str
) -> None:
    """A button that opens the table behind a chart, with its CSV; as `show_table`."""
    page_sheet().add(SheetTable(frame, is_of_chart=True))
    if callable(frame):
        with st.container(width="content"):
            _show_large_table_button(frame, key=key, alt=alt)
        return
    with st.popover("Table", type="tertiary", icon=":material/table:", key=f"table-{key}"):
        _show_rows(frame, key=f"rows-{key}", alt=alt)
        show_csv_button(frame, key=key)


@st.fragment
def _show_large_table_button(make: Callable[[], pd.DataFrame], *, key: str, alt: str) -> None:
    """As `show_table_button`; the table is made and sent when it is opened."""
    name = f"table-{key}"
    panel = st.popover(
        "Table", type="tertiary", icon=":material/table:", key=name, on_change="rerun"
    )
    if panel.open:
        with panel:
            frame = make()
            _show_rows(frame, key=f"rows-{key}", alt=alt)
            show_csv_button(frame, key=key)


def show_table(frame: pd.DataFrame, *, key: str, alt: str, **more: Any) -> Any:
    """A table whose numbers show the digits that their unit needs; returns its state.

    Args:
        frame: Its rows.
        key: Unique on the page.
        alt: The content of the table, for screen readers; also in the names of its buttons.
        more: `columns` that replace those of `column_formats`, and options of `st.dataframe`.
    """
    page_sheet().add(SheetTable(frame))
    return _show_rows(frame, key=key, alt=alt, **more)


def _show_rows(
    frame: pd.DataFrame,
    *,
    key: str,
    alt: str,
    columns: Mapping[str, ColumnConfig] | None = None,
    **more: Any,
) -> Any:
    return st.dataframe(
        frame,
        hide_index=True,
        column_order=frame.attrs.get("order"),
        column_config={**column_formats(frame), **(columns or {})},
        placeholder=MISSING,
        key=key,
        alt=alt,
        **more,
    )


def show_csv_button(frame: pd.DataFrame | Callable[[], pd.DataFrame], *, key: str) -> None:
    """A button that saves a table, which is built as CSV only when the button is clicked."""
    st.download_button(
        "CSV",
        lambda: to_csv(frame() if callable(frame) else frame),
        file_name=f"{key}.csv",
        mime="text/csv",
        icon=":material/download:",
        key=f"csv-{key}",
        on_click="ignore",
    )


def column_formats(frame: pd.DataFrame) -> dict[str, ColumnConfig]:
    """The digits that the columns of a table show, and their definitions as tooltips."""
    definitions = frame.attrs.get("definitions", {})
    formats: dict[str, ColumnConfig] = {}
    for column in frame.columns:
        digits = _digits(column, frame[column])
        definition = plain(definitions[column]) if definitions.get(column) else None
        if digits is not None:
            formats[column] = st.column_config.NumberColumn(format=digits, help=definition)
        elif definition is not None:
            formats[column] = st.column_config.Column(help=definition)
    return formats


def _digits(column: str, values: pd.Series) -> str | None:
    """The format of a column of decimal numbers: at most three significant digits.

    The values of a column in ms, MiB or GB/s have equal decimals, so that they align, unless some
    bytes would be shown as 0.
    """
    if column.endswith(_SCALED):
        sizes = pd.to_numeric(values, errors="coerce").abs()
        largest, smallest = sizes.max(), sizes[sizes > 0].min()
        decimals = num_decimals(largest) if largest >= 1 else 3
        is_hidden = column.endswith("(MiB)") and smallest < 10**-decimals / 2
        if largest >= _MANY or is_hidden:
            return THREE_DIGITS
        return f"%.{decimals}f"
    is_decimal = pd.api.types.is_float_dtype(values) and values.notna().any()
    return THREE_DIGITS if is_decimal else None


# --- Show a command or code with a button that copies it.
#
# Streamlit's own code block loads a highlighter of 1.5 MB on each page that has a block, which
# takes up to half a second of the browser's time.

COMPONENT = "fsdp_inspect_code"

_mount = st.components.v2.component(
    COMPONENT,
    js=Path(__file__).with_name("code_block.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # the style sheet is on the page once
)


def show_code(text: str, *, key: str, language: str = "bash", is_shared: bool = True) -> None:
    """Show text as it is, with a button that copies it.

    Args:
        text: The command or code.
        key: Unique on the page.
        language: The language of the text; `bash` for commands.
        is_shared: Whether the text is in the file of a page that is saved.
    """
    if is_shared:
        page_sheet().add(SheetCode(text))
    _mount(data={"text": text, "language": language}, key=f"code-{key}")
