"""Build the parts of an attached recorder, and start and end them together."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect.errors import DesyncError, RecordingError
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.clocks import Clock, CudaClock, HostClock, TorchCudaBackend
from fsdp_inspect.recording.coverage_watch import CoverageWatch
from fsdp_inspect.recording.devices import DeviceSampler
from fsdp_inspect.recording.emulated_network import announced_emulation
from fsdp_inspect.recording.environment import (
    describe_environment,
    describe_launch,
    describe_recomputation,
    find_script_commit,
    observe_settings,
    read_clock_pair,
)
from fsdp_inspect.recording.failure import (
    MemoryHistory,
    describe_allocated,
    describe_failure,
    find_communication_error,
    find_failing_line,
    is_out_of_memory,
    keep_snapshot,
)
from fsdp_inspect.recording.folders import (
    RecordingFolder,
    agree_on_folder,
    default_path,
    this_launch,
)
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.loop_hooks import OptimizerRound
from fsdp_inspect.recording.memory import CudaAllocator, MemoryProbe
from fsdp_inspect.recording.memory_steps import MemorySteps, is_compiled
from fsdp_inspect.recording.models import Models
from fsdp_inspect.recording.numerics_steps import NumericsSteps
from fsdp_inspect.recording.out_of_memory import (
    CudaLimit,
    Surroundings,
    find_limit_failure,
    make_record,
)
from fsdp_inspect.recording.overhead import FIRST_DETAILED, OverheadControl
from fsdp_inspect.recording.parameter_samples import ParameterSamples, ShardPlace, places_of
from fsdp_inspect.recording.patches import describe_internal, warn
from fsdp_inspect.recording.process_life import describe_process, num_compiles
from fsdp_inspect.recording.profile_steps import ProfileSteps
from fsdp_inspect.recording.scalars import ScalarLog
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.sharding_calls import read_noted_calls
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.stale_watch import StaleWatch
from fsdp_inspect.recording.surveillance import Surveillance
from fsdp_inspect.recording.torch_api.autograd import recomputation_hook
from fsdp_inspect.recording.torch_api.overrides import call_unseen, unseen
from fsdp_inspect.recording.torch_api.process_groups import StoreClient
from fsdp_inspect.recording.trackers.feed import TrackerFeed, page_of
from fsdp_inspect.recording.trackers.libraries import TrackedRun
from fsdp_inspect.recording.training_checks import TrainingChecks, Watches
from fsdp_inspect.recording.units import (
    ProcessGroups,
    describe_model,
    mark_recorded,
    mark_released,
    refuse_recorded_units,
)
from fsdp_inspect.recording.value_watch import ValueWatch
from fsdp_inspect.recording.verdict import close_run, close_run_in_background, tell_place
from fsdp_inspect.recording.watchdog import WatchSettings, tell
from fsdp_inspect.store import folder
from fsdp_inspect.store.background_upload import FINISH_TIMEOUT_S, BackgroundUpload
from fsdp_inspect.store.reduction.out_of_memory_wording import describe_out_of_memory
from fsdp_inspect.store.schema import (
    LIVE_MEMORY_FILE,
    MANIFEST_FILE,
    OUT_OF_MEMORY_FILE,
    PLAN_FILE,
    attempt_name,
    rank_name,
)
from fsdp_inspect.store.upload import UploadTarget, upload_of_rank, upload_of_run
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.codes import EventKind, MemoryPoint, Phase, Source
from fsdp_inspect.trace.live_memory import LiveHistory, LiveMemoryRecord, LiveMoment
from fsdp_inspect.trace.mesh_dimensions import find_coordinates
from fsdp_inspect.trace.run import GroupDimension, RankRecord, RunManifest, RunStatus, TrainingCode

_USE_EVERY = 50
"""The steps between two notes of what the recorder used, for a process that is killed."""
_SETTLE_S = 10.0
"""The time that the end of a recording waits for pending work on the device."""
_LAST_WRITE_S = 0.1
"""The time of the last write after a failure, also if the other waits took all of theirs."""
_FAILED_END_S = 0.3
"""The time that all waits at the end of a recording take together if an exception ends the
training. A launcher soon ends all ranks, and a rank that is late loses its traceback. After a
desync or the crash of another rank, a collective may never complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The validated arguments of `Recorder`."""

    path: Path | None
    resume: bool
    name: str
    config: dict[str, Any]
    tags: list[str]
    warmup_steps: int
    memory_steps: Sequence[int] | Literal["auto"]
    numerics_every: int
    profile_steps: tuple[int, ...]
    device_memory: int | None
    device_interval_s: float
    flush_interval_s: float
    memory_snapshot: bool
    overhead: float | None
    upload: str | None
    record_source: bool
    print_verdict: bool
    hang_after_s: float | None
    on_desync: Literal["warn", "raise", "off"]
    log_to: Sequence[str]
    dashboard_url: str | None


class Attachment:
    """A recording in progress: hooks on a model, a writer, a sampler."""

    _cuda_limit: CudaLimit | None = None
    _trackers: TrackerFeed | None = None
    _values: ValueWatch | None = None
    _control: OverheadControl | None = None
    _noted = (0, 0)
    """The number of compilations and standstills in the record."""
    _reported_problems = 0
    _is_finished = False

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        options: Options,
    ) -> None:
        try:
            self._attach(model, optimizers, options)
        except BaseException:
            self._abandon()
            raise

    @unseen
    def _attach(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        options: Options,
    ) -> None:
        if not dist.is_initialized():
            raise RecordingError(
                "No process group is initialized. The recorder requires torch.distributed. Call "
                "torch.distributed.init_process_group() first, then attach the recorder."
            )
        self._sharder = find_sharder(model)
        optimizers = self._sharder.optimizers(optimizers)
        refuse_recorded_units(model, self._sharder.units)
        self._device = self._sharder.device
        self._options = options
        self._model = model
        self._rank = dist.get_rank()
        self._emulation = announced_emulation()
        self._refuse_emulation()
        self._process_groups = self._number_groups()
        self._manifest = self._first_manifest()
        self.folder = self._make_folder()
        self._writer = RankWriter(
            self.folder.path, self._rank_record(), flush_interval_s=options.flush_interval_s
        )
        self._upload = self._start_upload()
        self.session = self._make_session()
        self._problem_lock = threading.Lock()
        self._scalars = ScalarLog(
            self.session.clock,
            self._writer.scalars.append,
            self.session.problem,
            lambda: self._request_numerics(),
        )
        self._counters = CudaAllocator(self._device) if self._device.type == "cuda" else None
        self._memory = MemoryProbe(self.session, self._writer.memory.append, self._counters)
        self._memory_steps = MemorySteps(
            self.session,
            self._writer.memory.append,
            model,
            self._sharder.units,
            options.memory_steps,
            device_type=self._device.type,
            limit_bytes=None if self._device.type == "cuda" else options.device_memory,
            keep=self._keep_live_memory,
            shared_buffers=self._sharder.shared_buffers,
        )
        self._memory_steps.plan(options.warmup_steps)
        self._numerics, self._profile = self._choose_steps()
        self._sampler = self._start_sampler()
        self._history = self._start_history()
        self._surveillance = self._watch()
        self.session.checks = self._make_checks()
        self._instruments = Instruments(
            self.session,
            self._sharder,
            self._memory,
            optimizers,
            self._optimizer_stepped,
            None if self._surveillance is None else self._surveillance.before_update,
        )
        # A single model without named optimizers: the first optimizer after a forward ends a step.
        has_rounds = isinstance(model, Models) or len(optimizers or ()) > 1
        self._round = OptimizerRound(optimizers, self.session.problem) if has_rounds else None
        self._instruments.attach()
        mark_recorded(self._sharder.units, self.folder.path)
        self._settle_units()
        self._guarded(self._numerics.begin)
        self._write_manifest()
        self._writer.flush()
        if self._surveillance is not None:
            self._surveillance.start()
        self._guarded(self._begin_options)

    def _abandon(self) -> None:
        """Undo an attachment that failed, as far as it went; the model is as before."""
        undo: list[Callable[[], object]] = [
            lambda: self.session.stop(),
            lambda: self._instruments.abandon(),
            lambda: self._memory_steps.close(),
            lambda: self._profile.abandon(),
            lambda: self._surveillance.stop(0.0, has_failed=False),  # type: ignore[union-attr]
            lambda: self._surveillance.close(),  # type: ignore[union-attr]
            lambda: self._sampler.stop(0.0),  # type: ignore[union-attr]
            lambda: self._history.stop(),
            lambda: mark_released(self._sharder.units),
            lambda: self._writer.close(RunStatus.FAILED, "attaching failed", compact=False),
        ]
        for each in undo:
            with contextlib.suppress(Exception):  # a part that was not made
                each()

    # --- starting

    def _refuse_emulation(self) -> None:
        if self._emulation is not None and not self._sharder.supports_emulation:
            raise RecordingError(
                f"An emulated network requires FSDP2, and the model uses {self._sharder.title}: "
                "its collectives would not wait. Record it without the emulation."
            )

    def _choose_steps(self) -> tuple[NumericsSteps, ProfileSteps]:
        every = self._numerics_every()
        steps = self._options.profile_steps if self._emulation is None else ()
        return (
            NumericsSteps(self.session, self._writer, every, self._sharder.units),
            ProfileSteps(self.session, steps, self._device, self._writer.folder),
        )

    def _numerics_every(self) -> int:
        every = self._options.numerics_every if self._emulation is None else 0
        if every and not self._sharder.has_numerics:
            why = "its optimizer updates flat partitions, not the parameters of the units"
            if not self._sharder.units:
                why = "its units are not recorded"
            self.session.problem(f"Numerics are not recorded with {self._sharder.title}: {why}.")
            return 0
        return every

    def _number_groups(self) -> ProcessGroups:
        """Number the process groups of the units, then those of the other mesh dimensions."""
        groups = ProcessGroups()
        self._sharder.register_groups(groups)
        groups.name_dimensions(self._sharder.meshes())
        return groups

    def _first_manifest(self) -> RunManifest:
        options, backend = self._options, dist.get_backend()
        model = describe_model(self._model, self._sharder.units)
        name = options.name or model.class_name
        now = time.time_ns()
        path = options.path or default_path(name)
        described = describe_environment(self._device.type)
        return RunManifest(
            run_id=path.name,
            name=name,
            created=datetime.fromtimestamp(now / 1e9, UTC).isoformat(timespec="seconds"),
            created_unix_ns=now,
            command=described.command,
            config=_json_values(options.config),
            model=model,
            sharder=self._sharder.name,
            units=self._sharder.describe_units(self._process_groups),
            process_groups=self._process_groups.describe(),
            world_size=dist.get_world_size(),
            mesh=self._sharder.mesh(),
            backend=backend,
            device_type=self._device.type,
            device_name=described.device_name,
            source="emulated" if backend == "fake" else "recorded",
            emulation={} if self._emulation is None else self._emulation.describe(),
            warmup_steps=options.warmup_steps,
            versions=described.versions,
            environment=described.environment,
            git_commit=find_script_commit() if self._rank == 0 else None,
            code=self._training_code() if self._rank == 0 else TrainingCode(),
            tags=options.tags,
        )

    def _training_code(self) -> TrainingCode:
        """The calls that sharded the model and the launch; empty if reading them fails."""
        try:
            noted = read_noted_calls(self._model, with_source=self._options.record_source)
            launch, launched_at = describe_launch()
        except Exception:  # the code only helps to word advice
            return TrainingCode()
        return TrainingCode(
            calls=noted.calls,
            sources=noted.sources,
            frameworks=noted.frameworks,
            settings=noted.settings,
            launch=launch,
            launched_at=launched_at,
        )

    def _make_folder(self) -> RecordingFolder:
        # Use an absolute path, because the script may change its working directory.
        path = (self._options.path or default_path(self._manifest.name)).absolute()
        try:
            peers, resume = self._process_groups.members(), self._options.resume
            return agree_on_folder(path, self._manifest, self._rank, peers=peers, resume=resume)
        except OSError:  # the writer gets the same error, reports it once and retries
            return RecordingFolder(path, 0)

    def _rank_record(self) -> RankRecord:
        cuda = self._device.type == "cuda"
        sizes = [self._options.device_memory] if self._options.device_memory else []
        if cuda:
            sizes.append(torch.cuda.get_device_properties(self._device).total_memory)
        return RankRecord(
            rank=self._rank,
            world_size=dist.get_world_size(),
            attempt=self.folder.attempt,
            run_id=self.folder.path.name if self.folder.created_unix_ns else "",
            run_created_unix_ns=self.folder.created_unix_ns,
            launch=this_launch(),
            local_rank=dist.get_node_local_rank(fallback_rank=self._rank),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(self._device),
            device_memory_bytes=min(sizes, default=None),
            clock="cuda_event" if cuda else "host",
            clock_start=read_clock_pair(),
            life=describe_process(),
            flush_interval_s=self._options.flush_interval_s,
            memory_from="cuda_allocator" if cuda else "storage_tracker",
            **self._describe_groups(),
        )

    def _describe_groups(self) -> dict[str, Any]:
        """The dimensions of the rank's process groups, and its position along each of them."""
        groups = self._process_groups.describe()
        return {
            "group_dimensions": [
                GroupDimension(
                    dimension=group.dimension,
                    parallelism=group.parallelism,
                    parallelism_from=group.parallelism_from,
                )
                for group in groups
            ],
            "coordinates": find_coordinates(groups, self._rank, self._manifest.world_size),
        }

    def _limit_memory(self) -> None:
        """Apply the requested limit; on CPU, follow storages from now on."""
        limit_bytes = self._options.device_memory
        if limit_bytes is None:
            return
        if self._device.type == "cuda":
            self._cuda_limit = CudaLimit(self._device, limit_bytes)
            problem = self._cuda_limit.start()
            if problem is not None:
                self.session.problem(problem)
            return
        self.session.problem(
            "The memory is limited on CPU: every step runs under the storage tracker, which takes "
            "time. Compare times with runs that have a limit too."
        )
        if is_compiled(self._model):
            self.session.problem(
                "Storages inside torch.compile's regions are not visible: the limit excludes them."
            )
        self._memory_steps.begin()

    def _begin_options(self) -> None:
        self._limit_memory()
        self._start_trackers()

    def _start_trackers(self) -> None:
        """Log to trackers, on rank 0."""
        if self._rank != 0 or not self._options.log_to:
            return
        run_id = self.folder.path.name
        run = TrackedRun(run_id, self.folder.path, page_of(self._options.dashboard_url, run_id))
        try:
            self._trackers = TrackerFeed(self._options.log_to, run, self._report_tracker)
        except OSError as error:
            self._report_tracker(f"The trackers could not be started: {error}.")

    def _report_tracker(self, sentence: str) -> None:
        warn(sentence)
        self.session.problem(sentence)

    def _make_checks(self) -> TrainingChecks | None:
        """Observe the training itself; None under emulation, whose values are meaningless."""
        if self._emulation is not None:
            return None
        units = self._sharder.describe_units(self._process_groups)
        shapes = [tuple(shape) for unit in units for shape in unit.parameters.values()]
        session, model = self.session, self._model
        self._values = ValueWatch(
            session, model, self._sharder.units, self._late, self._request_numerics
        )
        samples = ParameterSamples(session, model, self._late, self._places)
        coverage = CoverageWatch(model, self._sharder.units, session.graph_units)
        updates_parameters = self._sharder.has_numerics
        watches = Watches(
            self._values,
            samples if updates_parameters else None,
            coverage if updates_parameters else None,
            StaleWatch(self._sharder.units, self._late),
        )
        return TrainingChecks(session, model, shapes, self._report_wrong_training, watches)

    def _request_numerics(self) -> None:
        if self._sharder.has_numerics and self._emulation is None:
            self._numerics.request()

    def _places(self) -> dict[int, ShardPlace]:
        units = self._sharder.describe_units(self._process_groups)
        ranks_of = {group.index: group.ranks for group in self._process_groups.describe()}
        return places_of(units, self._sharder.units, ranks_of, self._rank)

    def _drain_checks(self, timeout_s: float | None = None) -> None:
        """Take the values that have arrived for the checks; wait at the end of the recording."""
        try:
            if timeout_s is not None and self.session.checks is not None:
                self.session.checks.look_again()
            self._late.drain() if timeout_s is None else self._late.close(timeout_s)
        except Exception as error:
            raise_if_of_signal(error)
            self.session.checks = self._values = None
            self.session.problem(f"The training is not checked: {describe_internal(error)}.")

    def _keep_training(self) -> None:
        """Keep what was observed in this step."""
        checks = self.session.checks
        observed = None if checks is None else checks.take_news()
        if observed is not None:
            self._writer.update(training=observed)

    def _report_wrong_training(self, sentence: str) -> None:
        if self._rank == 0:
            tell(sentence, self._rank)

    def _make_clock(self) -> Clock:
        if self._device.type == "cuda":
            return CudaClock(TorchCudaBackend(self._device))
        return HostClock()

    def _make_session(self) -> Session:
        clock = self._make_clock()
        self._late = LateValues(clock)
        emulated = self._manifest.source == "emulated"
        return Session(
            clock,
            self._writer.events.append,
            self._process_groups,
            Source.EMULATED if emulated else Source.RECORDED,
            self._emulation,
            None if emulated else BlackBoxWriter(clock.host_now),
        )

    def _make_control(self) -> OverheadControl | None:
        """Choose the detailed steps; None: all of them. Emulated times do not contain a cost."""
        budget = self._options.overhead
        if budget is None or self._emulation is not None:
            return None
        num_first = max(self._options.warmup_steps, *self._memory_steps.steps, 0)
        control = OverheadControl(
            self.session,
            budget,
            rank=self._rank,
            world_size=self._manifest.world_size,
            num_first=num_first + 1 + FIRST_DETAILED,
            folder=self.folder.path,
        )
        control.profile = lambda first, last: self._profile.add(first, last)
        return control

    def _exchange(self, store: StoreClient | None, prefix: str) -> None:
        if self._control is not None:
            self._control.tick(store, prefix)

    def request_detail(self, steps: int) -> None:
        """Record the next steps of this rank in detail; see `Recorder.detail`."""
        if self._control is not None:
            first = self.session.step + 1
            self._control.schedule.add_window(first, first + steps - 1)

    def _watch(self) -> Surveillance | None:
        """Watch for hangs and desyncs; None under emulation, which has no other ranks."""
        if self.session.black_box is None:
            return None
        self._control = self._make_control()
        settings = WatchSettings(
            rank=self._rank,
            world_size=dist.get_world_size(),
            run_folder=self.folder.path,
            hang_after_s=self._options.hang_after_s,
            on_desync=self._options.on_desync,
            with_source=self._options.record_source,
            unit_names=lambda: [unit.fqn for unit in self._manifest.units],
            report_problems=self._report_problems,
            exchange=self._exchange,
            explains_end=self._options.print_verdict,
        )
        return Surveillance(
            self.session, self.session.black_box, self._writer, self.folder.key, settings
        )

    def _start_upload(self) -> BackgroundUpload | None:
        """Start the upload of this rank's folder, and on rank 0 of the run's own files."""
        if self._options.upload is None:
            return None
        path = self.folder.path
        url = f"{self._options.upload.rstrip('/')}/{self.folder.remote_name}"
        target = UploadTarget(url)
        name = f"{attempt_name(self.folder.attempt)}/{rank_name(self._rank)}"
        uploads = [upload_of_rank(path, target, name, lambda: self._writer.stream_sizes)]
        if self._rank == 0:
            uploads.insert(0, upload_of_run(path, target))
        return BackgroundUpload(path, url, uploads, rank=self._rank)

    def _start_history(self) -> MemoryHistory:
        history = MemoryHistory()
        if self._options.memory_snapshot and self._device.type == "cuda":
            try:
                history.start()
            except RuntimeError as error:  # the allocator keeps no history: cudaMallocAsync
                reason = " ".join(str(error).split())[:200]
                self.session.problem(
                    f"There will be no memory snapshot: this CUDA allocator records no history "
                    f"({reason}). Expected PYTORCH_ALLOC_CONF without backend:cudaMallocAsync."
                )
        return history

    def _start_sampler(self) -> DeviceSampler | None:
        interval_s = self._options.device_interval_s
        if interval_s == 0:
            return None
        sampler = DeviceSampler(
            self._writer.devices.append,
            interval_s=interval_s,
            cuda_index=self._device.index if self._device.type == "cuda" else None,
        )
        sampler.start()
        return sampler

    # --- during the training

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The body of one optimizer step."""
        session = self.session
        if session.in_step:
            session.problem("recorder.step() was entered inside another step(); it was ignored.")
            yield
            return
        session.explicit_steps = session.in_step = True
        self._guarded(session.open_step)
        self._guarded(self._begin_step)
        try:
            yield
        except BaseException:
            session.in_step = False
            if not self._is_finished:
                self._memory_steps.abandon()
                self._numerics.abandon()
                self._profile.abandon()
            raise
        session.in_step = False
        self._guarded(self._end_step)

    @contextlib.contextmanager
    def span(self, kind: EventKind, phase: Phase, flags: int = 0) -> Iterator[None]:
        """Time a part of the training loop that the script marks; `flags` if it succeeds."""
        session = self.session
        if not session.active:
            yield
            return
        outer, session.phase = session.phase, phase
        session.open_step()
        start, given = session.clock.mark(), 0
        try:
            yield
            given = flags
        finally:
            session.phase = outer
            if session.active:
                self._guarded(
                    lambda: session.add(kind, start, session.clock.mark(), phase=phase, flags=given)
                )

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Record training metrics at the current step."""
        self._guarded(lambda: self._log(values))

    def _log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        if self._emulation is not None:
            self.session.problem(
                "Values logged by the script (such as the loss) are ignored: under emulation the "
                "other ranks do not exist, so these values are meaningless."
            )
            return
        if self._scalars.log(self.session.logged_step, values):
            self._writer.update(scalar_names=self._scalars.names)

    @unseen
    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._memory_steps.name_optimizer_states(optimizer)
        self._memory.sample(MemoryPoint.OPTIMIZER_END)
        if self.session.ends_with_optimizer and (
            self._round is None or self._round.is_complete(optimizer)
        ):
            self._end_step()
            self._begin_step()

    def _begin_step(self) -> None:
        self._memory_steps.begin()
        self._numerics.begin()
        self._profile.begin()
        if self._values is not None:
            self._values.begin_step()
        if self._control is not None:
            session = self.session
            watched = (session.tracker, session.numerics)
            needs_detail = session.is_memory_step or any(each is not None for each in watched)
            is_detailed = self._control.choose(session.step, needs_detail=needs_detail)
            if is_detailed != session.detail:
                self._instruments.choose_detail(is_detailed)

    def _end_step(self) -> None:
        session = self.session
        counts = not (session.is_memory_step or session.numerics is not None)
        self._memory.sample(MemoryPoint.STEP_END)
        self._memory_steps.end()
        self._numerics.end()
        self._profile.end()
        if self._values is not None:
            self._values.end_step()
        if self._round is not None and self._round.has_grown:
            self._round.has_grown = False
            self._memory_steps.repeat()
        start = session.step_start
        session.end_step()
        if session.checks is not None:
            session.checks.note_end_of_step()
        if self._control is not None and start is not None:
            counts = not session.take_interruption() and counts
            self._control.note_step(session.step - 1, start, session.step_start, counts=counts)
        self._memory.begin_step()
        if outputs := self._memory.take_outputs():
            self._writer.update(output_bytes=outputs)
        self._instruments.end_step()
        is_timed = session.step > self._options.warmup_steps and session.detail
        self._instruments.stops.end_step(counts=counts and is_timed)
        self._scalars.drain()
        self._drain_checks()
        is_new = session.inputs != self._settled_inputs
        if session.step == 1 or is_new or self._sharder.num_changes != self._num_settled:
            self._settle_units()
            self._write_manifest()
            unused = self._manifest.observed.get("unused_parameters", "")
            self._writer.update(**self._describe_groups(), unused_parameters=unused)
        self._keep_training()
        if session.step == 1 or self._life_has_news():
            self._describe_life()
        if session.step % _USE_EVERY == 0:
            self._writer.update(host_work=self._instruments.stops.describe())
            if self._control is not None:
                self._writer.update(recorder=self._control.use())
        self._report_problems()

    def _report_problems(self) -> None:
        """Append the session's new problems to the rank's record."""
        with self._problem_lock:  # the watchdog reports too
            new = self.session.problems[self._reported_problems :]
            self._reported_problems += len(new)
        self._writer.add_problems(new)

    def _guarded(self, action: Any) -> None:
        """Run recorder code unseen by the training's own; its exceptions never reach it."""
        session = self.session
        if not session.active:
            return
        begun = session.clock.host_now() if session.times_plain else 0
        try:
            call_unseen(action)
        except Exception as error:
            session.fail(error)
        session.count_plain(begun)

    def _standstills(self) -> tuple[tuple[int, int], ...]:
        return () if self._surveillance is None else self._surveillance.standstills

    def _life_has_news(self) -> bool:
        """Whether the record lacks a background save, a compilation or a standstill."""
        noted = num_compiles(), len(self._standstills())
        return self._instruments.checkpoints.has_news or noted != self._noted

    def _describe_life(self) -> None:
        """Update the record with the activity outside of plain steps."""
        checkpoints, standstills = self._instruments.checkpoints, self._standstills()
        checkpoints.has_news = False
        self._noted = num_compiles(), len(standstills)
        life = describe_process(self.session.opened_ns, checkpoints.background_saves, standstills)
        self._writer.update(life=life)

    # --- the manifest

    def _settle_units(self) -> None:
        """Describe the units again: torch completes their state at the first forward."""
        self._num_settled = self._sharder.num_changes
        self._settled_inputs = self.session.inputs
        order = {unit: place for place, unit in enumerate(self.session.execution_order)}
        units = [
            unit.model_copy(update={"execution_index": order.get(unit.index, -1)})
            for unit in self._sharder.describe_units(self._process_groups)
        ]
        observed = observe_settings(
            self._model,
            self._memory_steps.optimizers,
            self.session.loss_dtype,
            self.session.inputs,
            skips_reduction=self.session.skips_reduction,
            gradients_between=self.session.gradients_between,
        )
        observed |= self._sharder.settings()
        [(backwards, _)] = self.session.backwards.most_common(1) or [(0, 0)]
        if backwards:
            observed["backwards"] = f"{backwards} a step"
        plan = self._observed_plan()
        is_wrapped = any((plan.get("checkpointing") or {}).values())  # the plan says it
        is_seen = recomputation_hook() is not None and not is_compiled(self._model)
        if backwards and plan and is_seen and not is_wrapped:
            known = self._manifest.observed.get("recomputation")  # later steps may be plain ones
            observed["recomputation"] = known or describe_recomputation(
                self.session.num_repeated, self.session.backwards
            )
        self._manifest = self._manifest.model_copy(
            update={
                "units": units,
                "plan": plan,
                "observed": observed,
                "uses": self._sharder.uses,
            }
        )

    def _write_manifest(self) -> None:
        """Write the current manifest on rank 0; a later attempt does not change the first one.

        The writer's thread does it, so a disk that hangs does not stop the training.
        """
        if self._rank != 0 or self.folder.attempt > 0:
            return
        self._manifest = self._manifest.model_copy(
            update={
                "run_id": self.folder.path.name,
                "process_groups": self._process_groups.describe(),
                "memory_steps": self._memory_steps.steps,
                "recorder": {
                    "numerics_every": self._options.numerics_every,
                    "clock": self.session.clock.name,
                    "flush_interval_s": self._options.flush_interval_s,
                    "steps_end_at": "step()" if self.session.explicit_steps else "optimizer",
                },
            }
        )
        path, manifest = self.folder.path, self._manifest
        self._writer.write_file(MANIFEST_FILE, lambda: folder.rewrite_manifest(path, manifest))

    def _observed_plan(self) -> dict[str, Any]:
        """Return the plan as a dict for the manifest; rank 0 also writes it to `PLAN_FILE`."""
        try:
            plan = self._sharder.observe_plan(self._model)
            if plan is None:
                return {}
            if self._rank == 0 and self.folder.attempt == 0:
                path = self.folder.path / PLAN_FILE
                self._writer.write_file(PLAN_FILE, lambda: plan.dump(path))
            return plan.to_dict()
        except Exception as error:
            raise_if_of_signal(error)
            reason = " ".join(str(error).split())
            self.session.problem(f"The observed plan could not be stored: {reason}")
            return {}

    # --- the end

    def finish(self, error: BaseException | None, *, show: bool) -> None:
        """Remove the hooks, write pending rows, close the files and print the verdict.

        Raises:
            Exception: An internal error. Hooks are removed and files are closed first.
        """
        status = RunStatus.COMPLETE if error is None or _is_clean_exit(error) else RunStatus.FAILED
        has_failed = status == RunStatus.FAILED
        end_s = time.monotonic() + (_FAILED_END_S if has_failed else math.inf)
        if self._values is not None and not (has_failed and self._device.type != "cpu"):
            self._guarded(self._values.look)
        failure: str | None = None
        try:
            try:
                if error is not None:
                    failure = self._describe_failure(error)  # before the memory state is released
            finally:
                self._stop(end_s, is_explained=has_failed and self._needs_explanation(error))
            self._write_manifest()
            self._report_problems()
            self._describe_rank()
            if self._trackers is not None and not has_failed:
                self._writer.flush()
                self._trackers.read_last()  # the writer closes the live files
        finally:
            self._writer.close(
                status,
                failure if has_failed else None,
                compact=not has_failed,
                timeout_s=max(_left(end_s), _LAST_WRITE_S) if has_failed else None,
            )
            if self._surveillance is not None:
                self._surveillance.close()
            self._release()
            if self._trackers is not None:
                self._trackers.close(_left(end_s))
        if self._rank == 0 and not has_failed and not self._writer.is_stalled:
            self._conclude(show=show and self._options.print_verdict)
        self._finish_upload(_left(end_s) if has_failed else None)

    def _finish_upload(self, timeout_s: float | None) -> None:
        """Upload the rest; after a failure, another process does what takes longer."""
        if self._upload is None:
            return
        if timeout_s is not None:
            self._upload.leave(timeout_s)
            return
        is_complete = self._upload.finish(FINISH_TIMEOUT_S)
        if is_complete and self._rank == 0 and self._options.print_verdict:
            url = self._upload.url
            tell(f"uploaded to {url}. To read it: fsdp-inspect show {shlex.quote(url)}", 0)

    def _needs_explanation(self, error: BaseException | None) -> bool:
        """Whether the failure is not explained by the error itself."""
        is_own_end = isinstance(error, DesyncError | KeyboardInterrupt | SystemExit)
        return not is_own_end and self._options.print_verdict and self._manifest.world_size > 1

    def _stop(self, end_s: float, *, is_explained: bool) -> None:
        session = self.session
        if self._control is not None:  # before the threads end, whose time counts
            self._writer.update(recorder=self._control.use())
        was_active = session.active
        self._guarded(session.end_evaluation)
        self._guarded(session.journal.drain)  # before the black box is explained
        session.stop()
        try:
            self._memory_steps.close()
            self._numerics.abandon()
            self._profile.abandon()
            if self._cuda_limit is not None:
                self._cuda_limit.stop()
        finally:
            if self._surveillance is not None:
                self._surveillance.stop(_left(end_s), has_failed=is_explained)
            self._instruments.detach()
        if self._sampler is not None:
            self._sampler.stop(_left(end_s))
            session.problems.extend(self._sampler.problems)
        self._history.stop()
        if was_active:
            self._settle(end_s)

    def _describe_rank(self) -> None:
        self._describe_life()
        self._writer.update(
            host_work=self._instruments.stops.describe(),
            num_steps=self.session.step,
            scalar_names=self._scalars.names,
            clock_end=read_clock_pair(),
            clock_uncertainty_ns=self.session.clock.uncertainty_ns,
            **self._describe_groups(),
        )

    def _release(self) -> None:
        """Drop every reference to the model."""
        self._is_finished = True
        mark_released(self._sharder.units)
        self._model = nn.Module()
        self._sharder.units.clear()
        self.session.checks = self._values = None
        self.session.running_units = lambda: ()
        del self._instruments, self._memory_steps, self._numerics

    def _settle(self, end_s: float) -> None:
        try:
            timeout_s = min(_left(end_s), _SETTLE_S)
            lost = self.session.journal.settle(timeout_s)
            if lost:
                self.session.problem(
                    f"{lost} events had not completed {timeout_s:.1g} s after the end of the "
                    "recording; they are missing."
                )
            self._scalars.close(min(_left(end_s), _SETTLE_S))
            self._drain_checks(min(_left(end_s), _SETTLE_S))
            self._keep_training()
        except Exception as error:  # the device may be unusable after the training failed
            self.session.problem(f"Reading the last events failed: {error!r}.")

    def _describe_failure(self, error: BaseException) -> str:
        """Describe the error and its position; after an out-of-memory, also the memory use."""
        sentences = [describe_failure(error, self.session, self._manifest.units)]
        self._writer.update(
            failure=sentences[0],
            failed_at=find_failing_line(error),
            failed_unix_ns=time.time_ns(),
            communication_error=find_communication_error(error),
        )
        self._writer.flush_soon()  # the launcher may end this rank before it closes the recording
        if not is_out_of_memory(error, self._device):
            return sentences[0]
        try:
            self._report_out_of_memory(error)
            if self._counters is not None:
                sentences.append(
                    describe_allocated(
                        self._sharder.units,
                        self._manifest.units,
                        self._memory_steps.optimizers,
                        self._counters,
                    )
                )
            if self._options.memory_snapshot:
                sentences.append(f"Snapshot: {keep_snapshot(self._writer.folder)}.")
        except Exception as second:  # memory is short: the first sentence is the important one
            self.session.problem(f"The memory use at the failure is unknown: {second!r}.")
        return " ".join(sentences)

    def _report_out_of_memory(self, error: BaseException) -> None:
        """Write the report of a failed allocation into the rank's folder and print it on stderr."""
        failure = find_limit_failure(error)
        if failure is not None:
            self._memory_steps.write_failed_step(failure)
        identity = {
            "run_id": self.folder.path.name,
            "rank": self._rank,
            "attempt": self.folder.attempt,
        }
        where = Surroundings(
            session=self.session,
            units=self._manifest.units,
            handles=self._sharder.units,
            optimizers=self._memory_steps.optimizers,
            counters=self._counters,
            device=self._device,
            limit_bytes=self._options.device_memory,
            followed=self._memory_steps.followed,
            resting_before=self._memory_steps.resting_before,
            resting_bytes=tuple(self._memory_steps.resting_bytes),
            memory_step_peak=self._memory_steps.peak,
            name_place=self._memory_steps.name_place,
        )
        record = make_record(error, identity, where, find_failing_line(error))
        self._writer.write_record(OUT_OF_MEMORY_FILE, record)
        names = [unit.fqn for unit in self._manifest.units]
        tell(
            f"{describe_out_of_memory(record, names)} To see what filled the memory and which "
            f"plans fit: fsdp-inspect diagnose {shlex.quote(str(self.folder.path))}",
            self._rank,
        )

    def _keep_live_memory(self, moments: list[LiveMoment], history: LiveHistory | None) -> None:
        """Write the live memory of a memory step into the rank's folder."""
        record = LiveMemoryRecord(
            run_id=self.folder.path.name,
            rank=self._rank,
            attempt=self.folder.attempt,
            moments=moments,
            history=history,
        )
        self._writer.write_record(LIVE_MEMORY_FILE, record)

    def _conclude(self, *, show: bool) -> None:
        """Write the summary and print the verdict."""
        emulation, folder = self._emulation, self.folder.path
        if show:
            tell_place(folder)
        show = show and self.session.step > 0
        if self._manifest.world_size > 1 and self.session.source == Source.RECORDED:
            close_run_in_background(folder, show=show)
        else:
            text = None if emulation is None else str(emulation.specification)
            close_run(folder, show=show, emulated=text)


def _left(end_s: float) -> float:
    """The seconds until a time of `time.monotonic`."""
    return max(end_s - time.monotonic(), 0.0)


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


_ADDRESS = re.compile(r"(?<=[\w>]) at 0x[0-9a-f]+(?=>)")
"""In the text of a function or an object, as in `<function zeros_ at 0x7fe2beb86520>`."""


def _json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep JSON values; convert all other values to text.

    Without the addresses of objects, the configuration of a run that is resumed is the same.
    """

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return _ADDRESS.sub("", str(value))

    return {str(key): plain(value) for key, value in config.items()}
