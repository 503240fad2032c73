"""Make entries of flight recorder dumps for tests."""

from typing import Any

BEGIN_NS = 1_790_000_000_000_000_000
SECOND = 1_000_000_000
FSDP_FRAMES = [
    {"name": "foreach_all_gather", "filename": "/x/site-packages/_fsdp_collectives.py", "line": 1},
    {"name": "pre_forward", "filename": "/x/site-packages/torch/f.py", "line": 2},
    {"name": "train", "filename": "/home/ann/train.py", "line": 40},
]
USER_FRAMES = [
    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 1},
    {"name": "log", "filename": "/home/ann/train.py", "line": 55},
]


def entry(number: int, **fields: Any) -> dict[str, Any]:
    """A collective in the form of NCCL's flight recorder of torch 2.13."""
    return {
        "frames": FSDP_FRAMES,
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": BEGIN_NS + number * SECOND,
        "input_sizes": [[100]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[300]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": BEGIN_NS + number * SECOND + 1,
        "time_discovered_completed_ns": BEGIN_NS + number * SECOND + 2,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **fields,
    }


WAITING = {"state": "started", "time_discovered_completed_ns": None, "retired": False}
