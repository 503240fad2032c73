"""Collect what the page shows, so that it can be saved as one HTML file.

`cards` adds every headline, title, text, tile, chart and table that it shows, and the timeline adds
its drawing. The file is made when it is requested (`exports`). It has no controls of the page.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import streamlit as st

_SHEET = "contents of the page"


@dataclass(frozen=True, slots=True)
class SheetTitle:
    """The title of a card (level 2), or a title inside a card (level 3)."""

    text: str
    level: int


@dataclass(frozen=True, slots=True)
class SheetText:
    """Text as Markdown."""

    markdown: str
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class SheetCode:
    """A command or code."""

    text: str


@dataclass(frozen=True, slots=True)
class SheetMarkup:
    """HTML in which text from the run is escaped."""

    markup: str
    alt: str = ""
    """The same in one sentence, for a drawn chart."""
    plots: tuple[dict[str, Any], ...] = ()
    """As in `Chart.plots`."""


@dataclass(frozen=True, slots=True)
class SheetDrawing:
    """A timeline as the browser shows it."""

    packed: bytes
    """The data of the drawing, as the component gets them."""
    alt: str


@dataclass(frozen=True, slots=True)
class SheetTiles:
    """Key numbers: label, value and detail of each."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class SheetTable:
    """A table, or a function that makes it when the page is saved."""

    frame: pd.DataFrame | Callable[[], pd.DataFrame]
    is_of_chart: bool = False
    """Whether the next part is a chart of the same numbers."""


SheetPart = (
    SheetTitle | SheetText | SheetCode | SheetMarkup | SheetDrawing | SheetTiles | SheetTable
)


@dataclass
class SheetSection:
    """A part of the page that may rerun alone."""

    name: str
    parts: "list[SheetPart | SheetSection]" = field(default_factory=list)

    def find(self, name: str) -> "SheetSection | None":
        """The section with that name in this one."""
        for part in self.parts:
            if isinstance(part, SheetSection):
                found = part if part.name == name else part.find(name)
                if found is not None:
                    return found
        return None

    def flat(self) -> Iterator[SheetPart]:
        """The contents from top to bottom, without the sections."""
        for part in self.parts:
            if isinstance(part, SheetSection):
                yield from part.flat()
            else:
                yield part


@dataclass
class PageSheet:
    """The contents of one page, from top to bottom."""

    page: str
    run: str = ""
    """The name of the run; empty for a page about several runs."""
    headline: str = ""
    """Markdown."""
    whole: SheetSection = field(default_factory=lambda: SheetSection(""))
    _current: SheetSection | None = None

    def add(self, part: SheetPart | SheetSection) -> None:
        """Add a part at the end of the current section."""
        (self._current or self.whole).parts.append(part)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Collect a section. If it reruns alone, its contents replace the earlier ones."""
        section = self.whole.find(name)
        if section is None:
            section = SheetSection(name)
            self.add(section)
        section.parts.clear()
        outer, self._current = self._current, section
        try:
            yield
        finally:
            self._current = outer


def start_sheet(page: str) -> PageSheet:
    """Begin to collect a page."""
    sheet = PageSheet(page)
    st.session_state[_SHEET] = sheet
    return sheet


def page_sheet() -> PageSheet:
    """The contents of the current page."""
    if _SHEET not in st.session_state:
        return start_sheet("")
    sheet: PageSheet = st.session_state[_SHEET]
    return sheet


@contextmanager
def sheet_section(name: str) -> Iterator[None]:
    """Collect a part of the page that may rerun alone; also a decorator for its function."""
    with page_sheet().section(name):
        yield
