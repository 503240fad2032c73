"""Define the records of predictions and their outcomes.

A prediction states the step time and the memory of a plan before it runs, from one recorded run
(the baseline). An outcome states the measured numbers and whether the prediction held. Readers
ignore unknown fields, and writers are strict, as for `run.json`.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fsdp_inspect.trace.records import Record
from fsdp_inspect.trace.run import RunManifest

PREDICTION_VERSION = 1
"""Increased when an older reader would misread a newer prediction or outcome."""
PREDICTION_FORMAT: Final = "fsdp-inspect prediction"
"""The format name in the file."""


class Estimate(Record):
    """A predicted number with its interval."""

    value: NonNegativeInt
    low: NonNegativeInt
    high: NonNegativeInt

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"Invalid interval: {self.low} to {self.high} around {self.value}. Expected "
                "low <= value <= high"
            )
        return self

    def distance(self, measured: float) -> float:
        """The distance of a number to the interval; 0 inside."""
        return max(self.low - measured, measured - self.high, 0)


class UnitExposure(Record):
    """The exposed time of a step for one unit's collectives."""

    fqn: str
    exposed_ns: NonNegativeInt


class Circumstances(Record):
    """Properties that two runs must share for their times to be comparable."""

    model: str
    num_parameters: int
    world_size: int
    backend: str
    device: str
    source: str
    """`recorded`, `emulated` or `imported`."""
    torch: str
    emulation: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration that the training script logged."""

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """The circumstances of a run."""
        return cls(
            model=manifest.model.class_name,
            num_parameters=manifest.model.num_parameters,
            world_size=manifest.world_size,
            backend=manifest.backend,
            device=manifest.device_name or manifest.device_type,
            source=manifest.source,
            torch=manifest.versions.get("torch", ""),
            emulation=manifest.emulation,
            config=manifest.config,
        )


class Prediction(Record):
    """The prediction of a plan, with its source and its assumptions."""

    format: Literal["fsdp-inspect prediction"] = PREDICTION_FORMAT
    schema_version: int = PREDICTION_VERSION
    prediction_id: str = Field(min_length=1)
    tool_version: str
    created: str
    """ISO 8601, UTC."""
    created_unix_ns: int
    made_by: str
    """The command: `simulate`, `advise` or `tune`."""
    what: str
    """The changes of the plan in words."""
    changes: list[str] = Field(default_factory=list)
    """Settings of the plan that differ from the baseline's (`units`: the cut of the model)."""
    rules: list[str] = Field(default_factory=list)
    """Tuning rules behind the plan; empty: the user chose the plan."""
    run_id: str
    """The baseline."""
    circumstances: Circumstances
    """The circumstances of the baseline."""
    run_delay_ratio: float | None = None
    """`analysis.trust.RunDelay.ratio` of the baseline; None: unknown, as in earlier files."""
    baseline_plan: dict[str, Any]
    plan: dict[str, Any]
    """The resolved predicted plan (`trace.plan.Plan`)."""
    bus_bytes_per_s: float | None = None
    """Bandwidth of a network other than the baseline's; None: the baseline's own."""
    latency_ns: float | None = None
    node_bus_bytes_per_s: float | None = None
    """Bandwidth of the link within a node, for groups that gather there."""
    node_latency_ns: float | None = None
    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`: how the baseline's device runs work."""
    num_steps: PositiveInt
    """The number of recorded steps behind the prediction."""
    recorded_step_ns: PositiveInt
    """Measured mean of these steps."""
    replayed_step_ns: PositiveInt
    """Simulated step of the baseline's own plan. The predicted change is relative to it."""
    replay_error: float
    """replayed / recorded - 1."""
    step_time_ns: Estimate
    paid_ns: int = 0
    """Part of `step_time_ns`: compute that the plan adds by hiding more communication (rule R24);
    negative: it hides less."""
    replayed_exposed_ns: NonNegativeInt
    exposed_ns: Estimate
    """Its interval is as wide as the step's, because only waits vary."""
    units: list[UnitExposure] = Field(default_factory=list)
    recorded_peak_bytes: int | None = None
    """Measured in the baseline's memory step; None, like the next two: it had none."""
    memory_error: float | None = None
    """Simulated / measured peak of the baseline, - 1."""
    peak_bytes: Estimate | None = None
    """Peak allocated, with the interval of `Trust.peak_range_bytes`."""
    assumptions: list[str] = Field(default_factory=list)
    caveats: list[str] = Field(default_factory=list)
    """Reasons to doubt the prediction, one sentence each."""

    @property
    def change(self) -> float:
        """Predicted change of the step: predicted / replayed - 1."""
        return self.step_time_ns.value / self.replayed_step_ns - 1


class Ruling(StrEnum):
    """The outcome of a verification."""

    HELD = "held"
    DID_NOT_HOLD = "did_not_hold"
    CANNOT_BE_TOLD = "cannot_be_told"
    """Not significant: process noise is larger than the difference."""
    FAILED = "failed"
    """The plan did not run to completion."""
    NOT_COMPARABLE = "not_comparable"
    """Another plan ran, or the circumstances differ. The prediction is not judged."""


class Outcome(Record):
    """The outcome of a prediction after its plan ran."""

    schema_version: int = PREDICTION_VERSION
    prediction_id: str = Field(min_length=1)
    tool_version: str
    created: str
    """ISO 8601, UTC."""
    created_unix_ns: int
    ruling: Ruling
    sentence: str
    run_ids: list[str] = Field(default_factory=list)
    """The runs of the plan, one per process group."""
    baseline_run_ids: list[str] = Field(default_factory=list)
    """The runs of the baseline."""
    step_time_ns: int | None = None
    """Measured: the median over the runs of their typical steps."""
    measured_change: float | None = None
    """Measured change of the step against the baseline's runs."""
    step_error: float | None = None
    """(1 + measured change) / (1 + predicted change) - 1."""
    exposed_ns: int | None = None
    peak_bytes: int | None = None
    memory_error: float | None = None
    """measured / predicted - 1."""
    failure: str | None = None
    """The reason why the plan did not run to completion."""
    has_other_cause: bool = False
    """Whether something other than the plan may have changed the times."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The predictions and outcomes of a prediction history, in the order of writing."""

    predictions: tuple[Prediction, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on unreadable lines, one sentence each."""


def now() -> dict[str, str | int]:
    """The current time in the form of the records."""
    unix_ns = time.time_ns()
    moment = datetime.fromtimestamp(unix_ns / 1e9, tz=UTC)
    return {"created": moment.isoformat(timespec="seconds"), "created_unix_ns": unix_ns}
