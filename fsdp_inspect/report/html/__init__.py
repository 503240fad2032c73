"""Render a run or a comparison as one self-contained HTML file."""

from fsdp_inspect.report.html.page import (
    ComparisonContents,
    RunContents,
    WrittenReport,
    describe_page,
    read_comparison,
    read_contents,
    render_comparison_page,
    render_run,
)

__all__ = [
    "ComparisonContents",
    "RunContents",
    "WrittenReport",
    "describe_page",
    "read_comparison",
    "read_contents",
    "render_comparison_page",
    "render_run",
]
