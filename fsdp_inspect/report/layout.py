"""Lay out reports for a terminal: tables from column specifications, titled sections, bars."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, ParamSpec

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fsdp_inspect.columns import Column, TableSpec
from fsdp_inspect.formatting import (
    ELLIPSIS,
    ShortNames,
    format_unit,
    shorten_names,
    show_controls,
)

BAR_WIDTH = 32
_LONGEST_WORD = len("reduce-scatter")


P = ParamSpec("P")
CODE = Style(meta={"is_code": True})
"""The style of a line of code. `Harmless` prints the line whole."""
_COMMAND = re.compile(r"`([^`\n]+)`")
_WIDE = 10_000


class Harmless:
    """Prints a renderable so that a reader can paste from it; print it with `crop=False`.

    Control characters are visible, so that the terminal executes none: names of units and hosts
    come from traces and run folders that are not trusted. Commands and lines of code have no line
    breaks, although they may be longer than a line, and no line ends with spaces.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = [*self._render(console, options.update(width=_WIDE))]
        wholes = {found[1] for found in _COMMAND.finditer(_text_of(wide))}
        for is_code, parts in groupby(wide, lambda part: bool(part.style and part.style.meta)):
            wholes |= {_text_of(parts).strip()} if is_code else set()
        yield from _join_lines([*self._render(console, options)], wholes)

    def _render(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield Segment(show_controls(segment.text), segment.style)


def _text_of(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def _join_lines(segments: Sequence[Segment], wholes: Iterable[str]) -> Iterator[Segment]:
    """The segments with each of `wholes` on one line, and without spaces at the ends of lines."""
    text = _text_of(segments)
    changes = [(*found.span(), "") for found in re.finditer(r" +(?=\n)", text)]
    for whole in wholes:
        pattern = r"\s*".join(map(re.escape, "".join(whole.split())))
        places = re.finditer(pattern, text)
        changes += [(*found.span(), whole) for found in places if "\n" in found[0]]
    styles = [segment.style for segment in segments for _ in segment.text]
    done = 0
    for begin, end, new in sorted(changes):
        if begin >= done:
            yield from _styled(text[done:begin], styles[done:begin])
            yield Segment(new, styles[begin])
            done = end
    yield from _styled(text[done:], styles[done:])


def _styled(text: str, styles: Sequence[Style | None]) -> Iterator[Segment]:
    for style, letters in groupby(zip(text, styles, strict=True), lambda each: each[1]):
        yield Segment("".join(letter for letter, _ in letters), style)


def render_table(
    spec: TableSpec,
    rows: Sequence[Any],
    *names: str,
    bar_of: Callable[[Any], RenderableType] | None = None,
    totals: Sequence[Sequence[str]] = (),
    shows_empty: bool = False,
) -> RenderableType:
    """Render the rows of a result as a table without borders.

    Long names of units lose the prefix that they share; a line above the table states it.

    Args:
        spec: The columns.
        rows: The rows, in order.
        names: The columns to show, in this order; default all. Columns of words without any value
            are left out.
        bar_of: Draws a bar at the end of each row.
        totals: The cells of further rows at the end.
        shows_empty: Whether columns of words without any value are shown, too.
    """
    chosen = spec.only(*names) if names else spec
    shown = chosen if shows_empty else chosen.without_empty_words(rows)
    short = shorten_names(
        str(column.value(row))
        for column in shown.columns
        if column.names_unit
        for row in rows
        if column.value(row) is not None
    )
    table = _empty_table()
    for column in shown.columns:
        table.add_column(
            Text(column.label),
            justify="left" if column.is_text else "right",
            overflow="fold" if column.is_text else "ellipsis",
            no_wrap=not column.is_text or _is_narrow(column, rows),
        )
    if bar_of is not None:
        table.add_column("", no_wrap=True)
    for row in rows:
        cells: list[RenderableType] = [_cell(column, row, short) for column in shown.columns]
        table.add_row(*cells, *([bar_of(row)] if bar_of else []))
    for cells_of_total in totals:
        table.add_row(*map(Text, cells_of_total))
    return with_prefix(short, table)


def _is_narrow(column: Column, rows: Sequence[Any]) -> bool:
    """Whether a column of words never folds, because all of its words are short."""
    is_short = all(len(column.text(row)) <= _LONGEST_WORD for row in rows)
    return is_short and not column.names_unit


def _cell(column: Column, row: Any, short: ShortNames) -> Text:
    text = column.text(row)
    return Text(short(text) if column.names_unit else text)


def with_prefix(short: ShortNames, table: Table) -> RenderableType:
    """The table, below a line that states the prefix that its names of units lack."""
    if not short.prefix:
        return table
    return Group(dim(f"Unit names: {ELLIPSIS} is {short.prefix}"), table)


def new_table(*headers: str, names: int = 1) -> Table:
    """A table without borders. Words are left-aligned and fold; numbers are right-aligned.

    Args:
        headers: The headers. `<` before a header makes a column of words.
        names: This many columns at the start are words without `<`.
    """
    has_header = any(header.strip("<") for header in headers)
    table = _empty_table(has_header=has_header)
    for position, header in enumerate(headers):
        is_words = position < names or header.startswith("<")
        table.add_column(
            Text(header.removeprefix("<")),
            justify="left" if is_words else "right",
            overflow="fold" if is_words else "ellipsis",
            no_wrap=not is_words,
        )
    return table


def table_of(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]], *, names: int = 1
) -> Table:
    """A table of texts, never markup; arguments as for `new_table`."""
    table = new_table(*heads, names=names)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _empty_table(*, has_header: bool = True) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), show_header=has_header, header_style="dim")


def grouped(parts_of: Callable[P, Iterable[RenderableType]]) -> Callable[P, Group]:
    """Make one renderable of the parts that a function yields, from top to bottom."""

    @wraps(parts_of)
    def render(*args: P.args, **kwargs: P.kwargs) -> Group:
        return Group(*parts_of(*args, **kwargs))

    return render


def section(title: str, *bodies: RenderableType) -> Iterator[RenderableType]:
    """A titled part of a report, with an empty line before it."""
    yield ""
    yield Text(title, style="bold")
    yield from bodies


def bar(ratio: float, block: str = "█") -> Text:
    """A ratio from 0 to 1 as a bar; the smallest ratio is still visible."""
    return Text(block * round(ratio * BAR_WIDTH) or "▏", no_wrap=True)


def indented(text: str, style: str | Style = "") -> RenderableType:
    """A line below a headline; if it wraps, it keeps its leading spaces."""
    words = text.lstrip()
    return Padding(Text(words, style=style), (0, 0, 0, 2 + len(text) - len(words)))


def dim(text: str) -> Text:
    """Secondary text."""
    return Text(text, style="dim")


def unit_name(fqn: str | None) -> Text:
    """The name of a unit as plain text, never markup."""
    return Text("(no unit)" if fqn is None else format_unit(fqn))
