"""How are reports laid out in a terminal? Tables without borders, titled sections, bars."""

from collections.abc import Iterator
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fsdp_inspect.formatting import format_owner, format_unit, show_controls

BAR_WIDTH = 32


class Harmless:
    """Anything to print, its texts with control characters shown: a terminal obeys none of them.

    Names of units and hosts come from traces and run folders that others wrote.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            text = segment.text if segment.control else show_controls(segment.text)
            yield Segment(text, segment.style, segment.control)


def new_table(*headers: str, names: int = 1) -> Table:
    """A borderless table whose first `names` columns are names and whose others are numbers.

    A header that begins with `<` makes its column one of words: to the left, and folded.
    """
    has_header = any(header.strip("<") for header in headers)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=has_header, header_style="dim")
    for position, header in enumerate(headers):
        is_name = position < names or header.startswith("<")
        table.add_column(
            header.removeprefix("<"),
            justify="left" if is_name else "right",
            overflow="fold" if is_name else "ellipsis",
            no_wrap=not is_name,
        )
    return table


def section(title: str, *bodies: RenderableType) -> Iterator[RenderableType]:
    """A titled part of a report, with an empty line before it."""
    yield ""
    yield Text(title, style="bold")
    yield from bodies


def bar(ratio: float, block: str = "█") -> Text:
    """A share from 0 to 1 as a bar; the smallest share is still seen."""
    return Text(block * round(ratio * BAR_WIDTH) or "▏")


def dim(text: str) -> Text:
    """Small print."""
    return Text(text, style="dim")


class Owned(Protocol):
    """Communication that may belong to a unit."""

    @property
    def fqn(self) -> str | None:
        """None: it belongs to none."""

    @property
    def is_fsdp(self) -> bool | None:
        """None where the source does not tell."""


def owner_name(owned: Owned) -> Text:
    """Whose communication it is, as plain text, never markup."""
    return Text(format_owner(owned.fqn, owned.is_fsdp))


def unit_name(fqn: str | None, otherwise: str = "(no unit)") -> Text:
    """The name of a unit as plain text, never markup; `otherwise` where there is none."""
    return Text(otherwise if fqn is None else format_unit(fqn))
