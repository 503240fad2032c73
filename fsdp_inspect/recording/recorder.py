"""The public `Recorder`, which attaches to a sharded model and records its run."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from fsdp_inspect.disabled_recorder import describe_unsupported
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.quantities import parse_bytes, parse_profile_steps
from fsdp_inspect.recording.attachment import Attachment, Options
from fsdp_inspect.recording.emulated_network import announced_emulation
from fsdp_inspect.recording.failure import hide_own_frames
from fsdp_inspect.recording.models import as_one_module
from fsdp_inspect.recording.overhead import DEFAULT_OVERHEAD, read_overhead
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.recording.process_life import note_process
from fsdp_inspect.recording.sharding_calls import note_sharding_calls
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.trackers.feed import check_trackers
from fsdp_inspect.store.at_exit import call_at_exit
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from fsdp_inspect.trace.records import MAX_NS
from fsdp_inspect.trace.step_dump import ENVIRONMENT_VARIABLE

DEFAULT_WARMUP_STEPS = 2

note_process()
with contextlib.suppress(Exception):  # the lines of the calls only help to word advice
    note_sharding_calls()  # a script imports the recorder before it shards its model


def check_keywords(options: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that `Recorder` does not have.

    Raises:
        TypeError: The message has the unknown keyword and all legal ones.
    """
    legal = inspect.signature(Recorder).parameters.keys() - {"model", "optimizer"}
    unknown = sorted(options.keys() - legal)
    if unknown:
        raise TypeError(
            f"invalid keyword of the recorder: {unknown[0]!r}. Expected one of "
            f"{', '.join(sorted(legal))}."
        )


class Recorder:
    """Records every unit of a model while it trains: with FSDP2, FSDP1 or DDP.

    Attach it after `fully_shard`, `FullyShardedDataParallel` or `DistributedDataParallel`, and
    after the process group is initialised, on every rank:

        with Recorder(model, optimizer=optimizer, path="runs/llama-1b") as recorder:
            for batch in loader:
                with recorder.step():
                    loss = model(batch).loss
                    loss.backward()
                    optimizer.step(); optimizer.zero_grad()

    Without `recorder.step()` a step ends when the optimizer steps. The training computes the same
    numbers with and without the recorder. It continues if the recorder or its disk fails.

    Several models of one training are one recording: `Recorder([actor, critic],
    optimizer=[actor_optimizer, critic_optimizer])`. The names of their units begin with the name of
    the model.

    Args:
        model: The sharded or wrapped model, or a model that holds such modules. For several models:
            a sequence, with the names of the variables that hold them, or a mapping from names to
            models.
        optimizer: The optimizer to record; its step ends a training step. With several optimizers
            or models, a step ends when each optimizer has stepped. None means any optimizer that
            steps in this process.
        path: The run folder. If it holds an earlier run, the recording goes into a new folder, such
            as `llama-1b-2`, and one line states it. A restart by an elastic agent is a new attempt
            of the same run, and so is a start after a run that did not complete, with the same
            command, configuration and plan. None means `runs/<time>-<name>-<random>`.
        resume: Continue the run in `path` in any case, as a new attempt, if it has the same model
            and world size.
        name: The display name of the run; None means the model's class.
        config: Settings of the script to store with the run; JSON values.
        tags: Words by which to find the run.
        warmup_steps: The number of warm-up steps, which no time uses.
        memory_steps: Steps that run under the storage tracker (about twice as slow, never timed).
            "auto" means the first step after the warm-up, or none under torch.compile.
        numerics_every: In each step whose number is a multiple of this, read outputs, gradients,
            optimizer states and parameters (never timed; the update holds a copy of the shards). 0
            means no step.
        profile_steps: Steps that run under torch's profiler (never timed), as "20:23" for 20, 21
            and 22, or as numbers. `fsdp-inspect show RUN kernels` shows their kernels by unit.
        device_memory: A limit of the memory of the device, as bytes or as `"2GiB"`; None: no limit.
            An allocation above it raises `torch.OutOfMemoryError`, as on a device of that size. On
            CUDA the allocator limits its reserved memory. On CPU every step runs under the storage
            tracker, which limits the bytes of live storages.
        device_interval_s: Seconds between samples of GPU, CPU and host memory; 0 means no samples.
        flush_interval_s: Longest time that rows stay in memory while the disk works; a killed
            process may lose them.
        hang_after_s: Seconds without progress after which every rank writes its stacks and rank 0
            explains the hang on stderr. Nothing is ended. None means 60 s, or 20 steps if longer.
        on_desync: The reaction if ranks issue different collectives, which silently mixes up the
            parameters of units. "warn": every rank prints it on stderr, at most one step or one
            interval of the check later. "raise": the ranks also wait for each other before each
            optimizer step, and a `DesyncError` stops them before a wrong update. "off": nothing is
            compared.
        memory_snapshot: On CUDA, record allocation histories and write a snapshot into the rank's
            folder on an out-of-memory. It costs some time in every allocation.
        overhead: The part of the step time that the recording may take, such as "1%" or 0.01. The
            first 20 timed steps are recorded in detail; later ones as far as the budget allows, in
            blocks spread over the run. In the other steps, units and collectives have no rows;
            the parts of the step, logged values, checks and the detection of hangs stay. None:
            every step in detail.
        upload: A URL of a folder of runs in an object store, such as "s3://bucket/runs"; any URL
            that fsspec can write. A background thread of each rank uploads its new data every 30 s.
            The training continues if the store fails, and `fsdp-inspect store upload` sends the
            rest. None: no upload.
        record_source: Store the lines of the script around its `fully_shard` calls, for which
            `advise` then writes a diff. Secrets in these lines are masked.
        print_verdict: At the end, rank 0 prints the limit of the step on stderr.
        log_to: Trackers to which rank 0 logs the numbers of each step, in the background:
            `"wandb"`, `"mlflow"`, `"tensorboard"`, `"comet"`, `"trackio"`, `"otel"`. An active run
            of wandb, MLflow, Comet or Trackio is used.
        dashboard_url: The address of a dashboard of these runs, to which the trackers link.
        enabled: False makes every method do nothing.

    Raises:
        RecordingError: The model is not sharded or wrapped, or there is no process group.
        ValueError: An argument is invalid; the message has its value and the legal values.
    """

    def __init__(  # noqa: PLR0913 - the one public constructor; keywords read better than a bag
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        path: str | os.PathLike[str] | None = None,
        resume: bool = False,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        memory_steps: Sequence[int] | Literal["auto"] = "auto",
        numerics_every: int = 0,
        profile_steps: str | Sequence[int] = (),
        device_memory: int | str | None = None,
        device_interval_s: float = 0.5,
        flush_interval_s: float = 1.0,
        hang_after_s: float | None = None,
        on_desync: Literal["warn", "raise", "off"] = "warn",
        memory_snapshot: bool = False,
        overhead: str | float | None = DEFAULT_OVERHEAD,
        upload: str | None = None,
        record_source: bool = True,
        print_verdict: bool = True,
        log_to: Sequence[str] = (),
        dashboard_url: str | None = None,
        enabled: bool = True,
    ) -> None:
        self._attachment: Attachment | None = None
        enabled = enabled and ENVIRONMENT_VARIABLE not in os.environ
        self._closed = not enabled
        self._pid = os.getpid()
        if not enabled:
            return
        _check_arguments(warmup_steps, device_interval_s, flush_interval_s)
        _check_numerics(numerics_every)
        _check_watching(hang_after_s, on_desync)
        _check_upload(upload)
        options = Options(
            path=None if path is None else Path(path),
            resume=resume,
            name=name or "",
            config=dict(config or {}),
            tags=list(tags),
            warmup_steps=warmup_steps,
            memory_steps=memory_steps,
            numerics_every=numerics_every,
            profile_steps=parse_profile_steps(profile_steps),
            device_memory=_read_device_memory(device_memory),
            device_interval_s=device_interval_s,
            flush_interval_s=flush_interval_s,
            hang_after_s=hang_after_s,
            on_desync=on_desync,
            memory_snapshot=memory_snapshot,
            overhead=read_overhead(overhead),
            upload=upload,
            record_source=record_source,
            print_verdict=print_verdict,
            log_to=check_trackers(log_to),
            dashboard_url=dashboard_url,
        )
        # The optimizer of a DeepSpeed engine is not a torch optimizer.
        is_single = optimizer is not None and not isinstance(optimizer, Iterable)
        optimizers: Any = [optimizer] if is_single else optimizer
        try:
            self._attachment = Attachment(
                as_one_module(model), None if optimizers is None else list(optimizers), options
            )
        except FsdpInspectError:
            raise
        except Exception as error:  # a name that this version of torch has changed, or a bug
            raise_if_of_signal(error)
            logging.getLogger("fsdp_inspect").debug("not attached", exc_info=error)
            self._closed = True
            warn(describe_unsupported(error))
            return
        emulation = announced_emulation()
        if emulation is not None:
            # Not `self.note`: the emulation must not keep an unclosed recorder alive.
            emulation.send_notes(self._attachment.session.problem)
        self._cancel_at_exit = _close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close(error)

    @property
    def run_folder(self) -> Path | None:
        """The run folder; None if disabled or if no folder could be created."""
        return (
            self._attachment.folder.path if self._attachment and self._attachment.folder else None
        )

    @property
    def is_recording(self) -> bool:
        """Whether events are currently recorded."""
        return bool(self._attachment and not self._closed and self._attachment.session.active)

    @property
    def problems(self) -> list[str]:
        """Data that could not be recorded so far, one sentence each."""
        return list(self._attachment.session.problems) if self._attachment else []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; it contains everything since the end of the previous step."""
        if self._attachment is None or self._closed:
            yield
            return
        with self._attachment.step():
            yield

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Time spent waiting for the next batch; loops over a DataLoader need no such block."""
        if self._attachment is None or self._closed:
            yield
            return
        with self._attachment.span(EventKind.DATA, Phase.DATA):
            yield

    @contextlib.contextmanager
    def between_steps(self, label: str = "") -> Iterator[None]:
        """Mark an evaluation or a checkpoint: it is recorded, and not part of any step's time.

        Forward passes without gradients outside `step()`, and checkpoints that torch saves, are
        recognised without this block.

        Args:
            label: "checkpoint" if the block saves a checkpoint; other text has no effect.
        """
        if self._attachment is None or self._closed:
            yield
            return
        flags = EventFlag.CHECKPOINT if label == "checkpoint" else 0
        with self._attachment.span(EventKind.BETWEEN_STEPS, Phase.EVALUATION, flags):
            yield

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        /,
        **named: float | torch.Tensor,
    ) -> None:
        """Record training metrics at the current step.

        A tensor is copied without waiting for its value, and read a step later.

        Args:
            values: Names and values, such as `{"train/loss": loss}`.
            named: Further ones, such as `loss=loss`.
        """
        if self._attachment is None or self._closed:
            return
        if not isinstance(values, Mapping | None):
            self.note("A value is logged without a name and skipped. Expected log(loss=loss).")
            values = None
        self._attachment.log({**(values or {}), **named})

    def detail(self, steps: int = 5) -> None:
        """Record the next steps in detail whatever the budget; call it on every rank.

        Args:
            steps: The number of steps after the current one.

        Raises:
            ValueError: `steps` is below 1.
        """
        if type(steps) is not int or steps < 1:
            raise ValueError(f"steps must be a number of steps above 0, got {steps!r}.")
        if self._attachment is not None and not self._closed:
            self._attachment.request_detail(steps)

    def note(self, sentence: str) -> None:
        """Store a sentence in the run folder, about a limit of the recording or how to read it."""
        if self._attachment is not None and not self._closed:
            self._attachment.session.problem(sentence)

    def join_forward(self) -> None:
        """Begin step 0 in a training forward that runs already, before the hooks see a call."""
        if self._attachment is not None and not self._closed:
            session = self._attachment.session
            session.enter_forward(session.clock.mark(), grad_enabled=True)

    def detach(self) -> None:
        """Remove every hook and finish the run's files; the model is as before."""
        self._finish(None, show=False)

    def close(self, error: BaseException | None = None) -> None:
        """Detach, and print the verdict on rank 0.

        Args:
            error: The exception that ended the training; None if it ended normally.
        """
        self._finish(error, show=True)

    def _finish(self, error: BaseException | None, *, show: bool) -> None:
        if self._closed or self._attachment is None or os.getpid() != self._pid:
            return  # a forked child leaves the recording to its parent
        self._closed = True
        self._cancel_at_exit()
        try:
            self._attachment.finish(error, show=show)
            if error is not None:
                hide_own_frames(error)
        except Exception as failure:  # an internal error must not reach the training
            logging.getLogger("fsdp_inspect").debug("not finished", exc_info=failure)
            warn(
                f"finishing the recording in {str(self._attachment.folder.path)!r} failed: "
                f"{failure!r}. Flushed rows are kept. Complete the run with: fsdp-inspect "
                f"store compact {shlex.quote(str(self._attachment.folder.path))}"
            )


def _check_arguments(warmup_steps: int, device_interval_s: float, flush_interval_s: float) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}.")
    if device_interval_s < 0:
        raise ValueError(
            f"device_interval_s must be 0 (no samples) or more, got {device_interval_s}."
        )
    if flush_interval_s <= 0:
        raise ValueError(f"flush_interval_s must be above 0, got {flush_interval_s}.")


def _check_numerics(numerics_every: int) -> None:
    if numerics_every < 0:
        raise ValueError(f"numerics_every must be 0 (no step) or more, got {numerics_every}.")


def _read_device_memory(value: int | str | None) -> int | None:
    amount = parse_bytes(value) if isinstance(value, str) else value
    if value is not None and (type(amount) is not int or not 0 < amount <= MAX_NS):
        raise ValueError(
            f"device_memory must be an amount above 0 such as '2GiB' or a number of bytes, got "
            f"{value!r}."
        )
    return amount


def _check_watching(hang_after_s: float | None, on_desync: str) -> None:
    if hang_after_s is not None and hang_after_s <= 0:
        raise ValueError(f"hang_after_s must be above 0, got {hang_after_s}.")
    if on_desync not in ("warn", "raise", "off"):
        raise ValueError(f"on_desync must be 'warn', 'raise' or 'off', got {on_desync!r}.")


def _check_upload(upload: str | None) -> None:
    if upload is not None and "://" not in upload:
        raise ValueError(f"upload must be a URL such as 's3://bucket/runs', got {upload!r}.")


def _close_at_exit(recorder: Recorder) -> Callable[[], None]:
    """Close the recording at exit, without keeping the recorder alive; returns the undo."""
    reference = weakref.ref(recorder)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    return call_at_exit(close)
