"""The keyword arguments of `Recorder`, typed for callers that pass them on."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RecorderOptions(TypedDict, total=False):
    """See `fsdp_inspect.Recorder`; every key is optional."""

    path: str | os.PathLike[str] | None
    resume: bool
    name: str | None
    config: Mapping[str, Any] | None
    tags: Sequence[str]
    warmup_steps: int
    memory_steps: Sequence[int] | Literal["auto"]
    numerics_every: int
    device_memory: int | str | None
    device_interval_s: float
    flush_interval_s: float
    hang_after_s: float | None
    on_desync: Literal["warn", "raise", "off"]
    memory_snapshot: bool
    log_to: Sequence[str]
    dashboard_url: str | None
    upload: str | None
    record_source: bool
    print_verdict: bool
    enabled: bool
