"""A folder of small runs with a catalog, which no test changes."""

from pathlib import Path

import pytest

from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.index import index_runs
from tests.builders import steady_run, write_run


def write_small_run(folder: Path, run: str, *, number: int = 0, **manifest: object) -> Path:
    """A run of two ranks and four steps."""
    made = {"run_id": run, "created_unix_ns": 10**18 + number, **manifest}
    return write_run(steady_run(**made), folder / run)


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, lr in enumerate((0.1, 0.1, 0.2)):
        config = {"lr": lr}
        write_small_run(folder, f"run-{number}", number=number, config=config, tags=["main"])
    write_small_run(folder / "sub", "deep", number=9)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.json").write_text("{")
    index_runs(folder)
    return folder


@pytest.fixture
def catalog(runs_folder: Path) -> Catalog:
    return open_catalog(runs_folder)
