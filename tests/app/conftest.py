"""Make the runs that the pages open: synthetic ones, complete and damaged, and every sample."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from fsdp_inspect_app import catalog_reading, dated, loading
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run, write_run

SCRIPT = Path(__file__).parents[2] / "app" / "fsdp_inspect_app" / "streamlit_app.py"
HOSTILE_UNIT = "**b** <img src=x onerror=alert(1)> [x](http://e) :smile: `q`"
HOSTILE_NAME = "<b>name</b> :red[x] $a$"

OpenApp = Callable[..., AppTest]
PATIENCE_S = 300
"""The time limit for a page."""


@pytest.fixture(scope="session", autouse=True)
def patient_lists() -> Iterator[None]:
    """The list of runs waits until all runs are read, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_reading, "PATIENCE_S", PATIENCE_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_scan() -> Iterator[None]:
    """Streamlit reads the metadata of all packages once, not at each run of a page."""
    scan = cache(manifest_scanner.scan_component_manifests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", scan)
        yield


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: complete, failed (hostile names), without a rank, without steps, newer, unreadable."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "whole", make_run(num_steps=8))
    write_run(folder / "failed", _hostile_run(), failures={1: "out of memory in step 5"})
    partial = make_run()
    write_run(folder / "partial", dataclasses.replace(partial, ranks=partial.ranks[:1]))
    write_run(folder / "no-steps", make_run(num_steps=0))
    write_run(folder / "newer", make_run(num_steps=1))
    manifest = json.loads((folder / "newer" / "run.json").read_text())
    del manifest["crc32"]
    (folder / "newer" / "run.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text('{"schema_version": 1, "run')
    return folder


def _hostile_run():
    fqns = [UNIT_FQNS[0], HOSTILE_UNIT, *UNIT_FQNS[2:]]
    manifest = make_manifest(run_id=HOSTILE_NAME, fqns=fqns, tags=["=1+1", "<i>tag</i>"])
    return dataclasses.replace(make_run(), manifest=manifest)


def start_app(folder: Path, page: str = "runs", **address: str) -> AppTest:
    """Open a page of the dashboard on a folder, at an address."""
    app = AppTest.from_file(str(SCRIPT), default_timeout=PATIENCE_S)
    for name, value in address.items():
        app.query_params[name] = value
    app.switch_page(f"app_pages/{page}/{page}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), str(folder)])
        return app.run()


@dataclass
class Clock:
    """The age of cached values follows this clock, which stands still until a test sets it."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        """Return the time, like `time.monotonic`."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the cached values."""
    found = Clock()
    monkeypatch.setattr(dated, "time", found)
    monkeypatch.setattr(loading, "_LIVE_LIFE_S", 10**6)
    return found


@pytest.fixture
def open_app(monkeypatch: pytest.MonkeyPatch) -> OpenApp:
    """Open a page like `start_app`; for tests that use the widgets of the page."""

    def open_page(folder: Path, page: str = "runs", **address: str) -> AppTest:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder)])
        return start_app(folder, page, **address)

    return open_page


@pytest.fixture(scope="session")
def shown(runs_folder: Path) -> Callable[[str, str], AppTest]:
    """A page about a run of the folder, opened once; for tests that only read it."""
    return cache(lambda page, run: start_app(runs_folder, page, run=run))
