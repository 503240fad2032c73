"""Convert results to dictionaries, DataFrames, Arrow tables, figures and HTML.

Every result of `Run` is a dataclass with the numbers as attributes and a base class from here.
Nothing here computes: the attributes themselves are shown and exported.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from fsdp_inspect.columns import TableSpec
from fsdp_inspect.errors import MissingDataError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import pyarrow as pa

FIGURES = "fsdp_inspect.report.figures"
"""The module that draws figures. It loads at the first one, because it imports plotly."""
_MOST_ROWS_IN_HTML = 50
_SENTENCES = ("sentence", "headline", "answer")
"""The names of the attribute with the verdict of a result."""


class Result:
    """A result about a run, with numbers as attributes."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Keep `dataclass` from replacing `__repr__`, which would print all rows."""
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The verdict of the result, or else the number of its rows."""
        named = getattr(self, "verdict", None), self
        sentences = (getattr(each, name, None) for each in named for name in _SENTENCES)
        text = next((each for each in sentences if isinstance(each, str) and each), "")
        if not text and isinstance(self, TableResult):
            text = f"{len(self.rows())} rows, see to_pandas()"
        return f"<{type(self).__name__}: {text or 'see to_dict()'}>"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as dictionaries, lists, text and numbers, as `--json` prints them.

        NaN and infinity, which JSON does not support, are None.
        """
        plain = to_plain(self)
        assert isinstance(plain, dict)
        return plain

    def plot(self) -> go.Figure:
        """The figure that the dashboard shows for this result.

        Raises:
            MissingDataError: There is nothing to draw, or plotly is not installed. The message
                names the reason.
        """
        try:
            figures = import_module(FIGURES)
        except ModuleNotFoundError as error:
            raise MissingDataError(
                f"A figure needs the package {error.name!r}, which is not installed. Expected the "
                "extra 'app'. Install it with: pip install 'fsdp-inspect[app]'"
            ) from error
        figure: go.Figure = figures.draw(self)
        return figure


class TableResult(Result):
    """A result whose main part is a table.

    A subclass names its columns in `TABLE` and gives its rows in `rows()`.
    """

    __slots__ = ()

    TABLE: ClassVar[TableSpec]

    def rows(self) -> Sequence[Any]:
        """The rows of the table, in display order."""
        raise NotImplementedError

    def to_arrow(self) -> pa.Table:
        """The table with raw values (ns, bytes, ratios).

        Each field's metadata holds `label`, `unit` and `definition`.
        """
        import pyarrow as pa

        described = self.TABLE.describe()
        records = self.TABLE.records(self.rows())
        table = pa.table({name: [record[name] for record in records] for name in described})
        columns = [
            field.with_metadata(
                {key: value for key, value in described[field.name].items() if value}
            )
            for field in table.schema
        ]
        return table.cast(pa.schema(columns, metadata={"title": self.TABLE.title}))

    def to_pandas(self) -> pd.DataFrame:
        """The table with raw values; `frame.attrs["columns"]` describes each column.

        Raises:
            MissingDataError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise MissingDataError(
                "A DataFrame needs pandas, which is not installed. Expected the extra 'app'. "
                "Install it with: pip install 'fsdp-inspect[app]', or use to_arrow()."
            ) from error
        names = [column.name for column in self.TABLE.columns]
        frame = pd.DataFrame(self.TABLE.records(self.rows()), columns=names)
        frame.attrs["columns"] = self.TABLE.describe()
        return frame

    def _repr_html_(self) -> str:
        return render_html_table(self.TABLE, self.rows())


def render_html_table(spec: TableSpec, rows: Sequence[Any], most: int = _MOST_ROWS_IN_HTML) -> str:
    """Render a table for notebooks: labels with definitions as tooltips, values with units."""
    shown = spec.with_values(rows) if rows else spec
    head = "".join(
        f'<th title="{html.escape(column.definition)}">{html.escape(column.label)}</th>'
        for column in shown.columns
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(column.text(row))}</td>" for column in shown.columns)
        + "</tr>"
        for row in rows[:most]
    )
    rest = f"<p>{len(rows) - most} more rows in to_pandas()</p>" if len(rows) > most else ""
    caption = f"<caption>{html.escape(shown.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def to_plain(value: object) -> Any:
    """Convert a result to dictionaries, lists, text and numbers; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, BaseModel):
        return to_plain(value.model_dump(mode="json"))
    if isinstance(value, dict):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
