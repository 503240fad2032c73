"""The command sequence of docs/scale.md, as printed, in one bash; Chromium opens its dashboard."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from fsdp_inspect.importing.kineto import import_traces
from tests.browser.conftest import OpenTab, wait_until_healthy
from tests.parallel.cluster import files_of, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
RUNS = ("first", "second", "third", "fourth", "fifth")


class Shell:
    """One bash that runs blocks, one after the other, and ends at the first command that fails.

    All output goes to one file. Jobs in the background end with the bash.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "output.log"
        self._num_blocks = 0
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", "-euo", "pipefail"],
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.run("trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n")

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def run(self, block: str) -> str:
        """Run a block to its end; returns its output."""
        assert self.process.stdin is not None
        self._num_blocks += 1
        end = f"--- end of block {self._num_blocks}"
        begin = len(self.log.read_text())
        self.process.stdin.write(f"{block}echo '{end}'\n")
        self.process.stdin.flush()
        wait_until(lambda: end in self.log.read_text() or self.process.poll() is not None)
        assert end in self.log.read_text(), f"{block}\n{self.log.read_text()[-5000:]}"
        return self.log.read_text()[begin:].partition(end)[0]


@pytest.fixture
def shell(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Shell]:
    """A bash in an empty folder, with free ports and the commands of this environment."""
    ports = {name: str(free_port()) for name in ("S3_PORT", "DASK_PORT", "STATUS_PORT")}
    caches = {name: str(tmp_path / name) for name in ("FSDP_INSPECT_CACHE", "FSDP_INSPECT_DATA")}
    variables = {
        **ports,
        **caches,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun on a machine whose host name has no address
        "DASK_TEMPORARY_DIRECTORY": str(tmp_path / "dask"),
        "COLUMNS": "150",
    }
    (tmp_path / "work").mkdir()
    with Shell(tmp_path / "work", variables) as started:
        yield started


def blocks() -> dict[str, list[str]]:
    """The blocks of the page that a test runs, by the number or the name of their section."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        marked = r"<!-- a test runs this block -->\n```bash\n(.*?)```"
        found[section.split()[0]] = re.findall(marked, section, re.DOTALL)
    return found


def test_sequence_of_the_page_runs_as_printed(shell: Shell, tab: OpenTab, tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="needs the extra [s3]")
    pytest.importorskip("distributed", reason="needs the extra [dask]")
    page = blocks()

    def run(section: str) -> str:
        return "".join([shell.run(block) for block in page.pop(section)])

    run("1.")
    recorded = run("2.")
    listing = recorded.partition("created (UTC)")[2]
    assert [name for name in RUNS if name not in listing] == []
    assert "uploaded to s3://demo/runs/" in recorded
    assert "5 runs" in run("3.")
    queried = run("4.")
    assert [name for name in RUNS if name not in queried] == []
    run("5.")
    assert_runs_page_lists_the_runs(shell, tab)
    judged = run("6.")
    assert re.search(r"2 ranks, \d+ files .* uploaded: s3://demo/runs/\S*change", joined(judged))
    assert "Baseline: the median of 5 runs: " in judged
    assert "change: passes (4 metrics)" in judged
    run("7.")
    assert_worker_was_killed_during_the_import(shell)
    import_traces(shell.folder / "traces", tmp_path / "alone" / "imported")
    assert files_of(shell.folder / "runs" / "imported") == files_of(tmp_path / "alone" / "imported")
    run("Stop")
    assert page == {}


def assert_runs_page_lists_the_runs(shell: Shell, tab: OpenTab) -> None:
    """Open the printed address in Chromium, and read the names in the list of runs."""
    printed = r"Dashboard of s3://demo/runs: (http://\S+)"
    wait_until(lambda: bool(re.search(printed, shell.log.read_text())))
    found = re.search(printed, shell.log.read_text())
    assert found is not None
    address = found[1].partition("?")[0].rstrip("/")
    wait_until_healthy(address, shell.process, shell.log)
    dashboard = tab(address)
    dashboard.page.goto(found[1])
    listed = dashboard.page.get_by_test_id("stDataFrame").first.locator("tbody")
    for name in RUNS:
        expect(listed).to_contain_text(name)
    dashboard.settle()


def assert_worker_was_killed_during_the_import(shell: Shell) -> None:
    """Check the order in the log of the scheduler: the command came, a worker left, it ended."""
    log = (shell.folder / "scheduler.log").read_text()
    came, left = log.index("Receive client connection"), log.index("Remove worker")
    assert came < left < log.index("Remove client")


def joined(text: str) -> str:
    return " ".join(text.split())
