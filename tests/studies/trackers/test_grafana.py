"""Grafana's own types read the dashboard of `fsdp-inspect export RUN grafana`."""

import json
from pathlib import Path

import pytest

from tests.builders import steady_run, write_run
from tests.conftest import Invoke

pytestmark = pytest.mark.trackers


def test_grafanas_own_types_read_the_dashboard(tmp_path: Path, invoke: Invoke) -> None:
    from grafana_foundation_sdk.models.dashboard import Dashboard

    run, out = write_run(steady_run(), tmp_path / "run"), tmp_path / "run.grafana.json"
    assert invoke("export", run, "grafana", "--out", out).code == 0
    written = json.loads(out.read_text())
    read = Dashboard.from_json(written)
    assert len(read.panels) == len(written["panels"])
    assert [each.name for each in read.templating.list_val] == ["source", "job", "instance"]
