"""Make predictions and outcomes by hand for tests."""

from typing import Any

from fsdp_inspect.simulation.predictions.records import (
    Circumstances,
    Estimate,
    Outcome,
    Prediction,
    Ruling,
)
from fsdp_inspect.trace.plan import Plan, UnitPlan
from tests.builders import InMemoryRun, RunBuilder

MS = 1_000_000
CIRCUMSTANCES = Circumstances(
    model="Decoder",
    num_parameters=1000,
    world_size=8,
    backend="nccl",
    device="H100",
    source="recorded",
    torch="2.13.0",
)
UNITS = ("layers.0", "layers.1")
PLAN = Plan(units=tuple(UnitPlan(modules=(name,)) for name in UNITS)).to_dict()


def prediction(**fields: Any) -> Prediction:
    """Recorded: 100 ms a step, 30 ms exposed. Predicted: 80 ms (78 to 82), 10 ms exposed."""
    plain: dict[str, Any] = {
        "prediction_id": "p1",
        "tool_version": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "created_unix_ns": 1,
        "made_by": "advise",
        "what": "Prefetch 1 unit ahead in forward",
        "changes": ["forward_prefetch"],
        "run_id": "before",
        "circumstances": CIRCUMSTANCES,
        "baseline_plan": {},
        "plan": {},
        "rank": 0,
        "execution": "host",
        "num_steps": 4,
        "recorded_step_ns": 100 * MS,
        "replayed_step_ns": 100 * MS,
        "replay_error": 0.0,
        "step_time_ns": Estimate(value=80 * MS, low=78 * MS, high=82 * MS),
        "replayed_exposed_ns": 30 * MS,
        "exposed_ns": Estimate(value=10 * MS, low=8 * MS, high=12 * MS),
    }
    return Prediction(**{**plain, **fields})


def outcome(**fields: Any) -> Outcome:
    """An outcome: the prediction `p1` held with an error of 1%."""
    plain: dict[str, Any] = {
        "prediction_id": "p1",
        "tool_version": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "created_unix_ns": 2,
        "ruling": Ruling.HELD,
        "sentence": "Held.",
        "step_error": 0.01,
    }
    return Outcome(**{**plain, **fields})


def prediction_from(before: InMemoryRun, **fields: Any) -> Prediction:
    """`prediction` of the plan of `run_of` for the machine of a run."""
    circumstances = Circumstances.of(before.manifest)
    return prediction(circumstances=circumstances, baseline_plan=PLAN, plan=PLAN, **fields)


def run_of(run_id: str, *, compute: int, waiting: int, loss: float = 1.0) -> InMemoryRun:
    """Nine steps with a loss, each with a forward and a backward of `compute` ms together."""
    builder = RunBuilder(UNITS, run_id=run_id, plan=PLAN)
    rank = builder.rank(0)
    length, half = (compute + waiting) * MS, compute * MS // 2
    for number in range(9):
        at = number * length
        rank.step(number, at, at + length)
        rank.loss(loss)
        rank.all_gather("layers.0", at, at + waiting * MS, need=at)
        rank.forward("layers.0", at + waiting * MS, at + waiting * MS + half)
        rank.backward("layers.0", at + waiting * MS + half, at + length)
    return builder.build()
