"""The dashboard for Grafana: it shows each metric of a run once."""

import re
from pathlib import Path

import pytest

from fsdp_inspect.analysis.live.monitor import monitor_run
from fsdp_inspect.diagnosis.diagnose import diagnose
from fsdp_inspect.report.grafana import make_dashboard
from fsdp_inspect.report.openmetrics import FamilyType, find_families
from fsdp_inspect.store.reader import open_run
from tests.builders import steady_run, write_run
from tests.conftest import Invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(steady_run(), tmp_path / "run")


def test_each_metric_has_one_panel_that_queries_it_and_overlaps_no_other(folder: Path) -> None:
    run = open_run(folder)
    families = find_families(monitor_run(run, [0, 1]), diagnose(run))
    panels = make_dashboard(families, title="run")["panels"]

    shown = [each for each in panels if each["type"] != "row"]
    assert sorted(each["title"] for each in shown) == sorted(
        each.name for each in families if each.type is not FamilyType.INFO
    )
    for each in shown:
        (target,) = each["targets"]
        assert f"{each['title']}{{job=~" in target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")
        assert each["description"]
    cells = [
        (x, y)
        for each in panels
        for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
        for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert len({each["id"] for each in panels}) == len(panels)


def test_units_of_a_unit_metric_are_limited_and_named(folder: Path) -> None:
    run = open_run(folder)
    dashboard = make_dashboard(find_families(monitor_run(run, [0, 1]), diagnose(run)), title="run")
    (panel,) = [p for p in dashboard["panels"] if p["title"] == "fsdp_unit_exposed_seconds"]
    assert re.fullmatch(r"topk\(10, max by \(unit\) \(.*\)\)", panel["targets"][0]["expr"])
    assert panel["targets"][0]["legendFormat"] == "{{unit}}"
    assert panel["fieldConfig"]["defaults"]["unit"] == "s"


def test_the_command_says_how_to_import_it(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    ended = invoke("export", folder, "grafana", "--out", tmp_path / "run.grafana.json")
    assert ended.code == 0
    assert "In Grafana: Dashboards, New, Import" in " ".join(ended.out.split())
