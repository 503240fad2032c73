"""Run the tracked script on one rank."""

import os
import socket
import subprocess
import sys


def run_tracked(run, *names, environment=None):
    """Run the script with the trackers to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.studies.trackers.tracked_script", str(run), *names],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **ranks,
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses_of(ended):
    """The lines with the losses, bit by bit."""
    return [line for line in ended.stdout.splitlines() if line.startswith("LOSS")]
