"""Write headlines and captions, and escape names for Markdown and charts.

Names come from the recorded program. Markdown and chart labels must show them unchanged: `plain`
and `code` escape text for Markdown; charts escape their labels themselves.
"""

import re
from collections.abc import Sequence
from typing import Literal

from fsdp_inspect.formatting import format_ns, format_unit
from fsdp_inspect.report.wording import describe_main_cause
from fsdp_inspect.result_types import ExposedOwner, Summary

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_SHORTCODE = re.compile(r":(?=[^\s:]+:)")
_BACKTICKS = re.compile(r"`+")
_COMMAND = re.compile(
    r"`((?:fsdp-inspect|python -m|torchrun) [^`]*|\.\w+\(\)|(?<=\(`)[^`]+(?=`\)))`"
)
_WORD_JOINER = "\N{WORD JOINER}"


def plain(text: str) -> str:
    """Escape text so that Markdown shows it unchanged: no markup, links, emoji or icons.

    A command of ours between backticks becomes code.
    """
    parts = _COMMAND.split(text)
    return "".join(code(part) if place % 2 else _escape(part) for place, part in enumerate(parts))


def _escape(text: str) -> str:
    without_shortcodes = _SHORTCODE.sub(f":{_WORD_JOINER}", _one_line(text))
    return _PUNCTUATION.sub(r"\\\1", without_shortcodes)


def code(text: str) -> str:
    """Format a name as inline code; backticks in the name stay backticks."""
    line = _one_line(text)
    longest = max((len(run) for run in _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest or not line.strip() else f"{fence}{line}{fence}"


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


READING, UNREADABLE = "being read", "unreadable"
STATUS_COLOURS: dict[str, Literal["green", "blue", "gray", "orange", "red"]] = {
    "complete": "green",
    "imported": "green",
    "running": "blue",
    READING: "gray",
    "partial": "orange",
    "failed": "red",
    "cut off": "red",
    UNREADABLE: "red",
}
"""The colour of each status of a run, also of runs that are not read."""


def describe_largest_waits(summary: Summary, owners: Sequence[ExposedOwner] = ()) -> str:
    """The headline about the unit with the largest waits, as Markdown.

    Args:
        summary: The run's summary.
        owners: The exposed waits with their causes, largest first; empty if they cannot be read.
    """
    if summary.step_time_ns is None:
        return "No timed step yet\\."
    top = max(summary.units, key=lambda unit: unit.exposed_ns or 0, default=None)
    if top is None:
        return "This model has no FSDP unit\\."
    if summary.exposed_ns is None or top.exposed_ns is None:
        return "Exposed communication is unknown\\."
    if top.exposed_ns == 0:
        return plain(f"No exposed wait: all {len(summary.units)} units hide their communication.")
    own = [owner for owner in owners if owner.fqn == top.fqn]
    mostly = describe_main_cause(own, is_headline=True)
    why = f", {mostly}" if mostly else ""
    return f"Largest waits of a unit: {code(format_unit(top.fqn))}" + plain(
        f", {format_ns(top.exposed_ns)} per step{why}."
    )
