"""Into which folder does this job record? Rank 0 decides, the others follow.

The decision travels through the process group's key-value store: no collective is added to the
training, and any backend will do. It is a name: each rank records into the folder of that name
beside the path that it was given itself, so a node that does not share rank 0's file system, or
that was given another place, keeps its part on its own disk, with a copy of the manifest.
"""

import contextlib
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.errors import StoreError
from fsdp_inspect.recording.environment import find_script_commit
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.store import folder
from fsdp_inspect.store.schema import MANIFEST_FILE
from fsdp_inspect.trace.run import RunManifest

_recordings = itertools.count()
_MAX_SUFFIX = 1000


class RecordingFolder(NamedTuple):
    """Where this rank writes."""

    path: Path
    attempt: int


def default_path(name: str, directory: Path = Path("runs")) -> Path:
    """`<directory>/<UTC time>-<name>-<random>`: unique, and sorted by time in a listing."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    return directory / f"{stamp}-{safe}-{uuid4().hex[:4]}"


def agree_on_folder(path: Path, manifest: RunManifest, rank: int) -> RecordingFolder:
    """Create the run on rank 0 and tell every rank its name and attempt.

    Args:
        path: Where this rank was asked to record; of its last part only rank 0's counts.
        manifest: Written where none is.
        rank: This rank.

    Raises:
        OSError: Rank 0 cannot create the folder; the others go on with its name.
    """
    key = f"fsdp_inspect/recording/{next(_recordings)}"
    alone = manifest.world_size == 1 or manifest.source == "emulated"
    if rank != 0 and not alone:
        return _follow_rank_0(key, path, manifest)
    chosen = RecordingFolder(path, 0)
    try:
        chosen = _create(path, manifest)
    finally:
        if not alone:
            message = {"name": chosen.path.name, "attempt": chosen.attempt}
            c10d._get_default_store().set(key, json.dumps(message))
    return chosen


def _follow_rank_0(key: str, path: Path, manifest: RunManifest) -> RecordingFolder:
    try:
        answer = json.loads(c10d._get_default_store().get(key))
    except RuntimeError as error:  # DistStoreError: its time is over, or rank 0 is gone
        warn(f"rank 0 named no run folder ({error}). This rank records into {str(path)!r}.")
        return RecordingFolder(path, 0)
    chosen = path.with_name(answer["name"])
    with contextlib.suppress(OSError):  # the writer meets the same disk and says so
        if not (chosen / MANIFEST_FILE).exists():  # rank 0 does not share this disk
            known = {"run_id": chosen.name, "git_commit": find_script_commit()}
            folder.write_manifest_if_absent(chosen, manifest.model_copy(update=known))
    return RecordingFolder(chosen, answer["attempt"])


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
