"""Write a Grafana dashboard for the metrics that `fsdp-inspect store metrics` serves.

One panel shows one metric, by rank or by unit, with the help text of the metric. Queries select the
job and the instance that Prometheus scrapes, so one dashboard shows several runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.analysis.live.monitor import MonitoredRun
from fsdp_inspect.diagnosis.diagnose import Diagnosis
from fsdp_inspect.report.openmetrics import Family, FamilyType, find_families

_SCHEMA_VERSION = 39
"""The schema of Grafana 11's dashboards, which later versions migrate."""
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "": "short"}
_SELECTED = 'job=~"$job", instance=~"$instance"'
_MOST_UNITS = 10
"""The units with the largest values that a panel shows."""
_COLUMNS, _WIDTH, _HEIGHT = 2, 12, 8
_ROWS = (
    ("Diagnosis", ("fsdp_run_state", "fsdp_problem", "fsdp_since")),
    ("Training", ("loss", "fsdp_logged", "throughput", "tflops", "mfu", "grad_norm", "ntokens")),
    ("Step", ("time_metrics", "fsdp_exposed", "fsdp_communication", "fsdp_last_step")),
    ("Units", ("fsdp_unit",)),
    ("Memory", ("memory_", "fsdp_peak")),
)
"""The rows, with the beginnings of the names of their metrics."""


@dataclass(frozen=True, slots=True)
class GrafanaExport:
    """A written dashboard."""

    path: Path
    num_panels: int


def write_grafana(run: MonitoredRun, found: Diagnosis, path: Path, *, place: Path) -> GrafanaExport:
    """Write a dashboard file, which Grafana imports.

    Args:
        run: The run whose metrics the dashboard shows.
        found: The diagnosis of the run.
        path: The path to state in the result.
        place: The path to write to.
    """
    dashboard = make_dashboard(
        find_families(run, found), title=f"FSDP Inspect: {run.manifest.name}"
    )
    place.write_text(json.dumps(dashboard, indent=2) + "\n", encoding="utf-8")
    return GrafanaExport(path, sum(panel["type"] != "row" for panel in dashboard["panels"]))


def make_dashboard(families: Sequence[Family], *, title: str) -> dict[str, Any]:
    """A dashboard in Grafana's JSON.

    Args:
        families: The metrics of a run, with or without samples.
        title: The title of the dashboard.
    """
    return {
        "title": title,
        "uid": None,
        "tags": ["fsdp-inspect"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _label("job"), _label("instance")]},
        "panels": list(_panels(families)),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _label(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values(fsdp_last_step, {name})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(families: Sequence[Family]) -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    rest = [each for each in families if each.type is not FamilyType.INFO]
    for name, beginnings in (*_ROWS, ("Other", ("",))):
        members = [each for each in rest if each.name.startswith(beginnings)]
        rest = [each for each in rest if each not in members]
        if not members:
            continue
        place = {"h": 1, "w": _COLUMNS * _WIDTH, "x": 0, "y": top}
        number += 1
        yield {"id": number, "type": "row", "title": name, "collapsed": False, "gridPos": place}
        top += 1
        for at, family in enumerate(members):
            place = {"h": _HEIGHT, "w": _WIDTH, "x": at % _COLUMNS * _WIDTH, "y": top}
            number += 1
            yield {"id": number, **_panel(family), "gridPos": place}
            top += _HEIGHT * (at % _COLUMNS == _COLUMNS - 1 or at == len(members) - 1)


def _panel(family: Family) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    is_state = family.type is FamilyType.STATESET
    return {
        "type": "state-timeline" if is_state else "timeseries",
        "title": family.name,
        "description": family.help,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": _UNITS.get(family.unit, "short")}, "overrides": []},
        "options": {},
        "targets": [{"refId": "A", "datasource": source, **_query(family, is_state=is_state)}],
    }


def _query(family: Family, *, is_state: bool) -> dict[str, str]:
    selected = f"{family.name}{{{_SELECTED}}}"
    if is_state:
        return {"expr": f"{selected} == 1", "legendFormat": f"{{{{{family.name}}}}}"}
    labels = {label for sample in family.samples for label in sample.labels}
    if "unit" in labels:
        largest = f"topk({_MOST_UNITS}, max by (unit) ({selected}))"
        return {"expr": largest, "legendFormat": "{{unit}}"}
    names = ["{{name}}"] if "name" in labels else []
    return {"expr": selected, "legendFormat": ", ".join([*names, "rank {{rank}}"])}
