"""Render the result of an import."""

import shlex

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.importing.flight_recorder import ImportedDumps
from fsdp_inspect.importing.kineto import ImportedTraces
from fsdp_inspect.importing.snapshot import ImportedSnapshot

_SHOWN_UNITS = 3


def render_import(imported: ImportedTraces) -> RenderableType:
    """Render the imported ranks, events and units, the notes, and the next command."""
    lines = [
        Text(
            f"{_count(len(imported.ranks), 'rank')} of {imported.world_size} imported "
            f"({imported.backend}), {_count(imported.num_steps, 'step')}: {imported.path}"
        ),
        Text(
            f"{imported.num_trace_events:,} trace events read; "
            f"{_count(imported.num_collectives, 'collective')} among {imported.num_events:,} rows"
        ),
        Text(_describe_units(imported.units)),
        *(Text(f"note: {note}", style="yellow") for note in imported.notes),
        Text(f"Next: fsdp-inspect summary {shlex.quote(str(imported.path))}"),
    ]
    return Group(*lines)


def render_snapshot(imported: ImportedSnapshot) -> RenderableType:
    """Render the imported memory snapshots, the notes, and the next command."""
    lines = [
        Text(
            f"{_count(len(imported.files), 'memory snapshot')} imported, "
            f"{imported.num_entries:,} trace entries: {imported.path}"
        ),
        Text(_describe_units(imported.units)),
        *(Text(f"note: {note}", style="yellow") for note in imported.notes),
        Text(f"Next: fsdp-inspect memory {shlex.quote(str(imported.path))}"),
    ]
    return Group(*lines)


def render_dumps(imported: ImportedDumps) -> RenderableType:
    """Render the imported flight recorder dumps, the notes, and the next command."""
    lines = [
        Text(
            f"{_count(len(imported.ranks), 'flight recorder dump')} of {imported.world_size} ranks "
            f"imported, {_count(imported.num_collectives, 'collective')}: {imported.path}"
        ),
        *(Text(f"note: {note}", style="yellow") for note in imported.notes),
        Text(f"Next: fsdp-inspect diagnose {shlex.quote(str(imported.path))}"),
    ]
    return Group(*lines)


def _describe_units(units: tuple[str, ...]) -> str:
    if not units:
        return "no units"
    named = ", ".join(unit or "(root)" for unit in units[:_SHOWN_UNITS])
    rest = len(units) - _SHOWN_UNITS
    return f"{_count(len(units), 'unit')}: {named}{f' and {rest} more' if rest > 0 else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"
