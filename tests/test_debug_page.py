"""Torch's debug page shows the state of the ranks, and `diagnose` asks its server."""

import html
import re
import sys
from pathlib import Path
from textwrap import dedent
from unittest.mock import Mock

import pytest

from fsdp_inspect import debug_page
from fsdp_inspect.debug_page import debug_handlers, describe_ranks
from fsdp_inspect.errors import ImportingError, RecordingError
from fsdp_inspect.importing.debug_server import fetch_dumps, is_debug_server
from tests.conftest import Torchrun

ROOT = Path(__file__).parents[1]
HANG = Path(__file__).parent / "distributed" / "debug_server_hang.py"


@pytest.mark.distributed
@pytest.mark.slow
def test_the_page_and_the_diagnosis_name_the_line_of_the_late_rank(
    torchrun: Torchrun, free_port, tmp_path: Path
) -> None:
    pytest.importorskip("torch.distributed.debug")
    environment = {"TORCH_FR_BUFFER_SIZE": "2000"}
    torchrun(
        HANG, str(free_port()), cwd=tmp_path, environment=environment, check=False, timeout_s=90
    )

    assert "FSDP units" in (tmp_path / "index.html").read_text()
    page = html.unescape((tmp_path / "page.html").read_text())
    rows = {line.split()[0]: line for line in page.splitlines() if line.split()[1:2] == ["3"]}
    assert "all-gather of" in rows["0"]
    assert "debug_server_hang.py" in rows["1"]

    found = " ".join((tmp_path / "diagnosis.txt").read_text().split())
    assert "Rank 1 never reached all-gather" in found
    line = HANG.read_text().split("time.sleep(0.5)")[0].count("\n") + 1
    assert f"debug_server_hang.py:{line}" in found


def documented_scripts() -> list[str]:
    guide = (ROOT / "docs/integrations.md").read_text()
    blocks = re.findall(r"```\w+\n(.*?)```", guide, flags=re.DOTALL)
    of_module = debug_page.__doc__ or ""
    indented = re.findall(r"(?:^    .*\n)+", of_module, flags=re.MULTILINE)
    return [block for block in [*blocks, *map(dedent, indented)] if "start_debug_server(" in block]


@pytest.mark.parametrize("script", documented_scripts())
@pytest.mark.parametrize(("name", "starts"), [("__main__", 1), ("__mp_main__", 0)])
def test_the_servers_process_imports_the_script_and_starts_nothing(
    script: str, name: str, starts: int, monkeypatch
) -> None:
    server, handlers = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "torch.distributed.debug", server)
    exec(script, {"__name__": name, "rank": 0, "fsdp_inspect": handlers})
    assert server.start_debug_server.call_count == starts
    assert handlers.debug_handlers.call_count == starts


def test_without_the_packages_of_torchs_server_the_error_names_them(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "fsdp_inspect.recording.torch_api.debug_page", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed.debug._debug_handlers", None)
    with pytest.raises(RecordingError, match="jinja2 and tabulate"):
        debug_handlers("run")


def test_a_run_that_cannot_be_read_is_stated_on_the_page(tmp_path: Path) -> None:
    assert "No run" in describe_ranks(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("http://node0:25999", True),
        ("http://[::1]:25999/", True),
        ("http://host/runs/a", False),
        ("http://host:80/runs/a", False),
        ("s3://bucket/run", False),
        ("runs/a", False),
    ],
)
def test_only_the_root_of_a_port_is_a_debug_server(argument: str, expected: bool) -> None:
    assert is_debug_server(argument) is expected


def test_a_server_that_does_not_answer_is_stated(tmp_path: Path, free_port) -> None:
    with pytest.raises(ImportingError, match="cannot be read"):
        fetch_dumps(f"http://localhost:{free_port()}", tmp_path / "dumps")
