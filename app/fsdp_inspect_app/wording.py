"""How is a run put into words? Sentences for headlines and captions, and names made harmless.

Names come from whoever recorded the run. Markdown and chart labels must show them as they are:
`plain` and `code` for Markdown, `label` for plotly. Numbers are only formatted here.
"""

import re
from collections.abc import Sequence

from fsdp_inspect.formatting import format_category as name_category
from fsdp_inspect.formatting import format_ns, format_ratio, format_unit
from fsdp_inspect.report.causes import format_cause
from fsdp_inspect.report.figure_style import plain_label as label
from fsdp_inspect.report.values import format_kind
from fsdp_inspect.report.wording import (
    describe_memory_method,
    describe_methods,
    describe_plan,
    describe_provenance,
    describe_run,
    describe_step,
)
from fsdp_inspect.result_types import ExposedOwner, Summary

__all__ = [
    "code",
    "describe_longest_wait",
    "describe_main_cause",
    "describe_memory_method",
    "describe_methods",
    "describe_plan",
    "describe_provenance",
    "describe_run",
    "describe_step",
    "label",
    "name_category",
    "plain",
]

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_SHORTCODE = re.compile(r":(?=[^\s:]+:)")
_BACKTICKS = re.compile(r"`+")
_WORD_JOINER = "\N{WORD JOINER}"


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no links, no emoji, no icons."""
    without_shortcodes = _SHORTCODE.sub(f":{_WORD_JOINER}", _one_line(text))
    return _PUNCTUATION.sub(r"\\\1", without_shortcodes)


def code(text: str) -> str:
    """A name in Markdown, in typewriter letters; backticks in it stay backticks."""
    line = _one_line(text)
    longest = max((len(run) for run in _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest or not line.strip() else f"{fence}{line}{fence}"


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def describe_longest_wait(summary: Summary, owners: Sequence[ExposedOwner] = ()) -> str:
    """Which unit is waited for most, as Markdown.

    Args:
        summary: Of the run.
        owners: Its waits, longest first, which tell why; none where they cannot be read.
    """
    if summary.step_time_ns is None:
        return "No step counts yet, so what each unit costs cannot be told\\."
    top = max(summary.units, key=lambda unit: unit.exposed_ns, default=None)
    if top is None:
        return "This model has no FSDP unit\\."
    if top.exposed_ns == 0:
        return plain(f"No unit's communication is waited for: all {len(summary.units)} hide it.")
    why = describe_main_cause([owner for owner in owners if owner.fqn == top.fqn])
    return (
        plain(
            f"{format_ns(top.exposed_ns)} of every {format_ns(summary.step_time_ns.typical)} step "
        )
        + f"are spent waiting for {code(format_unit(top.fqn))}"
        + plain(f"{why}. No other of the {len(summary.units)} units takes more.")
    )


def describe_main_cause(owners: Sequence[ExposedOwner]) -> str:
    """Why one unit is waited for: `, mostly for its all-gather in forward (98.0 % late issue)`.

    Args:
        owners: The waits for it, longest first.
    """
    if not owners or not owners[0].causes_ns:
        return ""
    top = owners[0]
    cause, duration = next(iter(top.causes_ns.items()))
    ratio = duration / top.exposed_ns
    return (
        f", mostly for its {format_kind(top.kind)} in {top.phase} "
        f"({format_ratio(ratio)} {format_cause(cause)})"
    )
