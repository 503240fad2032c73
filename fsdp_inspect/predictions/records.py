"""What is a prediction, and what is its outcome? The records that are kept of both.

A prediction says what a plan will take before it runs, from one recorded run (its baseline). An
outcome says what it took, and whether the prediction held. Both are read leniently (unknown fields
are kept out of the way) and written strictly, as `run.json` is.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fsdp_inspect.trace.run import Record, RunManifest

PREDICTION_VERSION = 1
"""Raised when an older reader would misread a newer prediction or outcome."""
PREDICTION_FORMAT: Final = "fsdp-inspect prediction"
"""What the file calls itself."""


class Estimate(Record):
    """A predicted number with its interval."""

    value: NonNegativeInt
    low: NonNegativeInt
    high: NonNegativeInt

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"An interval goes from {self.low} to {self.high} around {self.value}. Expected "
                "low <= value <= high"
            )
        return self

    def distance(self, measured: float) -> float:
        """How far a number lies outside of the interval, from 0."""
        return max(self.low - measured, measured - self.high, 0)


class UnitExposure(Record):
    """How long a step waits for one unit's collectives."""

    fqn: str
    exposed_ns: NonNegativeInt


class Circumstances(Record):
    """What a run must share with another one for their times to be comparable."""

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
    """What the training script said about itself."""

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """Those of a run."""
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
    """What a plan is predicted to take, and what that rests on."""

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
    """What the plan changes, in words."""
    changes: list[str] = Field(default_factory=list)
    """Settings of the plan that differ from the baseline's (`units`: how the model is cut)."""
    rules: list[str] = Field(default_factory=list)
    """Tuning rules behind it; empty: the user's own idea."""
    run_id: str
    """The baseline."""
    circumstances: Circumstances
    """Of the baseline."""
    baseline_plan: dict[str, Any]
    plan: dict[str, Any]
    """The plan asked for (`trace.plan.Plan`), resolved."""
    bus_bytes_per_s: float | None = None
    """Of another network than the baseline's; None: its own."""
    latency_ns: float | None = None
    node_bus_bytes_per_s: float | None = None
    """The same of the link within a node, for groups that gather there."""
    node_latency_ns: float | None = None
    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`: how the baseline's device runs work."""
    num_steps: PositiveInt
    """Recorded steps that it rests on."""
    recorded_step_ns: PositiveInt
    """Measured: the mean of these steps."""
    replayed_step_ns: PositiveInt
    """The baseline's own plan, played: what the change is measured against."""
    replay_error: float
    """replayed / recorded - 1."""
    step_time_ns: Estimate
    paid_ns: int = 0
    """Part of it: compute that the plan adds by hiding more communication (RULES R24); below 0: it
    hides less."""
    replayed_exposed_ns: NonNegativeInt
    exposed_ns: Estimate
    """The interval is as wide as the step's: compute stays, waiting does not."""
    units: list[UnitExposure] = Field(default_factory=list)
    recorded_peak_bytes: int | None = None
    """Measured in the baseline's memory step; None, as the next two: it had none."""
    memory_error: float | None = None
    """Of the baseline's own peak, played."""
    peak_bytes: Estimate | None = None
    """Peak allocated; the interval is `memory_error` to both sides."""
    assumptions: list[str] = Field(default_factory=list)

    @property
    def change(self) -> float:
        """Of the step: predicted / replayed - 1."""
        return self.step_time_ns.value / self.replayed_step_ns - 1


class Ruling(StrEnum):
    """What became of a prediction."""

    HELD = "held"
    DID_NOT_HOLD = "did_not_hold"
    CANNOT_BE_TOLD = "cannot_be_told"
    """Neither can be told from what processes of one and the same plan differ by."""
    FAILED = "failed"
    """The plan did not run to its end."""
    NOT_COMPARABLE = "not_comparable"
    """Another plan ran, or under other circumstances: says nothing of the prediction."""


class Outcome(Record):
    """What became of a prediction when its plan ran."""

    schema_version: int = PREDICTION_VERSION
    prediction_id: str = Field(min_length=1)
    tool_version: str
    created: str
    """ISO 8601, UTC."""
    created_unix_ns: int
    ruling: Ruling
    sentence: str
    run_ids: list[str] = Field(default_factory=list)
    """The runs of the plan, one a process group."""
    baseline_run_ids: list[str] = Field(default_factory=list)
    """What they were measured against."""
    step_time_ns: int | None = None
    """Measured: the median over the runs of their typical steps."""
    measured_change: float | None = None
    """Of the step, against the baseline's runs."""
    step_error: float | None = None
    """(1 + measured change) / (1 + predicted change) - 1."""
    exposed_ns: int | None = None
    peak_bytes: int | None = None
    memory_error: float | None = None
    """measured / predicted - 1."""
    failure: str | None = None
    """Why the plan did not run to its end."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Predictions and outcomes that are kept with runs, in the order they were written."""

    predictions: tuple[Prediction, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be read, one sentence each."""
