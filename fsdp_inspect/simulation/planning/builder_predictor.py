"""Predict the settings of a builder, each from a forecast: the fastest that fit, and the fits.

The first forecasts have one and two sequences for each checkpointing, and the other keywords at
their least memory. Operations grow with the batch. The peak is the largest of many moments, and the
memory of each grows linearly with the batch. So the line through two batches is a lower bound of
larger ones. The search forecasts each candidate that the bounds do not reject.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_inspect.analysis.memory.fit import (
    Allowance,
    DeviceOverhead,
    FitVerdict,
    judge_fit,
)
from fsdp_inspect.analysis.memory.overview import MemoryOverview, measure_memory_overview
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import ConfigError, ForecastError, FsdpInspectError
from fsdp_inspect.simulation.planning.candidates import (
    KNOBS,
    REMEDIES,
    BuilderCandidate,
    list_builder_candidates,
)
from fsdp_inspect.simulation.planning.estimates import PlannedValue
from fsdp_inspect.simulation.planning.forecast_step import ForecastRow, ForecastStep, row_of
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.prediction import (
    FORECAST_RATIO,
    Bounds,
    PlannedMemory,
    PlanPrediction,
    Training,
    derive_prediction,
    judge_forecast,
    spread_times,
)
from fsdp_inspect.simulation.planning.search import (
    CapacityPlan,
    Predictor,
    Shortfall,
    search,
)
from fsdp_inspect.simulation.planning.workload import WHOLE_ENDS, WHOLE_RATIO, Speed
from fsdp_inspect.trace.run import RunSource

MakeForecast = Callable[[int, Mapping[str, Any]], ForecastStep]
"""Makes the forecast of a number of GPUs with changed keywords; raises `ForecastError`."""
_FORECAST_MICROBATCHES = 2
"""Further microbatches change neither the peak nor the time of each."""


class BuilderPredictor(Predictor[BuilderCandidate]):
    """Predicts a builder's candidates on a number of GPUs."""

    def __init__(
        self,
        forecast: MakeForecast,
        machine: PlannedMachine,
        *,
        gpus: int,
        tokens: float,
        seq_len: int | None,
    ) -> None:
        """`seq_len`: tokens of a sequence; None: as the builder states."""
        self.machine = machine
        self.gpus = gpus
        self._tokens, self._seq_len = tokens, seq_len
        self._make = forecast
        self._steps: dict[tuple[tuple[str, Any], ...], ForecastStep] = {}

    def bound(self, candidate: BuilderCandidate) -> Bounds:
        """Bound a candidate by the line through the forecasts of one and two sequences."""
        one, two = (self.step(least_memory(candidate, batch_size=size)) for size in (1, 2))
        batch = candidate.batch_size or 1
        first, second = one.peak_allocated_bytes, two.peak_allocated_bytes
        size = first + (batch - 1) * max(second - first, 0)
        varied = one.vary(
            candidate.batch_size or one.batch_size,
            reshards=candidate.reshards,
            offloads=_offload(candidate),
        )
        return Bounds(
            self._step_ns(varied, candidate, self.machine.speed)
            / self._tokens_of_step(one, candidate),
            size * (1 - FORECAST_RATIO),
        )

    def memory(self, candidate: BuilderCandidate) -> PlannedMemory:
        """Forecast the memory of a candidate, and judge it."""
        return judge_forecast(self.machine, self.step(candidate))

    def ns_per_token(self, candidate: BuilderCandidate) -> float:
        """Predict the time of a step for each of its tokens."""
        step = self.step(candidate)
        time = self._step_ns(step, candidate, self.machine.speed)
        return time / self._tokens_of_step(step, candidate)

    def predict(
        self, candidate: BuilderCandidate, memory: PlannedMemory | None = None
    ) -> PlanPrediction:
        """Predict all values of a candidate."""
        step = self.step(candidate)
        tokens = step.tokens_of_microbatch(self._seq_len)
        training = Training(
            gpus=self.gpus,
            tokens=self._tokens,
            tokens_of_step=self._tokens_of_step(step, candidate),
            flops_per_token=step.model_flops * self.gpus / tokens,
            mfu_text="MFU counts three times the operations of the forward",
        )
        times = [self._step_ns(step, candidate, speed) for speed in self.machine.speeds]
        known = memory or judge_forecast(self.machine, step)
        time = spread_times(times, self.machine)
        if not self.machine.is_calibrated:
            gpu = self.machine.speed.gpu
            time = replace(
                time,
                assumption=f"All operations together run at {WHOLE_RATIO:.0%} of the {gpu.name}'s "
                f"rate for large matrix products: the median of published trainings, of which 80% "
                f"are between {WHOLE_RATIO * WHOLE_ENDS[0]:.0%} and "
                f"{WHOLE_RATIO * WHOLE_ENDS[1]:.0%}.",
            )
        return derive_prediction(training, self.machine, candidate, time, known)

    def on(self, machine: PlannedMachine) -> "BuilderPredictor":
        """The same forecasts on machines with other budgets."""
        other = BuilderPredictor(
            self._make, machine, gpus=self.gpus, tokens=self._tokens, seq_len=self._seq_len
        )
        other._steps = self._steps
        return other

    def with_batch(
        self, candidate: BuilderCandidate, batch_tokens: int, *, can_accumulate: bool
    ) -> BuilderCandidate | None:
        """The candidate with the microbatches that make a batch; None: no whole number does."""
        one = self.step(least_memory(candidate))
        count, rest = divmod(batch_tokens, self._tokens_of_step(one, candidate))
        if rest or not count or (count > 1 and not can_accumulate):
            return None
        if not can_accumulate:
            return candidate
        return BuilderCandidate((*candidate.items, ("microbatches", count)))

    def step(self, candidate: BuilderCandidate) -> ForecastStep:
        """The forecast of a candidate, made once.

        Raises:
            ForecastError: The forecast fails.
        """
        few = min(candidate.microbatches, _FORECAST_MICROBATCHES)
        items = candidate.change(microbatches=few).items
        if items not in self._steps:
            self._steps[items] = self._make(self.gpus, dict(items))
        return self._steps[items]

    def _tokens_of_step(self, step: ForecastStep, candidate: BuilderCandidate) -> int:
        whole = step.tokens_of_microbatch(self._seq_len)
        if candidate.batch_size is not None:
            whole = whole // step.batch_size * candidate.batch_size
        return whole * candidate.microbatches

    def _step_ns(self, step: ForecastStep, candidate: BuilderCandidate, speed: Speed) -> int:
        ranks = min(self.machine.speed.links.gpus_per_node, self.gpus)
        return step.step_ns(speed, candidate.microbatches, ranks)


def least_memory(candidate: BuilderCandidate, **changes: Any) -> BuilderCandidate:
    """The candidate with the keywords that need the least memory, checkpointing apart."""
    least = {name: values[0] for name, values in KNOBS.items() if name != "checkpointing"}
    return candidate.change(**{**least, "microbatches": 1, **changes})


def find_knobs(
    forecast: MakeForecast,
    gpus: int,
    accepted: Sequence[str] | None,
    given: Mapping[str, Any],
) -> tuple[dict[str, tuple[Any, ...]], list[str]]:
    """The keywords to vary with the values that the builder can build, and why others are out.

    Args:
        forecast: Makes a forecast.
        gpus: The number of GPUs.
        accepted: The builder's keywords; None: any.
        given: The keywords that the user set; they are not varied.

    Raises:
        ForecastError: The forecast with the builder's own values fails.
    """
    open_to = [n for n in KNOBS if n not in given and (accepted is None or n in accepted)]
    usable = {name: KNOBS[name] for name in open_to}
    least: dict[str, Any] = {"batch_size": 1} if "batch_size" in usable else {}
    notes: list[str] = []
    for name in reversed(open_to):
        if name == "batch_size":
            continue
        usable[name], refused = _try_values(lambda setting: forecast(gpus, setting), least, name)
        notes += refused
        if usable[name]:
            least[name] = usable[name][0]
    forecast(gpus, least)
    return {name: values for name, values in usable.items() if values}, notes


def _try_values(
    forecast: Callable[[Mapping[str, Any]], object], least: Mapping[str, Any], name: str
) -> tuple[tuple[Any, ...], list[str]]:
    """The values of a keyword that the builder can build, and why the others are out."""
    usable, notes = [], []
    for value in KNOBS[name]:
        try:
            forecast({**least, name: value})
            usable.append(value)
        except ForecastError as error:
            notes.append(f"Not compared: {name}={value}. {shorten(str(error), 300)}")
    return tuple(usable), notes


def _offload(candidate: BuilderCandidate) -> bool | None:
    return candidate.offload if "offload" in candidate.settings else None


# --- Answer a capacity question for a builder of the user's own: `--model module:function`.


def make_builder_plan(  # noqa: PLR0913 - the parts of one question
    forecast: MakeForecast,
    machine: PlannedMachine,
    preset: str,
    *,
    gpus: int,
    tokens: float,
    seq_len: int | None,
    batch_tokens: int | None,
    accepted: Sequence[str] | None,
    given: Mapping[str, Any],
) -> CapacityPlan:
    """Find the fastest settings of a builder that fit a budget.

    Args:
        forecast: Makes a forecast of the builder.
        machine: The machines with their budgets.
        preset: The name of the machines' preset.
        gpus: The number of GPUs.
        tokens: Tokens of the whole training.
        seq_len: Tokens of a sequence; None: as the builder states.
        batch_tokens: Tokens of a step over all GPUs; None: free, with one microbatch.
        accepted: The builder's keywords; None: any.
        given: The keywords that the user set.

    Raises:
        ForecastError: A forecast fails.
        ConfigError: No candidate has the requested batch, or the preset has too few GPUs.
    """
    machine.speed.links.ring(gpus, 1)  # rejects a preset without a network
    knobs, notes = find_knobs(forecast, gpus, accepted, given)
    predictor = BuilderPredictor(forecast, machine, gpus=gpus, tokens=tokens, seq_len=seq_len)
    candidates = list(list_builder_candidates(knobs))
    smallest = least_memory(candidates[0])
    first = predictor.step(smallest)
    if batch_tokens is not None:
        can_accumulate = accepted is None or "microbatches" in accepted
        listed = [
            predictor.with_batch(each, batch_tokens, can_accumulate=can_accumulate)
            for each in candidates
        ]
        candidates = [each for each in listed if each is not None]
    if not candidates:
        raise ConfigError(
            f"Invalid --batch-tokens {batch_tokens}: no batch of the builder on {gpus} GPUs makes "
            f"it. Expected a multiple of {first.tokens_of_microbatch(seq_len)} tokens and, for "
            "more than one microbatch, a keyword microbatches. Change --batch-tokens, or add the "
            "keyword to the builder."
        )
    found = search(predictor, candidates)
    best = found.best.candidate if found.best is not None else None
    chosen = predictor.step(best) if isinstance(best, BuilderCandidate) else None
    return CapacityPlan(
        model=first.manifest.name,
        num_parameters=first.manifest.model.num_parameters,
        gpus=gpus,
        gpu=machine.speed.gpu.name,
        preset=preset,
        seq_len=first.seq_len(seq_len),
        tokens=tokens,
        memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        found=found,
        shortfall=_find_shortfall(forecast, predictor, smallest) if best is None else None,
        notes=tuple(notes),
        plan=None if chosen is None else chosen.plan,
        job=None,
    )


def _find_shortfall(
    forecast: MakeForecast, predictor: BuilderPredictor, smallest: BuilderCandidate
) -> Shortfall:
    """What the settings with the least memory need."""
    unlimited = predictor.on(replace(predictor.machine, memory_bytes=1 << 62))
    memory = unlimited.memory(smallest)
    gpus, size = None, predictor.gpus * 2
    while size <= predictor.machine.most_gpus and gpus is None:
        larger = BuilderPredictor(
            forecast, predictor.machine, gpus=size, tokens=1, seq_len=None
        ).memory(smallest)
        gpus = size if larger.verdict is FitVerdict.FITS else None
        size *= 2
    fits = memory.verdict is FitVerdict.FITS
    return Shortfall(memory.device.high if fits else None, gpus)


# --- Find the fewest ranks, the largest batch, and the changes that fit: `plan memory --fit`.
#
# Every result is a real forecast. Interpolation only chooses the next forecast. As in a plan, a
# forecast fits if the high end of its need is within the memory.

WORLD_SIZES: tuple[int, ...] = tuple(1 << power for power in range(13))
"""1 to 4096: the world sizes in the search for the fewest ranks."""
MOST_SEQUENCES = 4096
"""Upper limit of the search for the largest batch."""
Need = Callable[[int, Mapping[str, Any]], PlannedValue]
"""Returns the memory that a device needs for a world size and changed settings."""


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change of settings and its forecast."""

    settings: Mapping[str, Any]
    required_bytes: int | None
    """The need of a device, with the allowance; None: the forecast failed."""
    saved_bytes: int | None
    """By how much the need is lower than with the given configuration; None: as above."""
    fits: bool
    """Whether it is certain to fit."""
    problem: str | None
    """The reason why the forecast failed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The configurations that fit into a device's memory."""

    limit_bytes: int
    world_size: int
    """World size of the batch and of the remedies."""
    required_bytes: int
    """Need of a device with the given configuration on `world_size` ranks, with the allowance."""
    low_bytes: int
    high_bytes: int
    """The interval of this need."""
    verdict: FitVerdict
    fits: bool
    """Whether the given configuration is certain to fit."""
    smallest_world_size: int | None
    """Smallest of `WORLD_SIZES` on which the given configuration is certain to fit; 0: none; None:
    unknown."""
    largest_batch_size: int | None
    """Largest batch per rank that is certain to fit on `world_size` ranks; 0: none; None: unknown.
    """
    remedies: tuple[FittingChange, ...]
    """Remedies, tried in order until one is certain to fit; empty if the given configuration is."""
    unknown: tuple[str, ...]
    """Unknown results, one sentence each, with the reason and a remedy."""


def find_fit(
    need: Need, limit_bytes: int, *, world_size: int, accepted: Sequence[str] | None
) -> Fit:
    """Make forecasts until the configurations that fit are known.

    Args:
        need: Makes a forecast.
        limit_bytes: Memory of the device.
        world_size: World size of the batch and of the remedies.
        accepted: The settings that can be changed; None: all.

    Raises:
        FsdpInspectError: The forecast of the given configuration fails.
    """
    given = need(world_size, {})
    search = _Search(need, limit_bytes, world_size, accepted)
    return Fit(
        limit_bytes=limit_bytes,
        world_size=world_size,
        required_bytes=round(given.value),
        low_bytes=round(given.low),
        high_bytes=round(given.high),
        verdict=judge_fit(given.low, given.high, limit_bytes),
        fits=search.fits,
        smallest_world_size=search.smallest_world_size(),
        largest_batch_size=search.largest_batch(),
        remedies=() if search.fits else search.remedies(round(given.value)),
        unknown=tuple(search.unknown),
    )


class _Search:
    """The three searches. If a forecast fails, only the result of its own search is unknown."""

    def __init__(
        self, need: Need, limit: int, world_size: int, accepted: Sequence[str] | None
    ) -> None:
        self._need = need
        self._limit = limit
        self._world_size = world_size
        self._accepted = accepted
        self.fits = self._most(world_size, {}) <= limit
        self.unknown: list[str] = []

    def _most(self, world_size: int, settings: Mapping[str, Any]) -> float:
        """The high end of the need."""
        return self._need(world_size, settings).high

    def smallest_world_size(self) -> int | None:
        """Find the smallest world size that fits, by bisection: memory falls with more ranks."""
        known, fits = self._world_size, self.fits
        candidates = [size for size in WORLD_SIZES if (size < known if fits else size > known)]
        low, high = 0, len(candidates)
        try:
            while low < high:
                middle = (low + high) // 2
                if self._most(candidates[middle], {}) <= self._limit:
                    high = middle
                else:
                    low = middle + 1
        except FsdpInspectError as error:
            self.unknown.append(
                f"The fewest ranks are unknown: the forecast for {candidates[middle]} ranks "
                f"failed. {error}"
            )
            return None
        if low < len(candidates):
            return candidates[low]
        return known if fits else 0

    def largest_batch(self) -> int | None:
        """Find the largest batch that fits. A line through two forecasts gives the next guess."""
        if not self._can_set({"batch_size": 1}):
            self.unknown.append(
                "The largest batch is unknown: the builder has no keyword batch_size. Add it to "
                "the function."
            )
            return None
        try:
            return self._search_batch()
        except FsdpInspectError as error:
            self.unknown.append(f"The largest batch is unknown. {error}")
            return None

    def _search_batch(self) -> int:
        def most_with(batch_size: int) -> float:
            return self._most(self._world_size, {"batch_size": batch_size})

        held = {1: most_with(1)}
        if held[1] > self._limit:
            return 0
        held[2] = most_with(2)
        while True:
            low = max(size for size in held if held[size] <= self._limit)
            high = min(
                (size for size in held if held[size] > self._limit), default=MOST_SEQUENCES + 1
            )
            if high - low <= 1:
                return low
            guess = _line(held, self._limit)
            # If the guess is known to fit, try the next size, but stay inside the open interval.
            size = min(max(guess if guess > low else guess + 1, low + 1), high - 1)
            held[size] = most_with(size)

    def remedies(self, given: int) -> tuple[FittingChange, ...]:
        """Try the remedies by cost until one fits; `given`: the need without them, bytes."""
        tried: list[FittingChange] = []
        for settings in filter(self._can_set, REMEDIES):
            try:
                found = self._need(self._world_size, settings)
            except FsdpInspectError as error:
                tried.append(FittingChange(settings, None, None, fits=False, problem=str(error)))
                continue
            fits, need = found.high <= self._limit, round(found.value)
            tried.append(FittingChange(settings, need, given - need, fits=fits, problem=None))
            if tried[-1].fits:
                break
        if not tried:
            names = sorted({name for settings in REMEDIES for name in settings})
            self.unknown.append(
                f"No change was tried: the builder has none of the keywords {', '.join(names)}. "
                "Expected at least one of them. Add it to the function."
            )
        return tuple(tried)

    def _can_set(self, settings: Mapping[str, Any]) -> bool:
        return self._accepted is None or all(name in self._accepted for name in settings)


def _line(held: Mapping[int, float], limit: int) -> int:
    """Return where the line through the largest two batches reaches the limit."""
    first, second = sorted(held)[-2:]
    slope = (held[second] - held[first]) / (second - first)
    return MOST_SEQUENCES if slope <= 0 else int(first + (limit - held[first]) / slope)


@dataclass(frozen=True, slots=True)
class ForecastTable:
    """Forecasts of one model under one plan."""

    name: str
    source: str
    """Always `predicted`."""
    num_parameters: int
    torch_version: str
    rows: tuple[ForecastRow, ...]
    """One row for each world size, in the given order."""
    allowance_bytes: int | None
    """Device memory that is added because a forecast leaves it out; None: neither given nor
    measured."""
    allowance: DeviceOverhead | Allowance | None
    """The measurement or the estimate of `allowance_bytes`; None: the value was given, or there is
    none."""
    fit: Fit | None
    """The configurations that fit; None: no memory limit was given."""
    memory: MemoryOverview
    """The complete memory analysis of the first world size."""
    notes: tuple[str, ...]


def collect_forecasts(
    runs: Sequence[RunSource],
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    allowance_bytes: int | None = None,
    allowance: DeviceOverhead | Allowance | None = None,
    fit: Fit | None = None,
) -> ForecastTable:
    """Collect forecasts of one model.

    Args:
        runs: One forecast for each world size, at least one.
        settings: The settings of the caching allocator.
        allowance_bytes: Device memory to add, because forecasts leave it out.
        allowance: The measurement or the estimate of `allowance_bytes`, for the first run.
        fit: The configurations that fit into a device's memory.
    """
    first = runs[0].manifest
    return ForecastTable(
        name=first.name,
        source=first.source,
        num_parameters=first.model.num_parameters,
        torch_version=first.versions.get("torch", ""),
        rows=tuple(row_of(run, settings) for run in runs),
        allowance_bytes=allowance_bytes,
        allowance=allowance,
        fit=fit,
        memory=measure_memory_overview(runs[0]),
        notes=tuple(runs[0].notes),
    )
