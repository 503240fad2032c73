"""Take the baseline of a check from the catalog of earlier runs.

The baseline is the median of the last complete runs with the same configuration, machine and torch
version. Their code and plan may differ, because the gate shows the effect of such changes. Median
instead of highest: one bad run of the history does not hide a regression.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_inspect.catalog.catalog import Catalog
from fsdp_inspect.comparison.gate.baseline import (
    Baseline,
    make_baseline,
    torch_release,
    why_no_baseline,
)
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, read_runs
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.comparison.settings import settings_as_text
from fsdp_inspect.errors import CheckError, StoreError
from fsdp_inspect.formatting import plural
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.run import RunStatus

DEFAULT_LAST = 10
_SAME_GROUPS = ("machine", "config")
_MAY_DIFFER = {"config.seed"}
_USABLE = (RunStatus.COMPLETE.value, RunStatus.IMPORTED.value)


@dataclass(frozen=True, slots=True)
class CatalogBaseline:
    """A baseline from a catalog, and the runs behind it."""

    baseline: Baseline
    runs: tuple[str, ...]
    """The ids of the runs, newest first."""
    has_times: bool
    """Whether times are judged: both sides need enough runs."""


def take_baseline(
    catalog: Catalog, reading: GateMeasurements, *, last: int = DEFAULT_LAST, tag: str | None = None
) -> CatalogBaseline:
    """Make a baseline of the last runs that have the configuration of a reading.

    Args:
        catalog: The catalog of the earlier runs.
        reading: The run to check, which is never part of its baseline.
        last: The most runs to use.
        tag: Only runs with this tag.

    Raises:
        CheckError: The catalog has too few such runs.
    """
    own = {(origin.run_id, origin.created_unix_ns) for origin in reading.origins}
    wanted = _key(settings_as_text(reading.manifest), torch_release(reading.manifest))
    chosen: list[tuple[str, StoredRun]] = []
    num_tagged = 0
    for row in _newest_first(catalog, tag):
        num_tagged += 1
        torch = (row["torch"] or "unknown").partition("+")[0]
        is_same = _key(row["settings"] or {}, torch) == wanted
        is_own = (row["run_id"], row["created_unix_ns"]) in own
        if not is_same or is_own or len(chosen) == last:
            continue
        opened = _open(catalog, row["run"])
        if opened is not None:
            chosen.append((row["run"], opened))
    least = min(last, RUNS_FOR_A_TEST)
    if len(chosen) < least:
        raise CheckError(_too_few(len(chosen), num_tagged, least, tag))
    history = read_runs([run for _, run in chosen], are_history=True)
    problem = why_no_baseline(history)
    if problem is not None:
        raise CheckError(problem)
    baseline = make_baseline(history)
    has_times = all(
        len(reading.times.get(name, ())) >= RUNS_FOR_A_TEST for name in baseline.times
    ) and bool(baseline.times)
    if not has_times:
        baseline = make_baseline(replace(history, times={}))
    return CatalogBaseline(baseline, tuple(run for run, _ in chosen), has_times)


def _newest_first(catalog: Catalog, tag: str | None) -> list[dict[str, Any]]:
    """The complete runs of the catalog with the tag."""
    names = ("run", "run_id", "status", "problem", "created_unix_ns", "torch", "tags", "settings")
    table = catalog.runs().to_arrow().select(names)
    rows = table.sort_by([("created_unix_ns", "descending")]).to_pylist(maps_as_pydicts="lossy")
    return [
        row
        for row in rows
        if row["status"] in _USABLE
        and row["problem"] is None
        and (tag is None or tag in (row["tags"] or ()))
    ]


def _key(settings: Mapping[str, str], torch: str) -> dict[str, str]:
    """The settings that a run of the baseline must share."""
    kept = {
        name: value
        for name, value in settings.items()
        if name.partition(".")[0] in _SAME_GROUPS and name not in _MAY_DIFFER
    }
    return {**kept, "torch": torch, "model": settings.get("model.class", "")}


def _open(catalog: Catalog, run: str) -> StoredRun | None:
    """Open a run of the catalog; None if it was removed or damaged since the index."""
    try:
        return catalog.open_run(run)
    except StoreError:
        return None


def _too_few(found: int, num_tagged: int, least: int, tag: str | None) -> str:
    of_tag = "" if tag is None else f" with the tag {tag!r}"
    return (
        f"The catalog has {plural(found, 'earlier complete run')}{of_tag} with "
        f"the configuration, machine and torch version of this run, of "
        f"{plural(num_tagged, 'complete run')}{of_tag}. Expected at least {least}. Record more "
        "runs and refresh the catalog with `fsdp-inspect store index`, or lower --baseline-last."
    )
