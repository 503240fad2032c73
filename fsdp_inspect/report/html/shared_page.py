"""Render the contents of one page of the dashboard as one HTML file."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from fsdp_inspect.report.html.page import find_template


@dataclass(frozen=True, slots=True)
class SharedTitle:
    """The title of a part of the page."""

    kind: ClassVar[str] = "title"
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class SharedMarkup:
    """Text or a drawing as HTML, in which text from the run is escaped."""

    kind: ClassVar[str] = "markup"
    markup: str
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class SharedChart:
    """A chart, and the same in one sentence for screen readers."""

    kind: ClassVar[str] = "chart"
    markup: str
    alt: str
    plots: str = ""
    """JSON for a script that completes the chart; empty: the markup is the whole chart."""


@dataclass(frozen=True, slots=True)
class SharedDrawing:
    """A drawing that a script makes, and the same in one sentence."""

    kind: ClassVar[str] = "drawing"
    packed: str
    """The data of the drawing, as base64."""
    markup: str
    """The elements that the script fills, with their style sheet."""
    alt: str


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """Key numbers: label, value and detail of each."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table of texts."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]
    """Whether a column holds numbers, by column."""
    num_left_out: int = 0
    """The number of rows that are not in `rows`."""


SharedPart = SharedTitle | SharedMarkup | SharedChart | SharedDrawing | SharedTiles | SharedTable


def render_shared_page(
    parts: Sequence[SharedPart],
    *,
    page: str,
    run: str,
    headline: str,
    style: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """Render the contents of a page as an HTML document that loads nothing.

    The content security policy of the document allows the given scripts only, by their hashes.

    Args:
        parts: The contents, from top to bottom.
        page: The title of the page.
        run: The name of the run; empty for a page about several runs.
        headline: The headline as HTML, in which text from the run is escaped.
        style: A style sheet for the markup of the parts.
        scripts: Modules that complete charts and make drawings, without `</script`.
    """
    return find_template("shared_page.html").render(
        parts=parts,
        page=page,
        run=run,
        headline=Markup(headline),
        style=Markup(style),
        scripts=[(script, _digest(script)) for script in scripts],
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
