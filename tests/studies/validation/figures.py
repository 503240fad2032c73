"""Compute the published figures of the predictions and compare them with their targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.studies.validation.advised import AdvisedOutcome
from tests.studies.validation.oracle import OracleOutcome
from tests.studies.validation.outcomes import Errors, Outcome
from tests.studies.validation.planned import ChoiceOutcome, FitOutcome, Reported

MEDIAN_STEP, HIGH_STEP, REPLAY, MEDIAN_MEMORY = 0.033, 0.08, 0.01, 0.02
ORACLE_MEDIAN, ORACLE_WORST = 0.01, 0.03
BEHIND_BEST, BEHIND_RECORDED = 0.03, 0.001
MEDIAN_LOOP, HIGH_LOOP = 0.05, 0.10
MOST_NOISE = 0.05
"""The noise of a machine above which nothing can be judged."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its highest allowed value."""

    part: str
    name: str
    found: float
    wanted: float | None = None
    """The highest allowed value; None: shown, not judged."""

    @property
    def is_missed(self) -> bool:
        """Whether the number exceeds the allowed value."""
        return self.wanted is not None and self.found > self.wanted


@dataclass(slots=True)
class Results:
    """The results of the parts; a part that did not run is empty."""

    played: list[OracleOutcome] = field(default_factory=list)
    predicted: list[OracleOutcome] = field(default_factory=list)
    virtual: list[Outcome] = field(default_factory=list)
    emulated: list[Outcome] = field(default_factory=list)
    advised: list[AdvisedOutcome] = field(default_factory=list)
    advised_in_time: list[AdvisedOutcome] = field(default_factory=list)
    remade: list[Outcome] = field(default_factory=list)
    rewrapped: list[Outcome] = field(default_factory=list)
    real: list[Outcome] = field(default_factory=list)
    limited: list[Outcome] = field(default_factory=list)
    loops: list[Outcome] = field(default_factory=list)
    choices: list[ChoiceOutcome] = field(default_factory=list)
    fits: list[FitOutcome] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Parts that could not run here, with the reason."""


ORACLE_PARTS = {
    "played": "torch's schedule, played",
    "predicted": "torch's schedule, predicted from a recording",
}
RUN_PARTS = {
    "virtual": "emulated network, fixed compute, virtual time",
    "emulated": "emulated network, fixed compute",
    "remade": "emulated nodes, virtual time",
    "rewrapped": "each wrap from each other one, virtual time",
    "real": "emulated network, real compute",
    "limited": "two ranks on a limited network",
    "loops": "models and loops of public projects, real compute",
}
ADVISED_PARTS = {
    "advised": "the plan that advise ranks first, virtual time",
    "advised_in_time": "the plan that advise ranks first, this machine's time",
}
PLANNED_PARTS = {
    "choices": "the choice of plan, virtual time",
    "fits": "the memory of plan, forecasts",
}


def all_figures(results: Results) -> list[Figure]:
    """All figures of the parts that ran."""
    return [
        figure
        for figures in (
            *(_oracle(name, getattr(results, part)) for part, name in ORACLE_PARTS.items()),
            _runs(RUN_PARTS["virtual"], results.virtual, noise=0.0),
            _runs(RUN_PARTS["emulated"], results.emulated, noise=0.0),
            _advised(ADVISED_PARTS["advised"], results.advised, noise=BEHIND_RECORDED),
            _advised(ADVISED_PARTS["advised_in_time"], results.advised_in_time, noise=MOST_NOISE),
            *(
                _runs(RUN_PARTS[part], found, noise=0.0)
                for part, found in (("remade", results.remade), ("rewrapped", results.rewrapped))
            ),
            *(
                _runs(RUN_PARTS[part], found, noise=_noise(found))
                for part, found in (("real", results.real), ("limited", results.limited))
            ),
            _runs(RUN_PARTS["loops"], results.loops, noise=0.0, median=MEDIAN_LOOP, high=HIGH_LOOP),
            _choices(results.choices),
            _fits(results.fits),
        )
        for figure in figures
    ]


def _oracle(part: str, outcomes: Sequence[OracleOutcome]) -> Iterator[Figure]:
    bound = [each for each in outcomes if each.is_host_bound]
    if bound:
        steps = Errors.of([each.step_error for each in bound])
        yield Figure(part, f"{len(bound)} with a host slower than the device, worst", steps.worst)
    outcomes = [each for each in outcomes if not each.is_host_bound]
    if not outcomes:
        return
    steps = Errors.of([each.step_error for each in outcomes])
    exposed = Errors.of([error for each in outcomes for error in each.exposed_errors])
    yield Figure(part, "step time, median error", steps.median, ORACLE_MEDIAN)
    yield Figure(part, "step time, worst error", steps.worst, ORACLE_WORST)
    yield Figure(part, "exposed by unit, median error (of the step)", exposed.median, ORACLE_MEDIAN)
    yield Figure(part, "exposed by unit, worst error (of the step)", exposed.worst, ORACLE_WORST)


def _runs(
    part: str,
    outcomes: Sequence[Outcome],
    *,
    noise: float,
    median: float = MEDIAN_STEP,
    high: float = HIGH_STEP,
) -> Iterator[Figure]:
    """Figures of plans that ran; with real compute, `noise` is added to the allowed values."""
    if not outcomes:
        return
    steps = Errors.of([each.step_error for each in outcomes])
    same = Errors.of([each.same_error for each in outcomes])
    change = Errors.of([each.change_error for each in outcomes])
    replay = Errors.of([each.replay_error for each in outcomes])
    memory = [each.memory_error for each in outcomes if each.memory_error is not None]
    yield Figure(part, "step time, median error", steps.median, median + noise)
    yield Figure(part, "step time, 90th percentile", steps.high, high + noise)
    yield Figure(part, "step time, worst error", steps.worst)
    outside = [not each.in_interval for each in outcomes]
    yield Figure(part, "steps outside the 90% interval", sum(outside) / len(outside))
    if same.worst > 0:  # not on virtual time
        yield Figure(part, "change to the baseline beside it, median error", change.median)
        yield Figure(part, "change to the baseline beside it, 90th percentile", change.high)
        yield Figure(part, "the same plan twice (A/A), median", same.median, MOST_NOISE)
    yield Figure(part, "recorded plan, worst error", replay.worst, REPLAY)
    if memory:
        errors = Errors.of(memory)
        yield Figure(part, "peak memory, median error", errors.median, MEDIAN_MEMORY)
        yield Figure(part, "peak memory, worst error", errors.worst)


def _noise(outcomes: Sequence[Outcome]) -> float:
    return Errors.of([each.same_error for each in outcomes]).median if outcomes else 0.0


def _advised(part: str, outcomes: Sequence[AdvisedOutcome], *, noise: float) -> Iterator[Figure]:
    """The difference of the plan to others; it may be slower than the recorded plan by `noise`."""
    if not outcomes:
        return
    for name, found, wanted in (
        ("best of the grid", max(each.behind_best for each in outcomes), BEHIND_BEST),
        ("recorded plan", max(each.behind_baseline for each in outcomes), noise),
    ):
        yield Figure(part, f"behind the {name}, worst", found, wanted)


def _choices(outcomes: Sequence[ChoiceOutcome]) -> Iterator[Figure]:
    if outcomes:
        part = PLANNED_PARTS["choices"]
        behind = max(each.behind_best for each in outcomes)
        errors = Errors.of([error for each in outcomes for error in each.step_errors])
        yield Figure(part, "behind the best of the grid, worst budget", behind, BEHIND_BEST)
        yield Figure(part, "step time, median error", errors.median)
        yield Figure(part, "step time, worst error", errors.worst)


def _fits(outcomes: Sequence[FitOutcome]) -> Iterator[Figure]:
    if outcomes:
        part = PLANNED_PARTS["fits"]
        errors = Errors.of([error for each in outcomes for error in each.errors])
        wrong = _wrong([each.reported for each in outcomes])
        unsettled = _wrong([each.unsettled for each in outcomes])
        yield Figure(part, "reported to fit, and does not", wrong, 0.0)
        yield Figure(part, "the same without forecasts (--no-forecast)", unsettled, 0.0)
        yield Figure(part, "allocated peak from formulas, median error", errors.median)
        yield Figure(part, "allocated peak from formulas, worst error", errors.worst)


def _wrong(reported: Sequence[Reported]) -> float:
    """The fraction of reported plans that do not fit."""
    return sum(each.num_wrong for each in reported) / max(sum(e.num_plans for e in reported), 1)


def as_json(results: Results, figures: Sequence[Figure]) -> Mapping[str, object]:
    """All results, for programs."""
    from dataclasses import asdict

    return {
        "figures": [{**asdict(each), "is_missed": each.is_missed} for each in figures],
        **asdict(results),
    }
