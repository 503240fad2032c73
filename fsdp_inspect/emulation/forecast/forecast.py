"""Forecast the memory of rank 0 of N without a GPU, and write it as a predicted run.

The run folder has `source` predicted and contains only memory. `fsdp-inspect show RUN memory`,
`check`, `compare` and the dashboard read it like a recorded run.

The forecast counts every storage of the step, byte by byte, on fake tensors. The run's notes list
what it does not count: the caching allocator's rounding and fragmentation, the CUDA context, the
workspaces of cuBLAS and NCCL, and kernels that save other tensors on CUDA than on CPU. It also
stores the allocation history, from which `analysis.memory.reserved` predicts reserved memory.
"""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp_inspect.emulation.forecast.compiled_regions import (
    COMPILED,
    NOT_COMPILED,
    find_compiler_error,
)
from fsdp_inspect.emulation.forecast.fake_rank import fake_rank
from fsdp_inspect.emulation.forecast.fake_values import ValuelessTensors, describe_user_line
from fsdp_inspect.emulation.forecast.target import (
    Builder,
    ForecastTarget,
    build_target,
    default_settings,
)
from fsdp_inspect.emulation.forecast.tracked_step import (
    TRACKED_STEP,
    TrackedStep,
    other_sharder,
    track_step,
)
from fsdp_inspect.errors import ForecastError, FsdpInspectError, StoreError
from fsdp_inspect.recording.environment import describe_environment, read_clock_pair
from fsdp_inspect.recording.memory_steps import is_compiled
from fsdp_inspect.recording.torch_api.attributes import replace_everywhere
from fsdp_inspect.recording.torch_api.autograd import num_compiled_graphs
from fsdp_inspect.recording.torch_api.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import create_run, read_manifest
from fsdp_inspect.store.schema import ALLOCATIONS_FILE, LIVE_MEMORY_FILE
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.allocations import to_record
from fsdp_inspect.trace.live_memory import LiveMemoryRecord
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunStatus

_DDP = inspect.getfile(torch.nn.parallel.DistributedDataParallel)
_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
DEFAULT_GPUS_PER_NODE = 8
NOTES = (
    "Predicted on fake tensors. The forecast counts every storage of one step of rank 0, to the "
    "byte. It predicts no times.",
    "Not in the peak: rounding and fragmentation of CUDA's caching allocator, the CUDA context, "
    "workspaces of cuBLAS and NCCL, and tensors that only CUDA kernels save, except those of "
    "attention, RMSNorm and dropout.",
)


def forecast_memory(  # noqa: PLR0913 - the settings of one forecast
    builder: Builder,
    path: str | Path,
    *,
    world_size: int,
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE,
    device_type: Literal["cuda", "cpu"] = "cuda",
    settings: Mapping[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Predict the memory of a training step on rank 0 of N ranks.

    Args:
        builder: Builds the model, optimizer and step; see `ForecastTarget`. It runs under a fake
            mode, so its tensors use no memory.
        path: The run folder to write; it must not exist.
        world_size: Ranks of the job.
        gpus_per_node: Ranks on one node.
        device_type: The device for which to choose kernels, where they save different tensors.
        settings: Keyword arguments of the builder.
        report: Receives what runs now, in a few words; a large model takes half a minute.

    Returns:
        The run folder. `open_run(path)` reads it.

    Raises:
        ForecastError: The builder or its step fails, or the step cannot be tracked.
        RecordingError: The model is not sharded with `fully_shard`.
        EmulationError: This process already has a process group.
        StoreError: The folder already exists or cannot be written.
    """
    given, path, say = dict(settings or {}), Path(path), report or _say_nothing
    _check_free(path)

    def follow(*, compiles: bool) -> tuple[ForecastTarget, TrackedStep, list[str]]:
        notes: list[str] = []
        with fake_rank(
            world_size, gpus_per_node=gpus_per_node, device_type=device_type, compiles=compiles
        ) as tensors:
            found = _follow(
                builder, given, tensors, has_host=device_type != "cpu", notes=notes, report=say
            )
            notes.extend(_say_what_was_asked(tensors))
            return *found, notes

    try:
        before = num_compiled_graphs()
        target, tracked, notes = follow(compiles=True)
        if is_compiled(target.model):
            has_run = num_compiled_graphs() > before
            notes.append(COMPILED if has_run else NOT_COMPILED.format("it compiled no region"))
    except ForecastError as error:
        failed = find_compiler_error(error)
        if failed is None:
            raise
        target, tracked, notes = follow(compiles=False)
        notes.append(NOT_COMPILED.format(_first_line(failed)))
    config = {**default_settings(builder), **given, **target.config}
    name = target.name or tracked.model.class_name
    manifest = _describe(
        path, tracked, name, config, world_size=world_size, device_type=device_type
    )
    manifest.notes.extend(notes)
    _write(path, manifest, tracked)
    return path


def _say_nothing(text: str) -> None:
    """Drop a report."""


def _check_free(path: Path) -> None:
    if path.exists():
        raise StoreError(
            f"{str(path)!r} already exists. Expected a new folder for the forecast. Choose another "
            "path, or remove it."
        )


def _follow(
    builder: Builder,
    settings: Mapping[str, Any],
    tensors: ValuelessTensors,
    *,
    has_host: bool,
    notes: list[str],
    report: Callable[[str], None],
) -> tuple[ForecastTarget, TrackedStep]:
    try:
        report("building the model")
        target = build_target(builder, settings)
        with ExitStack() as undo:
            mask_as_in_training(undo, tensors, notes)  # the builder may have imported Transformers
            return target, track_step(target, has_host=has_host, report=report)
    except (FsdpInspectError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the builder may exit, or end a test
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename == _DDP for frame in frames):  # it reads the values of other ranks
            raise other_sharder("The builder uses DistributedDataParallel (DDP)") from error
        expected = (
            "Expected a step in which no shape depends on the values of a tensor. Remove such "
            "lines from the builder's step."
            if isinstance(error, _DEPENDS_ON_VALUES)
            else "Expected a model that is built and a step that runs, as in training. Correct the "
            "builder, or remove from its step what fails only on fake tensors."
        )
        raise ForecastError(
            f"Building the model or running its step on fake tensors failed: {_say(error)} (at "
            f"{describe_user_line(frames)}). {expected}"
        ) from error


def _say_what_was_asked(tensors: ValuelessTensors) -> Iterator[str]:
    if tensors.num_asked:
        times = "once" if tensors.num_asked == 1 else f"{tensors.num_asked} times"
        yield (
            f"The value of a fake tensor was read {times} (first at {tensors.first_asked}). Fake "
            "tensors have no values, so the read returned 0. If that value decides a size or which "
            "code runs, the forecast is wrong."
        )


def _first_line(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", error)  # torch's compiler wraps the actual reason
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"


def _say(error: BaseException) -> str:
    """An error and its cause, which may contain the actual reason."""
    said = f"{type(error).__name__}: {error}"
    return said if error.__cause__ is None else f"{said}, because of {_say(error.__cause__)}"


def _describe(
    path: Path,
    tracked: TrackedStep,
    name: str,
    config: Mapping[str, Any],
    *,
    world_size: int,
    device_type: str,
) -> RunManifest:
    now = time.time_ns()
    described = describe_environment("cpu")
    return RunManifest(
        run_id=path.name,
        name=name,
        created=datetime.fromtimestamp(now / 1e9, UTC).isoformat(timespec="seconds"),
        created_unix_ns=now,
        command=described.command,
        config=dict(config),
        plan=tracked.plan,
        observed=tracked.observed,
        model=tracked.model,
        units=tracked.units,
        operations=list(tracked.operations),
        host_memory=tracked.host_memory,
        process_groups=tracked.process_groups,
        world_size=world_size,
        mesh=tracked.mesh,
        backend="fake",
        device_type=device_type,
        device_name="fake tensors",
        source="predicted",
        warmup_steps=TRACKED_STEP,
        memory_steps=[TRACKED_STEP],
        versions={"python": described.versions["python"], "torch": torch.__version__},
        notes=[*NOTES, *tracked.notes],
    )


def _write(path: Path, manifest: RunManifest, tracked: TrackedStep) -> None:
    attempt = create_run(path, manifest)
    clock = read_clock_pair()
    record = RankRecord(
        rank=0,
        world_size=manifest.world_size,
        attempt=attempt,
        device="fake",
        clock_start=clock,
        clock_end=clock,
        num_steps=TRACKED_STEP + 1,
        memory_from="storage_tracker",
    )
    writer = RankWriter(path, record.of_run(read_manifest(path)))
    writer.memory.extend(tracked.rows)
    live = LiveMemoryRecord(
        run_id=manifest.run_id,
        rank=0,
        attempt=attempt,
        moments=list(tracked.moments),
        history=tracked.live_history,
    )
    writer.write_record(LIVE_MEMORY_FILE, live)
    if tracked.history is not None:
        record_of_history = to_record(
            tracked.history, run_id=manifest.run_id, rank=0, attempt=attempt
        )
        writer.write_record(ALLOCATIONS_FILE, record_of_history)
    writer.close(RunStatus.COMPLETE)
    compact_run(path)


# --- Make Transformers build the attention masks of a training on fake tensors.
#
# With SDPA, Transformers leaves out a mask that hides nothing: a padding mask of ones, and packed
# sequences of which each row has only one. It does not look at the values of fake tensors, so the
# mask would stay, take memory and exclude flash attention.

NOTE = (
    "Each row of a batch is assumed to be one sequence. If the training packs several sequences "
    "into a row, its attention masks need more memory."
)


def mask_as_in_training(undo: ExitStack, tensors: ValuelessTensors, notes: list[str]) -> None:
    """Let Transformers leave out masks that hide nothing, until `undo` is closed.

    Args:
        undo: Restores the functions of Transformers.
        tensors: The mode of the fake tensors.
        notes: Receives `NOTE` when the model depends on the assumption.
    """
    masks, imports = map(
        sys.modules.get, ("transformers.masking_utils", "transformers.utils.import_utils")
    )
    find_packed = getattr(masks, "find_packed_sequence_indices", None)
    is_fake = getattr(imports, "is_fake_tensor", None)
    if find_packed is None or is_fake is None:  # Transformers is not loaded, or has another version
        return

    def find_none(position_ids: Any) -> Any:
        if not isinstance(position_ids, FakeTensor):
            return find_packed(position_ids)
        if NOTE not in notes:
            notes.append(NOTE)
        return None

    def is_unknown(tensor: Any) -> bool:
        return isinstance(tensor, FakeTensor) and tensors.values.find(tensor) is None

    replace_everywhere(undo, {find_packed: find_none, is_fake: is_unknown})
