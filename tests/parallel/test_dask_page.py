"""The Slurm script and the Kubernetes commands of docs/dask.md run, on this machine."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_inspect.catalog.catalog import open_catalog
from fsdp_inspect.importing.kineto import import_traces
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.parallel.cluster import files_of, wait_until
from tests.store.run_files import write_run

pytest.importorskip("distributed", reason="needs the extra [dask]")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dask.md").read_text()
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "DASK_JOBQUEUE__SLURM__INTERFACE": "lo",
    "DASK_JOBQUEUE__SLURM__SCHEDULER_OPTIONS": "{'dashboard_address': '127.0.0.1:0'}",
    "DASK_JOBQUEUE__SLURM__WORKER_EXTRA_ARGS": "['--no-dashboard']",
}
SBATCH = """#!/bin/sh
cp "$1" job.sh
setsid sh job.sh > job.log 2>&1 &
echo "Submitted batch job $!"
"""
"""Starts the job at once, as a group of processes on this machine."""
SCANCEL = """#!/bin/sh
kill -- "-$1"
"""
SMALLER = {
    "cores=8": "cores=2",
    "processes=8": "processes=2",
    'memory="64GB"': 'memory="4GB"',
    "jobs=4": "jobs=1",
}


def block_of(section: str, language: str) -> str:
    [text] = [each for each in PAGE.split("\n## ") if each.startswith(section)]
    [block] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_slurm_script_imports_traces_on_the_workers_of_a_job(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue", reason="needs dask-jobqueue")
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank in range(2):
        trace = TraceWriter(rank=rank)
        fsdp2_step(trace)
        trace.write(traces / f"rank{rank}.json")
    script = block_of("Slurm", "py")
    for printed, here in SMALLER.items():
        assert printed in script
        script = script.replace(printed, here)

    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": f"{tmp_path / 'bin'}:{ENVIRONMENT['PATH']}"},
        check=True,
    )

    import_traces(traces, tmp_path / "alone" / "imported")
    assert files_of(tmp_path / "runs" / "imported") == files_of(tmp_path / "alone" / "imported")
    job = (tmp_path / "job.sh").read_text()
    for line in ("-p cpu", "-A my-account", "-t 01:00:00", "--cpus-per-task=2", "--mem=4G"):
        assert f"#SBATCH {line}\n" in job
    assert "--nworkers 2 --nanny" in job
    assert " --nthreads 1 " in job


def manifests() -> dict[tuple[str, str], Any]:
    """The objects of the manifest, by kind and name."""
    found = yaml.safe_load_all(block_of("Kubernetes", "yaml"))
    return {(each["kind"], each["metadata"]["name"]): each["spec"] for each in found}


def pod_of(spec: Any) -> Any:
    """The only container of the pods of a deployment or a job."""
    [container] = spec["template"]["spec"]["containers"]
    return container


def test_kubernetes_service_leads_to_the_scheduler() -> None:
    found = manifests()
    for kind, name in found:
        if kind == "Deployment":
            selector = found[kind, name]["selector"]["matchLabels"]
            assert selector == found[kind, name]["template"]["metadata"]["labels"]
    service, scheduler = found["Service", "scheduler"], found["Deployment", "scheduler"]
    assert service["selector"] == scheduler["template"]["metadata"]["labels"]
    [port] = service["ports"]
    assert pod_of(scheduler)["command"][-2:] == ["--port", str(port["port"])]
    address = f"tcp://scheduler:{port['port']}"
    for kind, name in (("Deployment", "worker"), ("Job", "index")):
        assert address in pod_of(found[kind, name])["command"]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends; its output goes to a file."""
    with (folder / f"{command[1]}.log").open("wb") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
def test_kubernetes_commands_index_runs(tmp_path: Path, free_port: Callable[[], int]) -> None:
    runs, port = tmp_path / "runs", free_port()
    write_run(runs / "run", ranks=range(2))
    here = {
        "8786": str(port),
        "tcp://scheduler:8786": f"tcp://127.0.0.1:{port}",
        "s3://bucket/runs": str(runs),
    }
    scheduler, worker, index = (
        [here.get(word, word) for word in pod_of(manifests()[place])["command"]]
        for place in (("Deployment", "scheduler"), ("Deployment", "worker"), ("Job", "index"))
    )
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    with ExitStack() as stack:
        stack.enter_context(running([*scheduler, *local], tmp_path))
        wait_until(lambda: _answers(port))
        stack.enter_context(running([*worker, *local], tmp_path))
        done = subprocess.run(index, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert open_catalog(runs).runs().table.num_rows == 1


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
