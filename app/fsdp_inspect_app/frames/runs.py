"""Which runs are there, and what is known about one? As tables."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.values import mib, ms


def frame_runs(runs: Iterable[tuple[RunEntry, RunDigest | None]]) -> pd.DataFrame:
    """The listing: one row a run, those without a digest with their name only."""
    return pd.DataFrame([_run_row(entry, digest) for entry, digest in runs])


def _run_row(entry: RunEntry, digest: RunDigest | None) -> dict[str, Any]:
    manifest = entry.manifest
    times = digest.step_time_ns if digest else None
    return {
        "run": entry.id,
        "status": digest.status if digest else "unreadable",
        "step time (ms)": ms(times.median if times else None),
        "exposed (ms)": ms(digest.exposed_ns if digest else None),
        "overlap": digest.overlap_ratio if digest else None,
        "peak allocated (MiB)": mib(digest.peak_allocated_bytes if digest else None),
        "ranks": manifest.world_size if manifest else None,
        "plan": wording.describe_plan(manifest) if manifest else "",
        "recorded (UTC)": pd.to_datetime(manifest.created_unix_ns) if manifest else pd.NaT,
        "name": manifest.name if manifest else "",
        "tags": ", ".join(manifest.tags) if manifest else "",
    }


def frame_about(manifest: RunManifest, digest: RunDigest) -> pd.DataFrame:
    """What is known about the run as a whole: one row a fact, as text."""
    facts = {
        "run id": digest.run_id,
        "recorded (UTC)": manifest.created,
        "status": digest.status,
        "model": manifest.model.class_name,
        "plan": wording.describe_plan(manifest),
        "mesh": ", ".join(f"{name} {size}" for name, size in manifest.mesh.items()),
        "ranks": f"{digest.num_ranks} recorded of {digest.world_size}",
        "device": manifest.device_name or manifest.device_type,
        "source": manifest.source,
        "git commit": manifest.git_commit or "",
        "tags": ", ".join(manifest.tags),
        **{f"version: {name}": version for name, version in manifest.versions.items()},
        **{f"environment: {name}": value for name, value in manifest.environment.items()},
        **{f"config: {name}": str(value) for name, value in manifest.config.items()},
    }
    rows = [{"fact": fact, "value": value} for fact, value in facts.items() if value]
    return pd.DataFrame(rows)
