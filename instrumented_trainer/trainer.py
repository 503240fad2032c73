"""Run a training: from settings to a sharded model, steps, evaluation, checkpoints, a recording.

`prepare` runs everything that can fail because of a setting, before any process group exists.
`train` runs the steps, each inside `recorder.step()`.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fsdp_inspect.emulation.fixed_times import FixedTimes
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.formatting import format_count
from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.modules import fsdp_modules
from fsdp_inspect.trace.plan import Plan, owned_parameters
from fsdp_inspect.trace.records import MAX_NS
from fsdp_inspect.trace.sharders import DDP, FSDP2, SIMPLE_FSDP, ZERO3, traits_of
from instrumented_trainer.checkpoint import (
    SavedCheckpoint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from instrumented_trainer.config import TrainerConfig, legal_values
from instrumented_trainer.data import Batch, Loader, open_corpus
from instrumented_trainer.deepspeed_engine import EngineOptimizer
from instrumented_trainer.emulation import (
    check_emulation,
    describe_overruns,
    fix_compute,
    timed_parts,
)
from instrumented_trainer.hf import compute_logits
from instrumented_trainer.models import ModelRecipe, complete, make_recipe
from instrumented_trainer.optimization import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from instrumented_trainer.parallelize import (
    Parallelism,
    build_parallel_model,
    expect_compiler,
    find_kept_modules,
)
from instrumented_trainer.parts import find_parts
from instrumented_trainer.progress import Reporter, StepReport, make_reporter, read_memory
from instrumented_trainer.readings import Reading, make_reader
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.sharding_plan import make_plan
from instrumented_trainer.wrapping import check_sharder, clip_with_sharder, without_reduction

_NO_LOSS = "The network is a model. No loss is shown, because the other ranks do not exist."


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run whose settings fit each other, the machine, the data and the plan."""

    config: TrainerConfig
    runtime: Runtime
    recipe: ModelRecipe
    parallelism: Parallelism
    loader: Loader
    resumed: SavedCheckpoint | None
    memory_steps: tuple[int, ...] | Literal["auto"]
    device_memory: int | None = None
    """The limit of the device's memory, bytes; None: no limit."""
    fixed_times: FixedTimes | None = None
    """Fixed compute times of the timed parts; None means real times."""
    timed_parts: tuple[str, ...] = ()

    @property
    def has_loss(self) -> bool:
        """Whether the loss is meaningful; under emulation the other ranks' data is missing."""
        return self.runtime.emulation is None


@dataclass(kw_only=True, slots=True)
class TrainingResult:
    """The losses and the recording of a run."""

    losses: dict[int, float] = field(default_factory=dict)
    """Mean training loss over ranks and microbatches by step (from 1), for the logged steps."""
    evaluation_losses: dict[int, float] = field(default_factory=dict)
    """Mean evaluation loss over ranks and batches, by the number of completed steps."""
    run_folder: Path | None = None
    """The run folder; None without a recording."""


def prepare(config: TrainerConfig, runtime: Runtime) -> PreparedRun:
    """Check everything that can be checked before the process group exists.

    Raises:
        ConfigError: A setting does not fit the machine, the model or the data; the message has the
            setting and its legal values.
        PlanError: The plan file does not fit the machine or the model.
    """
    config = complete(config)
    fixed_times = check_emulation(config)
    memory_steps = _parse_memory_steps(config.memory_steps)
    device_memory = _parse_device_memory(config)
    recipe = make_recipe(config)
    skeleton = recipe.skeleton()
    parts = find_parts(skeleton)
    plan = make_plan(config, parts, runtime.machine)
    check_sharder(config, plan)
    _expect_whole_cover(plan, skeleton)
    _expect_use_of_kept_parameters(plan)
    if config.compile:
        expect_compiler(runtime.device)
    if config.checkpoint_every and config.checkpoint_dir is None:
        raise ConfigError(
            f"checkpoint_every is {config.checkpoint_every} but checkpoint_dir is not set. "
            "Expected a folder to save to. Set --checkpoint-dir."
        )
    return PreparedRun(
        config=config,
        runtime=runtime,
        recipe=recipe,
        parallelism=Parallelism(
            plan=plan,
            compiled=parts.blocks if config.compile else (),
            config=None if config.sharding == FSDP2 else config,
        ),
        loader=_make_loader(config, plan, runtime, recipe.vocab_size),
        resumed=find_checkpoint(config),
        memory_steps=memory_steps,
        device_memory=device_memory,
        fixed_times=fixed_times,
        timed_parts=timed_parts(parts),
    )


def train(prepared: PreparedRun) -> TrainingResult:
    """Run the steps; requires the process group of `runtime.process_group`.

    Rank 0 prints the progress. When the recorder closes, it prints the limit of the step.
    """
    config, runtime = prepared.config, prepared.runtime
    model = build_parallel_model(prepared.recipe, prepared.parallelism, runtime)
    fixed = fix_compute(model, prepared.timed_parts, prepared.fixed_times, runtime)
    optimizer: Any = EngineOptimizer(model) if is_engine(model) else make_optimizer(model, config)
    # Initial weights are equal on all ranks; later random numbers (dropout) should differ.
    torch.manual_seed(config.seed + 1 + runtime.rank)
    first_step = 0
    if prepared.resumed is not None:
        load_checkpoint(model, optimizer, prepared.resumed)
        first_step = prepared.resumed.step
    reporter = make_reporter(config.steps, first_step, is_first=runtime.is_first)
    reporter.say(_describe_run(prepared, model))
    with _recording(prepared, model, optimizer) as recorder:
        loop = TrainingLoop(prepared, model, optimizer, recorder, reporter)
        try:
            for step in range(first_step, config.steps):
                loop.run_step(step)
            loop.report_all()
        finally:
            reporter.close()
        if fixed is not None:
            reporter.say(describe_overruns(fixed))
    loop.result.run_folder = recorder.run_folder
    return loop.result


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingReport:
    """A step whose numbers are on their way to the host."""

    step: int
    learning_rate: float
    has_norm: bool
    memory_bytes: int
    memory_kind: str
    reading: Reading


class TrainingLoop:
    """The steps of one run.

    On CUDA no step waits for the device. A step is therefore reported a little later, under its
    own number: see [Note: Reading without waiting].
    """

    def __init__(
        self,
        prepared: PreparedRun,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recorder: Any,
        reporter: Reporter,
    ) -> None:
        self.result = TrainingResult()
        self._config = prepared.config
        self._has_loss = prepared.has_loss
        self._runtime = prepared.runtime
        self._loader = prepared.loader
        self._accumulation = prepared.parallelism.plan.accumulation
        self._kept_unsharded = find_kept_modules(prepared.parallelism.plan, model)
        self._model = model
        self._optimizer = optimizer
        self._recorder = recorder
        self._reporter = reporter
        self._reader = make_reader(self._runtime.device)
        self._pending: deque[_PendingReport] = deque()

    def run_step(self, step: int) -> None:
        """Run a training step (from 0), then the evaluation and checkpoint due after it."""
        start = self._reader.start()
        done = step + 1
        is_logged = done % self._config.log_every == 0 or done == self._config.steps
        with self._recorder.step():
            loss, rate, norm = self.train_step(step)
            loss = _mean_over_ranks(loss) if is_logged else loss
        if is_logged:
            if self._has_loss:
                self._recorder.log(loss=loss, learning_rate=rate)
            self._read_later(done, loss, rate, norm, start)
        self._report_ready()
        if _is_due(done, self._config.eval_every):
            with self._recorder.between_steps("evaluation"):
                self._evaluate(done)
        if _is_due(done, self._config.checkpoint_every):
            with self._recorder.between_steps("checkpoint"):
                path = save_checkpoint(self._model, self._optimizer, self._config, done)
                self._say(f"saved {path}")

    def report_all(self) -> None:
        """Report every unreported step; waits for the device."""
        while self._pending:
            self._report(self._pending.popleft())

    def train_step(self, step: int) -> tuple[torch.Tensor, float, torch.Tensor | None]:
        """Run forward, backward and the optimizer's step, without logging.

        Returns:
            This rank's mean loss, 0-d; the learning rate; the gradient norm, or None if unclipped.
        """
        rate = learning_rate(step, self._config)
        loss = self.accumulate(step)
        return loss, rate, self._update(rate)

    def accumulate(self, step: int) -> torch.Tensor:
        """Run forward and backward of each microbatch; returns this rank's mean loss, 0-d."""
        count = self._accumulation.microbatches
        total = torch.zeros((), device=self._runtime.device)
        for microbatch in range(count):
            with self._recorder.data():
                batch = _to_device(self._loader.train_batch(step, microbatch), self._runtime.device)
            is_last = microbatch == count - 1
            self._announce(is_last=is_last)
            reduces = is_last or self._accumulation.sync == "every"
            with without_reduction(self._model, is_last=reduces):
                loss = compute_loss(self._model, batch)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / count

    def _announce(self, *, is_last: bool) -> None:
        """Tell FSDP whether a microbatch is the last of its step."""
        for module in self._kept_unsharded:
            # The weights change after the last microbatch, so parameters that are kept full would
            # be stale.
            module.set_reshard_after_backward(is_last, recurse=False)
        if self._accumulation.sync == "every":
            return
        for module in fsdp_modules(self._model):
            if self._accumulation.sync == "last":
                module.set_requires_gradient_sync(is_last, recurse=False)
            else:
                module.set_requires_all_reduce(is_last, recurse=False)

    def _update(self, rate: float) -> torch.Tensor | None:
        norm = None
        if self._config.clip_norm > 0:
            norm = clip_with_sharder(self._model, clip_gradients, self._config.clip_norm)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def _evaluate(self, done: int) -> None:
        self._model.eval()
        total = torch.zeros((), device=self._runtime.device)
        for index in range(self._config.eval_batches):
            batch = _to_device(self._loader.evaluation_batch(index), self._runtime.device)
            total += compute_loss(self._model, batch)
        self._model.train()
        loss = float(_mean_over_ranks(total / self._config.eval_batches))
        if not self._has_loss:
            self._say(f"evaluation after step {done}: done")
            return
        self.result.evaluation_losses[done] = loss
        self._recorder.log(evaluation_loss=loss)
        self._say(f"evaluation after step {done}: loss {loss:.4f}")

    def _read_later(
        self, done: int, loss: torch.Tensor, rate: float, norm: torch.Tensor | None, start: Any
    ) -> None:
        numbers = [loss, *([] if norm is None else [norm])] if self._has_loss else []
        memory_bytes, memory_kind = read_memory(self._runtime.device)
        self._pending.append(
            _PendingReport(
                step=done,
                learning_rate=rate,
                has_norm=len(numbers) > 1,
                memory_bytes=memory_bytes,
                memory_kind=memory_kind,
                reading=self._reader.finish(start, numbers),
            )
        )

    def _report_ready(self) -> None:
        while self._pending and self._pending[0].reading.is_ready():
            self._report(self._pending.popleft())

    def _report(self, pending: _PendingReport) -> None:
        numbers = pending.reading.get()
        loss = numbers.values[0] if self._has_loss else None
        if loss is not None:
            self.result.losses[pending.step] = loss
        self._reporter.step(
            StepReport(
                step=pending.step,
                num_steps=self._config.steps,
                loss=loss,
                learning_rate=pending.learning_rate,
                gradient_norm=numbers.values[1] if pending.has_norm else None,
                step_time_ns=numbers.step_time_ns,
                num_tokens=self._tokens_per_step,
                memory_bytes=pending.memory_bytes,
                memory_kind=pending.memory_kind,
            )
        )

    def _say(self, text: str) -> None:
        """Print a line after the reports of earlier steps, which the device has completed."""
        self.report_all()
        self._reporter.say(text)

    @property
    def _tokens_per_step(self) -> int:
        loader = self._loader
        return loader.microbatches * loader.batch_size * loader.seq_len * loader.world_size


def compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of a rank's part of a microbatch, 0-d, in float32.

    A classifier has one label for a whole image or sound: the first target.
    """
    logits, targets = compute_logits(model, batch.tokens).float(), batch.targets
    if logits.ndim == targets.ndim:  # (B, labels)
        return F.cross_entropy(logits, targets[:, 0] % logits.shape[-1])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return Batch(
        tokens=batch.tokens.pin_memory().to(device, non_blocking=True),
        targets=batch.targets.pin_memory().to(device, non_blocking=True),
    )


def _mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _make_loader(config: TrainerConfig, plan: Plan, runtime: Runtime, vocab_size: int) -> Loader:
    assert config.seq_len is not None
    assert config.batch_size is not None
    return Loader(
        corpus=open_corpus(config.data, config.token_dtype),
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        microbatches=plan.accumulation.microbatches,
        rank=runtime.rank,
        world_size=runtime.world_size,
        seed=config.seed,
        vocab_size=vocab_size,
    )


def _expect_whole_cover(plan: Plan, model: nn.Module) -> None:
    """Reject a parameter outside every unit, because each rank would train it separately."""
    names = [name for name, _ in model.named_parameters()]
    owned = owned_parameters(plan.units, names)
    outside = set(names).difference(*owned.values())
    if outside:
        raise ConfigError(
            f"The plan has no unit for {len(outside)} parameters, such as {min(outside)!r}: their "
            "gradients would not be reduced. Expected every parameter in a unit. Add the model "
            'itself to the plan as modules = [""].'
        )


def _expect_use_of_kept_parameters(plan: Plan) -> None:
    kept = [unit.name for unit in plan.units if not unit.reshard_after_backward]
    if kept and plan.accumulation.microbatches == 1:
        raise ConfigError(
            f"reshard_after_backward is false for unit {kept[0]!r}, but a step has one microbatch. "
            "The weights change after it, so nothing can be kept. Expected true, or several "
            "microbatches. Set --microbatches above 1, or remove --reshard-after-backward."
        )


def _parse_memory_steps(text: str) -> tuple[int, ...] | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(
            f"memory_steps is {text!r}. Expected {legal_values('memory_steps')}. Set "
            "--memory-steps to that."
        )
    return tuple(int(part) for part in parts)


def _parse_device_memory(config: TrainerConfig) -> int | None:
    if config.device_memory is None:
        return None
    amount = parse_bytes(config.device_memory, needs_unit=True)
    if not amount or amount > MAX_NS:
        raise ConfigError(
            f"device_memory is {config.device_memory!r}. Expected {legal_values('device_memory')}. "
            "Set --device-memory to that."
        )
    if not config.record:
        raise ConfigError(
            f"device_memory is {config.device_memory!r}, but record is false. The recorder applies "
            "the limit, so it is expected. Remove --no-record or --device-memory."
        )
    return amount


def _describe_run(prepared: PreparedRun, model: nn.Module) -> str:
    config, plan = prepared.config, prepared.parallelism.plan
    units = find_sharder(model).units
    numel = sum(numel for unit in units for numel in unit.full_numels)
    mesh = " x ".join(f"{size} {name}" for name, size in plan.mesh.items())
    what = f"Hugging Face {config.hf}" if config.hf else config.preset
    runtime = prepared.runtime
    ranks = f"{runtime.world_size} {runtime.device.type} rank{'s' * (runtime.world_size > 1)}"
    resumed = f", resumed after step {prepared.resumed.step}" if prepared.resumed else ""
    emulated = "" if runtime.emulation is None else f"\nemulated: {runtime.emulation}. {_NO_LOSS}"
    return (
        f"{what}: {format_count(numel)} parameters {_arrangement(config, len(units))} on "
        f"{ranks} ({mesh}){resumed}{emulated}"
    )


def _arrangement(config: TrainerConfig, num_units: int) -> str:
    """Describe the units in words; DDP assigns its buckets again after the first step."""
    if config.sharding == DDP:
        return "replicated by DDP"
    kind = traits_of(config.sharding).title if config.sharding in (ZERO3, SIMPLE_FSDP) else "FSDP"
    return f"in {num_units} {kind} units"


class NoRecorder:
    """Replaces the recorder in a run without a recording."""

    run_folder: Path | None = None

    def step(self) -> AbstractContextManager[None]:
        """Like `Recorder.step`, without effect."""
        return nullcontext()

    def data(self) -> AbstractContextManager[None]:
        """Like `Recorder.data`, without effect."""
        return nullcontext()

    def between_steps(self, label: str = "") -> AbstractContextManager[None]:
        """Like `Recorder.between_steps`, without effect."""
        return nullcontext()

    def log(self, **values: float | torch.Tensor) -> None:
        """Like `Recorder.log`, without effect."""


@contextmanager
def _recording(
    prepared: PreparedRun, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Any]:
    config = prepared.config
    if not config.record:
        yield NoRecorder()
        return
    from fsdp_inspect import Recorder

    settings = config.model_dump(mode="json")
    accumulation = prepared.parallelism.plan.accumulation
    settings |= {
        "microbatches": accumulation.microbatches,
        "accumulation_sync": accumulation.sync,
    }
    with Recorder(
        model,
        optimizer=None if is_engine(model) else optimizer,
        path=choose_run_folder(config),
        name=config.name,
        config=settings,
        tags=list(config.tag),
        warmup_steps=config.record_warmup,
        memory_steps=prepared.memory_steps,
        numerics_every=config.numerics_every,
        overhead=None if config.overhead == "none" else config.overhead,
        device_memory=prepared.device_memory,
        log_to=config.log_to,
        upload=config.upload,
    ) as recorder:
        yield recorder


def choose_run_folder(config: TrainerConfig) -> Path:
    """Choose a run folder whose name sorts by time; the recorder uses rank 0's on all ranks.

    When torchrun restarts its ranks after a failure, it is the folder of the failed run. The
    recorder then adds an attempt to it.
    """
    words = config.name or (config.preset if config.hf is None else Path(config.hf).stem)
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in words)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        earlier = sorted(Path(config.runs_dir).glob(f"*-{safe}-????"))
        if earlier:
            return earlier[-1]
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return Path(config.runs_dir) / f"{stamp}-{safe}-{uuid4().hex[:4]}"
