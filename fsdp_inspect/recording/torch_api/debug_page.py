"""Show a text of FSDP Inspect on torch's debug page (`torch.distributed.debug`, torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.debug._debug_handlers import default_handlers
from torch.distributed.debug._frontend import DebugHandler, NavLink, Route

_PATH = "/fsdp_inspect"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}FSDP units{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""


class UnitsPage(DebugHandler):
    """A page with a text that is made anew for each request."""

    def __init__(self, describe: Callable[[], str]) -> None:
        """`describe`: makes the text; it is pickled if the server starts by spawn."""
        self._describe = describe

    def routes(self) -> list[Route]:
        """The page."""
        return [Route(_PATH, self._handle)]

    def nav_links(self) -> list[NavLink]:
        """The link in the head of all pages."""
        return [NavLink(_PATH, "FSDP units")]

    def templates(self) -> dict[str, str]:
        """The page's HTML."""
        return {"fsdp_inspect.html": _TEMPLATE}

    def _handle(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("fsdp_inspect.html", text=self._describe())
        return page

    def dump(self) -> str:
        """The text, for torch's periodic dumps."""
        return self._describe()

    def dump_filename(self) -> str:
        """The name of such dumps, which `enabled_dumps` takes."""
        return "fsdp_units"


def add_page(describe: Callable[[], str]) -> list[DebugHandler]:
    """Torch's own pages and the page with this text."""
    return [*default_handlers(), UnitsPage(describe)]
