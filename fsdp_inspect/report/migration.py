"""Render the effects of a move from FSDP1 to FSDP2, for a terminal of 80 columns."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.advice.migration import Migration
from fsdp_inspect.formatting import format_bytes, plural
from fsdp_inspect.report.layout import dim, indented, render_table, section
from fsdp_inspect.results import to_plain


def render_migration(found: Migration) -> RenderableType:
    """Render the headline, the effects on memory and gathers, and the settings."""
    return Group(
        Text(describe_migration(found), style="bold"),
        *(indented(each) for each in describe_effects(found)),
        *section(
            Migration.TABLE.title,
            render_table(
                Migration.TABLE, list(found.settings), "setting", "recorded", "replacement"
            ),
        ),
        "",
        dim(
            "Bytes are computed from the recorded shapes. The peak of FSDP2 and its step time are "
            "not predicted: run the plan, and compare with `fsdp-inspect compare RUN NEW_RUN`."
        ),
    )


def describe_migration(found: Migration) -> str:
    """The headline of a migration."""
    lost = sum(not each.has_counterpart and bool(each.recorded) for each in found.settings)
    settings = plural(lost, "setting has", "settings have")
    return f"FSDP2 can shard the same {len(found.plan.units)} units; {settings} no counterpart."


def describe_effects(found: Migration) -> list[str]:
    """The effects on gathers and on memory, one sentence each."""
    lines = []
    if found.num_gathers:
        lines.append(
            f"All-gathers: {found.num_gathers} per microbatch, as with FSDP1, for the same "
            "strategy."
        )
    else:
        lines.append("All-gathers: none, because parameters are replicated.")
    if found.new_shard_bytes is None:
        lines.append("Sharded parameters: unknown, because the run does not contain their shapes.")
    else:
        change = found.new_shard_bytes - found.shard_bytes
        sign = "+" if change >= 0 else "-"
        lines.append(
            f"Sharded parameters of rank 0: {format_bytes(found.new_shard_bytes)} instead of "
            f"{format_bytes(found.shard_bytes)} ({sign}{format_bytes(abs(change))}): FSDP2 pads "
            "each parameter, FSDP1 pads each unit. Gradients and optimizer state follow."
        )
    if found.gather_buffer_bytes:
        lines.append(
            f"All-gather buffer: up to {format_bytes(found.gather_buffer_bytes)} more while a unit "
            "is gathered. FSDP1 gathers into the parameter itself."
        )
    lines.append(
        f"Reduction: up to {format_bytes(found.reduce_buffer_bytes)} more while a unit is reduced. "
        "FSDP1 has such a copy only if it pads or casts."
    )
    return lines


def migration_to_dict(found: Migration) -> dict[str, Any]:
    """The result as JSON values, with its sentences."""
    return {
        "sentence": describe_migration(found),
        "effects": describe_effects(found),
        **to_plain(found),
    }
