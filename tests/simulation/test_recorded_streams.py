"""A run on streams predicts another plan, with torch's FSDP2 and our recorder on virtual time.

The recorder's CUDA path records a plan. The prediction for another plan is compared with torch,
which runs that plan on the same virtual device. Only the hardware is not real.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.analysis.contention import measure_contention
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import Execution, measure_work
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan, UnitPlan
from tests.builders import InMemoryRun, RunBuilder
from tests.recording.virtual_training import Replay

SPEEDS = {
    "well hidden": {"gather_ms": 1, "scatter_ms": 1},
    "just hidden": {"gather_ms": 3, "scatter_ms": 3},
    "exposed": {"gather_ms": 6, "scatter_ms": 6},
    "slow reductions": {"gather_ms": 2, "scatter_ms": 9},
    "host-bound": {"gather_ms": 3, "scatter_ms": 3, "host_ms": 6},
}


def keep_unsharded(model: Any) -> None:
    for layer in model.layers:
        layer.set_reshard_after_forward(False)


def prefetch_two(model: Any) -> None:
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:2])
    for at, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 3])


CHANGES: dict[str, tuple[Changes, Callable[[Any], None]]] = {
    "reshard_after_forward=False": (Changes(reshard_after_forward=False), keep_unsharded),
    "forward_prefetch=2": (Changes(forward_prefetch=2), prefetch_two),
}


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def step_ns(replay: Replay) -> int:
    events = replay.events
    steps = events.where(events.kind == EventKind.STEP)
    return int((steps.end_ns - steps.start_ns)[-1])


def as_run(replay: Replay) -> InMemoryRun:
    plan = Plan(units=tuple(UnitPlan(modules=(name,)) for name in replay.units))
    builder = RunBuilder(replay.units, plan=plan.to_dict(), device_type="cuda", warmup_steps=1)
    builder.rank(0).step(0, 0, 1)
    return replace(builder.build(), event_tables={0: replay.events})


@pytest.fixture(scope="module", params=SPEEDS, ids=str)
def speed(request: pytest.FixtureRequest) -> tuple[dict[str, Any], InMemoryRun]:
    settings: dict[str, Any] = SPEEDS[request.param]
    return settings, as_run(Replay(**settings))


def test_a_run_on_streams_plays_again_in_its_own_time(speed: tuple[dict[str, Any], InMemoryRun]):
    work = measure_work(speed[1])
    assert work.execution is Execution.STREAM
    assert work.simulate().duration_ns == pytest.approx(work.step_time_ns, abs=1000)


@pytest.mark.parametrize("name", CHANGES)
def test_another_plan_takes_what_torch_takes_with_it(
    speed: tuple[dict[str, Any], InMemoryRun], name: str
):
    settings, run = speed
    changes, prepare = CHANGES[name]
    truth = step_ns(Replay(**settings, prepare=prepare))
    predicted = simulate_plan(run, apply_changes(Plan.from_dict(run.manifest.plan), changes))
    assert predicted.predicted.step_time_ns == pytest.approx(truth, rel=0.01)


def issue_asynchronously(model: Any) -> None:
    model._set_unshard_async_op(True)
    prefetch_two(model)


def test_a_run_with_asynchronous_gathers_is_not_simulated_from_upper_bounds() -> None:
    run = as_run(Replay(gather_ms=1, scatter_ms=1, prepare=issue_asynchronously))
    with pytest.raises(MissingDataError, match=r"cannot be simulated.*without unshard_async_op"):
        simulate_plan(run, Plan.from_dict(run.manifest.plan))


def test_contention_is_not_told_from_upper_bounds() -> None:
    run = as_run(Replay(gather_ms=1, scatter_ms=1, prepare=issue_asynchronously))
    contention = measure_contention(run)
    assert contention is not None
    assert contention.slowdown is None
    assert contention.reason is not None
    assert contention.reason.startswith("The ends of asynchronous collectives were not measured")
