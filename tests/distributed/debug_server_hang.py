"""Hang on rank 1 with torch's debug server, and write its page and what `diagnose` finds."""

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.debug import start_debug_server
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder, debug_handlers


def linger() -> None:
    """The line that `diagnose` must name."""
    Path(f"at-{dist.get_rank()}").touch()
    while not Path("done").exists():
        time.sleep(0.5)
    os._exit(0)


def look(port: int) -> None:
    try:
        write_pages(f"http://localhost:{port}")
    finally:
        Path("done").touch()
        os._exit(0)


def write_pages(address: str) -> None:
    while not Path("at-1").exists() or not is_up(address):
        time.sleep(0.2)
    time.sleep(2)
    with urllib.request.urlopen(f"{address}/fsdp_inspect", timeout=30) as page:
        Path("page.html").write_bytes(page.read())
    with urllib.request.urlopen(f"{address}/", timeout=30) as page:
        Path("index.html").write_bytes(page.read())
    found = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", "diagnose", address],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    Path("diagnosis.txt").write_text(found.stdout + found.stderr)


def is_up(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=30).close()
    except urllib.error.URLError:
        return False
    return True


def main() -> None:
    dist.init_process_group("gloo")
    rank, port = dist.get_rank(), int(sys.argv[1])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with Recorder(model, path="run") as recorder:
        handlers = debug_handlers("run") if rank == 0 else None
        start_debug_server(port=port, handlers=handlers, start_method="spawn")
        if rank == 0:
            threading.Thread(target=look, args=(port,), daemon=True).start()
        for step in range(4):
            with recorder.step():
                if step == 3 and rank == 1:
                    linger()
                model(torch.ones(2, 8)).sum().backward()


if __name__ == "__main__":
    main()
