"""docs/frameworks.md has a row for each framework, measured with the pinned versions."""

from __future__ import annotations

import re
from pathlib import Path

from tests.studies.frameworks.entries import ENTRIES, Entry
from tests.studies.frameworks.measured import COMMANDS, Measured, Recording
from tests.studies.frameworks.table import BEGIN, END, render, replace

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PINS = dict(
    re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-frameworks.txt").read_text(), re.M)
)


def row(entry: Entry, **changes: object) -> Measured:
    good = {
        **dict.fromkeys(("losses", "counts", "recording", "plan"), ""),
        "commands": dict.fromkeys(COMMANDS, ""),
        "num_collectives": 1234,
        "replay_error": -0.0213,
    }
    recording = Recording(**{**good, **changes})  # type: ignore[arg-type]
    return Measured(entry.name, {"package": "1.2+cpu"}, recording, recording)


def test_each_framework_has_a_driver_and_its_pinned_version_on_the_page() -> None:
    for entry in ENTRIES:
        versions = ", ".join(PINS[package] for package in entry.packages)
        assert f"| {entry.title} {versions} | unmodified script | identical |" in PAGE
        assert f"| {entry.title} | {entry.callback} | {entry.limits} |" in PAGE
        assert entry.driver.exists()


def test_a_row_shows_what_was_measured() -> None:
    matrix = render([row(entry) for entry in ENTRIES])

    assert (
        "| Transformers Trainer 1.2 | unmodified script | identical | 1,234 equal | complete "
        "| passes | all 6 answer | -2.1% | unknown | ranked |\n"
    ) in matrix


def test_a_fault_is_shown_in_its_column() -> None:
    fault = row(ENTRIES[0], losses="x", counts="x", plan="x", advice="off", recording="x")

    matrix = render([fault, *(row(entry) for entry in ENTRIES[1:])])

    assert (
        "| differ | differ | incomplete | fails | all 6 answer | -2.1% | unknown | refused |"
        in (matrix)
    )


def test_only_the_matrix_of_the_page_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"

    assert replace(page, f"{BEGIN}\nnew\n{END}") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
