"""Render a report as on a terminal of 80 columns, without colour."""

import io

from rich.console import Console

from fsdp_inspect.report.layout import Harmless


def text_of(renderable, *, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(renderable)
    printed = console.file.getvalue()
    return "\n".join(line.rstrip() for line in printed.splitlines())


def printed_of(renderable, *, width=80):
    """As a command prints it: commands and lines of code are whole."""
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(Harmless(renderable), crop=False)
    return console.file.getvalue()
