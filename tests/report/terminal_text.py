"""Render a report as on a terminal of 80 columns, without colour."""

import io

from rich.console import Console


def text_of(renderable, *, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(renderable)
    printed = console.file.getvalue()
    return "\n".join(line.rstrip() for line in printed.splitlines())
