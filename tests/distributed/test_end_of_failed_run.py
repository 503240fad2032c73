"""A training that fails ends with its diagnosis on stderr, once for all ranks."""

from pathlib import Path

import pytest

from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed]

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.trace.black_box import BlackBoxError, decode

def all_others_wait():
    "Whether the saved black boxes of all other ranks show that they wait in step 4."
    boxes = []
    for path in Path(sys.argv[1]).glob("*/attempt-000/rank-*/black_box.bin"):
        try:
            header = decode(path.read_bytes()).header
        except BlackBoxError:  # it is being written
            return False
        waits = header.step == 4 and header.num_issued > header.num_finished
        boxes.append(waits and header.rank != 1)
    return sum(boxes) == dist.get_world_size() - 1

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 4 and dist.get_rank() == 1:
        while not all_others_wait():
            time.sleep(0.05)
        raise ValueError("no label")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_an_exception_is_explained_once_with_who_waited(
    run_ranks: Torchrun, script: Path, tmp_path: Path
) -> None:
    recorded = ("-m", "fsdp_inspect.record", "--out", tmp_path / "runs", script, tmp_path / "runs")

    done = run_ranks(*recorded, num_ranks=3, check=False)

    text = " ".join(done.stderr.split())
    assert text.count("fsdp_inspect: Rank") == 1
    line = 1 + SCRIPT.split("\n").index('        raise ValueError("no label")')
    assert (
        f"fsdp_inspect: Rank 1 failed with ValueError at step 4: no label ({tmp_path.name}/"
        f"train.py:{line}). 2 ranks waited for it in the all-gather of 0 in forward."
    ) in text


def test_no_diagnosis_is_printed_where_none_is_wanted(
    run_ranks: Torchrun, script: Path, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "runs", "--no-verdict")
    done = run_ranks("-m", "fsdp_inspect.record", *out, script, tmp_path / "runs", check=False)
    assert done.returncode != 0
    assert "fsdp_inspect: Rank" not in done.stderr
    assert not list((tmp_path / "runs").glob("*/attempt-000/explained"))
