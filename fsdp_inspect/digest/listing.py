"""Which runs are in this folder, and how did each end?

Only the small records are read (`run.json`, `rank.json`), no table: a listing stays quick.
"""

from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.folder import RunEntry, list_runs
from fsdp_inspect.store.reader import open_run


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run of a folder of runs."""

    id: str
    """Path below the listed folder, with slashes."""
    path: Path
    created: str | None
    """ISO 8601, UTC; None, as all that follows, where `run.json` cannot be read."""
    status: str | None
    world_size: int | None
    num_ranks: int | None
    """Ranks that wrote something."""
    num_steps: int | None
    """Steps that the furthest rank has reported."""
    backend: str | None
    device: str | None
    model: str | None
    num_parameters: int | None
    notes: tuple[str, ...]
    """What is missing or odd, in words; why it cannot be read, where it cannot."""


def list_recorded_runs(directory: Path) -> tuple[ListedRun, ...]:
    """All runs in a folder, newest first; those that cannot be read come last, with the reason."""
    return tuple(_describe(entry) for entry in list_runs(directory))


def _describe(entry: RunEntry) -> ListedRun:
    manifest = entry.manifest
    if manifest is None:
        return _unreadable(entry, entry.problem or "run.json cannot be read.")
    try:
        run = open_run(entry.path)
        status, ranks, notes = run.status.value, run.ranks, tuple(run.notes)
    except (StoreError, OSError) as error:
        return _unreadable(entry, str(error))
    return ListedRun(
        id=entry.id,
        path=entry.path,
        created=manifest.created,
        status=status,
        world_size=manifest.world_size,
        num_ranks=len(ranks),
        num_steps=max((record.num_steps for record in ranks), default=0),
        backend=manifest.backend,
        device=manifest.device_name or manifest.device_type,
        model=manifest.model.class_name,
        num_parameters=manifest.model.num_parameters or None,
        notes=notes,
    )


def _unreadable(entry: RunEntry, reason: str) -> ListedRun:
    return ListedRun(
        id=entry.id,
        path=entry.path,
        created=None,
        status=None,
        world_size=None,
        num_ranks=None,
        num_steps=None,
        backend=None,
        device=None,
        model=None,
        num_parameters=None,
        notes=(reason,),
    )
