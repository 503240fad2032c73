"""Make predictions and outcomes by hand for tests."""

from typing import Any

from fsdp_inspect.simulation.predictions.records import (
    Circumstances,
    Estimate,
    Outcome,
    Prediction,
    Ruling,
)

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
