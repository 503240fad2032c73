"""Collect what the page shows, so that it can be saved as one HTML file.

`cards` adds every headline, title, text, tile, chart and table that it shows. The file is made when
it is requested (`page_file`). It has no controls, and nothing of the canvas of the timeline.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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


SheetPart = SheetTitle | SheetText | SheetCode | SheetMarkup | SheetTiles | SheetTable


@dataclass
class PageSheet:
    """The contents of one page, from top to bottom."""

    page: str
    run: str = ""
    """The name of the run; empty for a page about several runs."""
    headline: str = ""
    """Markdown."""
    parts: list[SheetPart] = field(default_factory=list)
    _starts: dict[str, int] = field(default_factory=dict)

    def add(self, part: SheetPart) -> None:
        """Add a part at the end."""
        self.parts.append(part)

    def start_last_part(self, name: str) -> None:
        """Begin the last part of a page, which may rerun alone and then replaces its contents."""
        del self.parts[self._starts.setdefault(name, len(self.parts)) :]


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
