"""One server over stdio for all tests of the tools, started by the client of the official SDK."""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from tests.app.synthetic import make_run, write_run

SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.fixture(scope="package")
def runs_folder(tmp_path_factory):
    """Copies of the samples, a run with a failed rank, and a run that links to a file outside."""
    root = tmp_path_factory.mktemp("assistant")
    folder = root / "runs"
    for sample in ("tiny-2-ranks", "hsdp-4-ranks", "async-prefetch-2-ranks"):
        shutil.copytree(SAMPLES / sample, folder / sample)
    write_run(folder / "failed", make_run(num_ranks=2, num_steps=4), failures={1: "ValueError: x"})
    write_run(root / "secret", make_run(num_ranks=2, num_steps=4))
    (folder / "linked").symlink_to(root / "secret")
    shutil.copytree(root / "secret", folder / "leaking")
    record = folder / "leaking" / "attempt-000" / "rank-00000" / "rank.json"
    record.unlink()
    record.symlink_to(root / "secret" / "attempt-000" / "rank-00000" / "rank.json")
    return folder


@pytest.fixture(scope="package")
def ask(runs_folder):
    """Ask tools in one session: takes (tool, arguments) pairs, returns (is_error, answer) pairs."""
    mcp = pytest.importorskip("mcp")

    async def ask_all(calls):
        python_path = os.pathsep.join(path for path in sys.path if path)
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "fsdp_inspect", "mcp", str(runs_folder)],
            env={"PYTHONPATH": python_path},
        )
        async with mcp.Client(mcp.stdio_client(server)) as client:
            listed = (await client.list_tools()).tools
            answers = [await client.call_tool(tool, given) for tool, given in calls]
        return listed, [(bool(one.is_error), one.content[0].text) for one in answers]

    def ask_server(*calls):
        # A thread of its own, because Playwright may have a loop in the thread of the tests.
        with ThreadPoolExecutor(1) as own_thread:
            listed, answers = own_thread.submit(anyio.run, ask_all, calls).result()
        ask_server.listed = listed
        return [(bad, text if bad else json.loads(text)) for bad, text in answers]

    return ask_server
