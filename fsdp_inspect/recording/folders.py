"""Into which folder does this job record? Rank 0 decides, the others follow.

The decision travels through the process group's key-value store: no collective is added to the
training, and any backend will do. Ranks on a node that does not share rank 0's file system keep
their part in a folder of the same name on their own disk, with a copy of the manifest.
"""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.errors import StoreError
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.store import folder
from fsdp_inspect.trace.run import RunManifest

_recordings = itertools.count()
_MAX_SUFFIX = 1000


class RecordingFolder(NamedTuple):
    """Where this rank writes."""

    path: Path
    attempt: int


def default_path(name: str) -> Path:
    """`runs/<UTC time>-<name>-<random>`: unique, and sorted by time in a listing."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    return Path("runs") / f"{stamp}-{safe}-{uuid4().hex[:4]}"


def agree_on_folder(path: Path, manifest: RunManifest, rank: int) -> RecordingFolder:
    """Create the run on rank 0 and tell every rank its folder and attempt.

    Raises:
        OSError: Rank 0 cannot create the folder.
    """
    key = f"fsdp_inspect/recording/{next(_recordings)}"
    alone = manifest.world_size == 1 or manifest.source == "emulated"
    if rank == 0:
        try:
            chosen = _create(path, manifest)
        except OSError as error:
            if not alone:
                c10d._get_default_store().set(key, json.dumps({"error": str(error)}))
            raise
        if not alone:
            message = {"path": str(chosen.path), "attempt": chosen.attempt}
            c10d._get_default_store().set(key, json.dumps(message))
        return chosen
    answer = json.loads(c10d._get_default_store().get(key))
    if "error" in answer:
        raise OSError(f"rank 0 could not create the run folder: {answer['error']}")
    chosen = RecordingFolder(Path(answer["path"]), answer["attempt"])
    if dist.get_node_local_rank(fallback_rank=rank) == 0:
        folder.write_manifest_if_absent(
            chosen.path, manifest.model_copy(update={"run_id": chosen.path.name})
        )
    return chosen


def _create(path: Path, manifest: RunManifest) -> RecordingFolder:
    """The run folder, or one beside it when it holds a run of another model or world size."""
    for number in range(1, _MAX_SUFFIX):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        named = manifest.model_copy(update={"run_id": candidate.name})
        try:
            attempt = folder.create_run(candidate, named)
        except StoreError as error:
            if number == 1:
                warn(f"{error} Recording beside it.")
            continue
        return RecordingFolder(candidate, attempt)
    raise OSError(f"no free folder name beside {path}")
