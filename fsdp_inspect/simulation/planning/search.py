"""Search the fastest candidate that fits, with bounds instead of predictions where they suffice.

Candidates are sorted by a lower bound of their time for a token. A candidate whose memory bound
exceeds the budget is rejected without a prediction. If the next bound is above the time of the
slowest plan to report, no later candidate can be faster. So the best plan is the same as that of an
exhaustive search.

[Note: the simplest] Plans within 0.5% of each other differ by less than any prediction can show. Of
the plans within 0.5% of the fastest one, the search takes the one with the fewest changed settings,
then the one with the lowest peak.

[Note: settled plans] The memory of the plans to report is predicted again with more effort, by a
forecast if there is one. If that changes a verdict, the search runs again with it. Runners-up that
are still not settled at the end are not reported.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.hardware import ATTENTION, Gpu
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.simulation.planning.candidates import (
    BATCH_SIZES,
    BuilderCandidate,
    Candidate,
    Job,
    narrow_candidates,
    with_whole_batch,
)
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.prediction import (
    Bounds,
    PlannedMemory,
    PlanPrediction,
    bound,
    formula_ratios,
    judge_forecast,
    predict,
    predict_memory,
    step_ns,
)
from fsdp_inspect.simulation.planning.workload import plan_of
from fsdp_inspect.trace.plan import Plan

# --- Define what a search asks about a candidate, and answer it from closed formulas.

C = TypeVar("C", bound=Candidate | BuilderCandidate)


class Predictor(ABC, Generic[C]):
    """Predicts candidates of one kind for a search."""

    machine: PlannedMachine

    @abstractmethod
    def bound(self, candidate: C) -> Bounds:
        """Bound a candidate without a simulation."""

    @abstractmethod
    def memory(self, candidate: C) -> PlannedMemory:
        """Predict the memory of a candidate, and judge it."""

    def settle(self, candidate: C) -> PlannedMemory | None:
        """Predict the memory of a candidate that the search reports, at any cost.

        None: `memory` is all there is.
        """
        return None

    @abstractmethod
    def ns_per_token(self, candidate: C) -> float:
        """Predict the time of a step for each of its tokens."""

    @abstractmethod
    def predict(self, candidate: C, memory: PlannedMemory | None = None) -> PlanPrediction:
        """Predict all values of a candidate; `memory`: its memory, if it is known."""


class FormulaPredictor(Predictor[Candidate]):
    """Predicts from closed formulas and a simulated step."""

    def __init__(
        self,
        job: Job,
        machine: PlannedMachine,
        forecast: Callable[[Candidate], ForecastStep | None] | None = None,
    ) -> None:
        """`forecast` makes the exact forecast of a candidate; it returns None if it cannot."""
        self.job, self.machine = job, machine
        self._forecast = forecast

    def bound(self, candidate: Candidate) -> Bounds:
        """Bound a candidate without a simulation."""
        least = bound(self.job, candidate, self.machine.speed)
        low, _ = formula_ratios(self.job, candidate)
        return replace(least, allocated_bytes=least.allocated_bytes * (1 - low))

    def memory(self, candidate: Candidate) -> PlannedMemory:
        """Predict the memory of a candidate, and judge it."""
        return predict_memory(self.job, self.machine, candidate)

    def settle(self, candidate: Candidate) -> PlannedMemory | None:
        """Forecast the candidate's tensors, and replay them on the allocator model."""
        step = None if self._forecast is None else self._forecast(candidate)
        return None if step is None else judge_forecast(self.machine, step)

    def ns_per_token(self, candidate: Candidate) -> float:
        """Predict the time of a step for each of its tokens."""
        step = step_ns(self.job, candidate, self.machine.speed)
        return step / self.job.tokens_of_step(candidate)

    def predict(self, candidate: Candidate, memory: PlannedMemory | None = None) -> PlanPrediction:
        """Predict all values of a candidate; `memory`: its memory, if it is known."""
        return predict(self.job, self.machine, candidate, memory)


NUM_RUNNERS_UP = 2
ALIKE_RATIO = 0.005
SLOWER = "slower"
"""The reason of candidates that are slower than the reported plans. Whether they fit is unknown
unless their bound showed it."""
MOST_SETTLED = 4
"""The number of candidates that are predicted with more effort; further ones only if they are the
best."""
_MOST_EXAMPLES = 8
_DOUBT = "The forecast of a similar plan with less memory is not certain to fit."


@dataclass(frozen=True, slots=True)
class Rejection:
    """Candidates that were rejected for one reason."""

    reason: str
    checkpointing: str
    offload: bool
    count: int
    example: PlanPrediction
    """The candidate with the least memory; of slower candidates, the fastest of a few that fits."""


@dataclass(frozen=True, slots=True)
class PlanSearchResult:
    """The outcome of a search."""

    best: PlanPrediction | None
    """None: no candidate is certain to fit."""
    runners_up: tuple[PlanPrediction, ...]
    undecided: PlanPrediction | None
    """The fastest candidate that may fit, if it is faster than `best` or nothing fits; else None.
    """
    rejected: tuple[Rejection, ...]
    num_candidates: int
    num_simulated: int

    @property
    def given(self) -> PlanPrediction | None:
        """The plan, if only one was evaluated."""
        if self.num_candidates != 1:
            return None
        return self.best or self.undecided or self.rejected[0].example


@dataclass(frozen=True, slots=True)
class _Bounded(Generic[C]):
    candidate: C
    ns_per_token: float
    """A lower bound."""
    bytes: float
    """A lower bound of the allocated peak."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A predicted candidate that may fit."""

    ns_per_token: float
    allocated_bytes: float
    """As predicted first: a settled plan is compared with plans that are not."""


def search(predictor: Predictor[C], candidates: Sequence[C]) -> PlanSearchResult:
    """Find the fastest plans that fit.

    Args:
        predictor: Predicts the candidates on the machines of the training.
        candidates: The plans to compare.
    """
    return _Search(predictor, candidates).run()


class _Search(Generic[C]):
    def __init__(self, predictor: Predictor[C], candidates: Sequence[C]) -> None:
        self._predictor = predictor
        self._bounded = sorted(map(self._bound, candidates), key=lambda each: each.ns_per_token)
        self._memories: dict[C, PlannedMemory] = {}
        self._allocated: dict[C, float] = {}
        self._settled: set[C] = set()
        self._refuted: list[C] = []
        """Settled plans that are not certain to fit."""
        self._reasons: dict[C, str] = {}
        self._fitting: dict[C, _Known] = {}
        self._fastest: dict[tuple[object, ...], float] = {}
        """The time of the fastest fitting plan of each kind."""
        self._undecided: tuple[float, C] | None = None

    def run(self) -> PlanSearchResult:
        self._compare_all()
        while self._settle_next():
            self._compare_all()
        chosen = [each for each in self._choose() if each in self._settled]
        for candidate in self._fitting:
            if candidate not in chosen:
                self._reasons[candidate] = SLOWER
        reported = [self._predict(each) for each in chosen]
        return PlanSearchResult(
            best=reported[0] if reported else None,
            runners_up=tuple(reported[1:]),
            undecided=self._fastest_undecided(chosen),
            rejected=tuple(self._group()),
            num_candidates=len(self._bounded),
            num_simulated=len(self._memories),
        )

    def _bound(self, candidate: C) -> _Bounded[C]:
        least = self._predictor.bound(candidate)
        return _Bounded(candidate, least.ns_per_token, least.allocated_bytes)

    def _compare_all(self) -> None:
        self._reasons, self._fitting, self._fastest, self._undecided = {}, {}, {}, None
        budget = self._predictor.machine.memory_bytes
        limit = float("inf")
        for each in self._bounded:
            if each.bytes > budget:
                self._reasons[each.candidate] = FitVerdict.DEVICE
            elif each.ns_per_token > limit:
                self._reasons[each.candidate] = SLOWER
            else:
                self._compare(each.candidate)
                limit = self._worst_reported()

    def _compare(self, candidate: C) -> None:
        memory = self._memory(candidate)
        if memory.verdict in (FitVerdict.DEVICE, FitVerdict.HOST):
            self._reasons[candidate] = memory.verdict
            return
        time = self._predictor.ns_per_token(candidate)
        if memory.verdict is FitVerdict.FITS:
            self._fitting[candidate] = _Known(time, self._allocated[candidate])
            self._fastest[candidate.kind] = min(time, self._fastest.get(candidate.kind, time))
            return
        self._reasons[candidate] = memory.verdict
        if self._undecided is None or time < self._undecided[0]:
            self._undecided = (time, candidate)

    def _memory(self, candidate: C) -> PlannedMemory:
        if candidate not in self._memories:
            self._memories[candidate] = memory = self._predictor.memory(candidate)
            self._allocated[candidate] = memory.allocated.value
        return self._doubt_larger(candidate, self._memories[candidate])

    def _predict(self, candidate: C) -> PlanPrediction:
        return self._predictor.predict(candidate, self._memory(candidate))

    def _settle_next(self) -> bool:
        """Settle one plan to report; False: all are settled. See [Note: settled plans]."""
        chosen = self._choose()
        for candidate in self._to_report(chosen):
            is_best = candidate in chosen[:1]
            if candidate in self._settled or (len(self._settled) >= MOST_SETTLED and not is_best):
                continue
            self._settled.add(candidate)
            memory = self._predictor.settle(candidate)
            if memory is not None:
                self._memories[candidate] = memory
                if memory.verdict is not FitVerdict.FITS:
                    self._refuted.append(candidate)
                return True
        return False

    def _doubt_larger(self, candidate: C, memory: PlannedMemory) -> PlannedMemory:
        """Doubt a plan with as much memory as one of its kind and batch that may not fit."""
        is_doubtful = any(
            (candidate.kind, candidate.batch_size) == (each.kind, each.batch_size)
            and self._allocated[candidate] >= self._allocated[each]
            for each in self._refuted
        )
        if memory.verdict is not FitVerdict.FITS or candidate in self._settled or not is_doubtful:
            return memory
        return replace(memory, verdict=FitVerdict.UNKNOWN, reason=_DOUBT)

    def _to_report(self, chosen: Sequence[C]) -> Iterator[C]:
        if self._is_undecided_faster(chosen) and self._undecided is not None:
            yield self._undecided[1]
        yield from chosen

    def _worst_reported(self) -> float:
        """The time for a token that a further candidate must beat."""
        count = NUM_RUNNERS_UP + 1
        if len(self._fastest) < count:
            return float("inf")
        return sorted(self._fastest.values())[count - 1] * (1 + ALIKE_RATIO)

    def _choose(self) -> list[C]:
        """The best plan of each of the fastest kinds. See [Note: the simplest]."""
        chosen: list[C] = []
        left = dict(self._fitting)
        while left and len(chosen) <= NUM_RUNNERS_UP:
            fastest = min(known.ns_per_token for known in left.values())
            most = fastest * (1 + ALIKE_RATIO)
            alike = [each for each, known in left.items() if known.ns_per_token <= most]
            pick = min(alike, key=lambda each: (each.effort, left[each].allocated_bytes))
            chosen.append(pick)
            left = {each: known for each, known in left.items() if each.kind != pick.kind}
        return chosen

    def _is_undecided_faster(self, chosen: Sequence[C]) -> bool:
        if self._undecided is None:
            return False
        return not chosen or self._undecided[0] < self._fitting[chosen[0]].ns_per_token

    def _fastest_undecided(self, chosen: Sequence[C]) -> PlanPrediction | None:
        if self._undecided is None or not self._is_undecided_faster(chosen):
            return None
        return self._predict(self._undecided[1])

    def _group(self) -> list[Rejection]:
        """Rejections by reason, checkpointing and offload, the largest group first."""
        groups: dict[tuple[str, str, bool], list[_Bounded[C]]] = defaultdict(list)
        for each in self._bounded:
            candidate = each.candidate
            if candidate in self._reasons:
                reason = str(self._reasons[candidate])
                groups[reason, candidate.checkpointing, candidate.offload].append(each)
        return [
            Rejection(*key, len(members), self._example(key[0], members))
            for key, members in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]

    def _example(self, reason: str, members: Sequence[_Bounded[C]]) -> PlanPrediction:
        """The member with the least memory; of slower ones, the fastest of a few that fits."""
        for each in members[:_MOST_EXAMPLES] if reason == SLOWER else ():
            if self._memory(each.candidate).verdict is FitVerdict.FITS:
                return self._predict(each.candidate)
        return self._predict(min(members, key=lambda each: each.bytes).candidate)


# --- Answer a capacity question: the best plan, or what is missing for any plan to fit.

VALUES = (
    "step_time_ns",
    "tokens_per_s",
    "mfu",
    "gpu_hours",
    "days",
    "energy_kwh",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_bytes",
    "host_bytes",
)
"""The predicted values of a plan, in the order of reports."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What would make some plan fit; if one plan was evaluated, this plan."""

    memory_bytes: float | None
    """The smallest budget of a device with which the plan is certain to fit on these GPUs and the
    given memory of a host; None: none is."""
    gpus: int | None
    """The smallest number of GPUs, doubled from the given one, on which the plan is certain to fit
    the budget; None: none up to `most_gpus` of the machine."""
    host_bytes: float | None = None
    """The smallest memory of a host with which the plan fits the budget of a device; None: none,
    or the host is no limit."""
    change: Candidate | None = None
    """The plan with the smallest change of the training that fits both budgets; None: none is."""
    change_bytes: float = 0.0
    """The device memory of that plan, at most."""


@dataclass(frozen=True, slots=True)
class CapacityPlan(Result):
    """The answer of `fsdp-inspect plan`."""

    model: str
    num_parameters: int
    gpus: int
    gpu: str
    preset: str
    seq_len: int
    tokens: float
    memory_bytes: int
    """The budget of a device."""
    host_memory_bytes: int | None
    """The budget of a host; None: not limited."""
    found: PlanSearchResult
    shortfall: Shortfall | None
    """What is missing; None: a plan fits."""
    notes: tuple[str, ...]
    """Settings that could not be compared, and forecasts that failed, one sentence each."""
    plan: Plan | None
    """The best plan as a plan file; None: no plan fits."""
    job: Job | None
    """The training; None: that of a builder."""

    @property
    def is_fixed(self) -> bool:
        """Whether one given plan was evaluated."""
        return self.found.given is not None

    @property
    def shown(self) -> PlanPrediction | None:
        """The best plan, the fastest that may fit, or the given plan if it does not fit."""
        return self.found.best or self.found.undecided or self.found.given

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain values, those of the search first; without plan and job."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        del plain["job"], plain["plan"]
        plain = {**plain.pop("found"), **plain}
        for prediction in (plain["best"], plain["undecided"], *plain["runners_up"]):
            if prediction is not None:
                prediction["candidate"] = _plain_candidate(prediction["candidate"])
        for rejection in plain["rejected"]:
            example = rejection.pop("example")
            rejection |= {name: value for name, value in example.items() if name != "reason"}
            rejection["candidate"] = _plain_candidate(rejection["candidate"])
            rejection["detail"] = example["reason"]
        return plain


def _plain_candidate(candidate: dict[str, Any]) -> dict[str, Any]:
    """The settings by name; those of a builder are pairs."""
    return dict(candidate["items"]) if "items" in candidate else candidate


def make_capacity_plan(
    job: Job,
    machine: PlannedMachine,
    preset: str,
    candidates: Sequence[Candidate] | None = None,
    forecast: Callable[[Candidate], ForecastStep | None] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> CapacityPlan:
    """Find the fastest plan that fits a budget.

    Args:
        job: The training.
        machine: The machines with their budgets.
        preset: The name of the machines' preset.
        candidates: The plans to compare; None: all that have the settings.
        forecast: Makes the forecast of a plan to report, or returns None; None: there is none.
        settings: The settings that each plan has, by name.

    Raises:
        ConfigError: No candidate has the requested batch, the preset has too few GPUs, or a setting
            is invalid.
    """
    machine.speed.links.ring(job.gpus, 1)  # rejects a preset without a network
    listed = narrow_candidates(job, settings) if candidates is None else list(candidates)
    if not listed and job.batch_tokens is None:
        given = " ".join(f"--set {name}={value}" for name, value in settings.items())
        raise ConfigError(
            f"Invalid {given}: no plan of the search has these settings on {job.gpus} GPUs. "
            "Expected replicas of whole nodes, and tensor_parallel that divides the GPUs of a node "
            "and the heads of the model. Change --set or --gpus."
        )
    if not listed:
        raise ConfigError(
            f"Invalid --batch-tokens {job.batch_tokens}: no microbatch of {BATCH_SIZES[0]} to "
            f"{BATCH_SIZES[-1]} sequences of {job.seq_len} tokens on {job.gpus} GPUs divides it. "
            f"Expected a multiple of {job.seq_len * job.gpus} tokens. Change --batch-tokens or "
            "--seq-len."
        )
    for candidate in listed[:1]:  # settings of kernels are not searched: all have the same
        _check_kernels(candidate, machine.speed.gpu)
    found = search(FormulaPredictor(job, machine, forecast), listed)
    best, shortfall = None, None
    if found.best is not None:
        best = found.best.candidate
    else:
        shortfall = _find_shortfall(machine, _Compared(job, listed, settings), found.given)
    if best is None and len(listed) == 1:
        best = listed[0]  # a given plan is written whether it fits or not
    return CapacityPlan(
        model=job.model.name,
        num_parameters=job.model.num_parameters,
        gpus=job.gpus,
        gpu=machine.speed.gpu.name,
        preset=preset,
        seq_len=job.seq_len,
        tokens=job.tokens,
        memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        found=found,
        shortfall=shortfall,
        notes=(),
        plan=plan_of(job, best) if isinstance(best, Candidate) else None,
        job=job,
    )


def _check_kernels(candidate: Candidate, gpu: Gpu) -> None:
    """Refuse kernels that the GPU does not have.

    Raises:
        ConfigError: The format of products, or the kernel of attention, is not for this GPU.
    """
    is_block_scaled = candidate.products in ("mxfp8", "nvfp4")
    has_products = candidate.products == "param_dtype" or (
        gpu.architecture == "blackwell" if is_block_scaled else gpu.fp8_flops > 0
    )
    for name, is_known in (
        ("products", has_products),
        ("attention", candidate.attention in ATTENTION[gpu.architecture]),
    ):
        if not is_known:
            raise ConfigError(
                f"Invalid --set {name}={getattr(candidate, name)}: the planner has no rate of it "
                f"on {gpu.name}. Expected a setting that this GPU supports. Change --set or "
                "--preset."
            )


_SMALLER: tuple[Mapping[str, Any], ...] = (
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"loss": "linear"},
    {"loss": "linear", "checkpointing": "full"},
    {"checkpointing": "full", "batch_size": 1},
    {"loss": "linear", "checkpointing": "full", "batch_size": 1},
    {"loss": "linear", "checkpointing": "full", "batch_size": 1, "optimizer": "adamw_8bit"},
    {"loss": "linear", "checkpointing": "full", "batch_size": 1, "adapter_rank": 16},
    {"loss": "linear", "checkpointing": "full", "batch_size": 1, "adapter_rank": 16,
     "is_quantized": True},
)  # fmt: skip
"""Changes of a training, from the smallest: how it computes comes before what it trains."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """The plans of a search."""

    job: Job
    candidates: Sequence[Candidate]
    settings: Mapping[str, Any]
    """The settings that all of them have."""

    @property
    def is_batch_given(self) -> bool:
        """Whether the batch and the number of its microbatches are given, so also their size."""
        return self.job.batch_tokens is not None and "microbatches" in self.settings

    def least(self, job: Job) -> list[Candidate]:
        """The candidates of a job with the least memory: each mesh, also with offload."""
        least = {**_LEAST, **self.settings}
        if self.is_batch_given and "batch_size" not in self.settings:
            del least["batch_size"]
        return narrow_candidates(job, least)

    def change(self, base: Candidate, changes: Mapping[str, Any]) -> Candidate | None:
        """A candidate with some changes, for the same batch; None: there is none."""
        changed = replace(base, **changes)
        if self.is_batch_given and changed.batch_size != base.batch_size:
            return None
        return with_whole_batch(self.job, changed)


_LEAST: Mapping[str, Any] = {
    "batch_size": BATCH_SIZES[0],
    "checkpointing": "full",
    "reshard_after_forward": True,
    "blocks_per_unit": 1,
    "prefetch": 0,
    "param_dtype": "bfloat16",
    "replicas": 1,
}


def _find_change(machine: PlannedMachine, compared: _Compared) -> tuple[Candidate | None, float]:
    """The smallest change of a plan that fits, with its memory; offload, which is slow, last.

    Of several compared plans, none of which fits, those with the least memory are changed.
    """
    job, candidates = compared.job, compared.candidates
    layouts = sorted(compared.least(job), key=lambda each: (each.offload, each.tensor_parallel))
    excluded = frozenset(candidates)
    for base in candidates if len(candidates) == 1 else layouts:
        for changed in (compared.change(base, changes) for changes in _SMALLER):
            if changed is None or changed in excluded:
                continue
            memory = predict_memory(job, machine, changed)
            if memory.verdict is FitVerdict.FITS:
                return changed, memory.device.high
    return None, 0.0


def _find_shortfall(
    machine: PlannedMachine, compared: _Compared, given: PlanPrediction | None
) -> Shortfall:
    """What lets the given plan fit, the only compared one; None: what lets any plan fit."""
    job = compared.job
    evaluated = None if given is None else compared.candidates[0]
    gpus: int | None = None
    size = job.gpus * 2
    while size <= machine.most_gpus and gpus is None:
        smallest = _smallest(machine, compared, size, evaluated)
        if any(memory.verdict is FitVerdict.FITS for memory in smallest):
            gpus = size
        size *= 2
    if given is None:
        memories = _smallest(machine, compared, job.gpus, None)
        needs = [(memory.device.high, memory.host.high) for memory in memories]
    else:
        needs = [(given.device_bytes.high, given.host_bytes.high)]
    limit = machine.host_bytes
    devices = [device for device, host in needs if limit is None or host <= limit]
    hosts = [host for device, host in needs if limit and device <= machine.memory_bytes]
    return Shortfall(
        min(devices, default=None),
        gpus,
        min(hosts, default=None),
        *_find_change(machine, compared),
    )


def _smallest(
    machine: PlannedMachine, compared: _Compared, gpus: int, given: Candidate | None
) -> Iterator[PlannedMemory]:
    """The memory on a number of GPUs of the given plan, or of the candidates with the least."""
    tokens = compared.job.batch_tokens
    scaled = tokens * gpus // compared.job.gpus if tokens and compared.is_batch_given else None
    larger = replace(compared.job, gpus=gpus, batch_tokens=scaled)
    if given is not None and not given.is_sharded:
        given = replace(given, replicas=gpus // given.ranks_of_sequences)
    candidates = compared.least(larger) if given is None else [given]
    return (predict_memory(larger, machine, candidate) for candidate in candidates)
