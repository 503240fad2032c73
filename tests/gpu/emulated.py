"""Compare many ranks, emulated on one GPU, with `simulate`.

The recorded plan runs twice. The difference of the two runs is the machine's noise, which bounds
the accuracy of any prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan
from fsdp_inspect.simulation.simulate import Simulation, simulate_plan
from fsdp_inspect.store.reader import StoredRun, open_run
from tests.gpu.outcome import Row, shown, unavailable
from tests.gpu.setting import (
    EIGHT_NODES,
    ONE_NODE,
    Setting,
    emulated_training,
    expect_healthy,
    make_recorder,
)
from tests.studies.benchmarks.figures import Figure

_MEMORY_STEP = 2
_STEP_AIM, _PEAK_AIM = 0.03, 0.01
_BASE, _AGAIN = "as recorded", "as recorded, again"


@dataclass(frozen=True, slots=True)
class Case:
    """One machine and its training."""

    emulation: str
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainer beyond `Setting.model`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One plan, in the form of the trainer and of the simulator."""

    name: str
    settings: dict[str, Any]
    changes: Changes


CASES = (
    Case(ONE_NODE),
    Case(EIGHT_NODES, {"preset": "llama-8b", "num_layers": 6, "seq_len": 2048, "batch_size": 1}),
)
VARIANTS = (
    Variant("every:2", {"wrap": "every:2"}, Changes(wrap="every:2")),
    Variant(
        "reshard_after_forward false",
        {"reshard_after_forward": "false"},
        Changes(reshard_after_forward=False),
    ),
    Variant("forward prefetch 1", {"forward_prefetch": 1}, Changes(forward_prefetch=1)),
)


def measure(setting: Setting) -> Iterator[Row]:
    """Run each plan, then predict it from the first run."""
    cases = (Case(ONE_NODE),) if setting.quick else CASES
    for number, case in enumerate(cases):
        variants = VARIANTS[:1] if setting.quick else VARIANTS
        plans = {_BASE: {}, **{each.name: each.settings for each in variants}, _AGAIN: {}}
        runs = {}
        for name, settings in plans.items():
            folder = f"{number}-{re.sub(r'[^a-z0-9]+', '-', name)}"
            runs[name] = _record(setting, case, folder, settings)
            yield _measured_row(setting, case, name, runs[name])
        yield _again_row(case, runs)
        yield from _predictions(setting, case, variants, runs)


def _record(setting: Setting, case: Case, folder: str, settings: dict[str, Any]) -> StoredRun:
    model = {} if setting.quick else case.model
    steps = 5 if setting.quick else 18
    with (
        emulated_training(setting, case.emulation, **{**model, **settings}) as workload,
        make_recorder(
            workload, setting.scratch / folder, memory_steps=[_MEMORY_STEP], warmup_steps=1
        ) as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(steps):
            loop.run_step(step)
        expect_healthy(recorder)
    return open_run(setting.scratch / folder)


def _measured_row(setting: Setting, case: Case, name: str, run: StoredRun) -> Row:
    times = measure_step_times(run).step_time_ns
    exposed, memory = measure_exposed(run), measure_memory(run)
    if times is None or exposed is None:
        raise RuntimeError(f"{case.emulation}, {name}: no step was timed.")
    peak = memory.peak_allocated_bytes
    fullest = "no allocator" if peak is None else f"peak {format_bytes(peak)}"
    return shown(
        Figure(
            name=f"{case.emulation}, {name}",
            value=(
                f"{format_ns(times.typical)} a step, {format_ns(exposed.exposed_ns)} exposed, "
                f"{fullest}"
            ),
            interval=f"{format_ns(times.p10)} to {format_ns(times.p90)}",
            how=(
                f"Emulated network, everything else measured on {setting.place}: median, p10 and "
                "p90 of the step time over timed steps; peak as the allocator counts it."
            ),
            numbers={
                "step_time_ns": times.typical,
                "exposed_ns": exposed.exposed_ns,
                "peak_allocated_bytes": -1 if peak is None else peak,
            },
        )
    )


def _again_row(case: Case, runs: dict[str, StoredRun]) -> Row:
    ratio = _step_ns(runs[_AGAIN]) / _step_ns(runs[_BASE]) - 1
    return shown(
        Figure(
            name=f"{case.emulation}, the same plan twice",
            value=f"{100 * ratio:+.2f} %",
            how="Measured: typical step times of the two runs as recorded, second / first - 1.",
            numbers={"ratio": ratio},
        )
    )


def _predictions(
    setting: Setting, case: Case, variants: tuple[Variant, ...], runs: dict[str, StoredRun]
) -> Iterator[Row]:
    base = runs[_BASE]
    plan = resolve_plan(observed_plan(base), base.manifest)
    for number, variant in enumerate(variants):
        name = f"{case.emulation}, prediction of {variant.name}"
        try:
            predicted = simulate_plan(base, apply_changes(plan, variant.changes))
        except MissingDataError as error:
            # The only error by which `simulate` reports that it cannot read such a run.
            yield unavailable(name, f"simulate: {error}")
            continue
        if number == 0:
            yield _replay_row(setting, case, predicted)
        yield _prediction_row(setting, name, predicted, _step_ns(runs[variant.name]))
        yield _peak_row(setting, name, predicted, runs[variant.name])


def _replay_row(setting: Setting, case: Case, simulation: Simulation) -> Row:
    return setting.judge.within(
        f"{case.emulation}, replay of the recorded plan",
        simulation.replay_error,
        0.01,
        how=(
            f"Simulated ({simulation.execution}) from {simulation.num_steps} steps recorded "
            f"on {setting.place}; replayed / recorded mean step - 1."
        ),
        numbers={"ratio": simulation.replay_error},
    )


def _prediction_row(setting: Setting, name: str, simulation: Simulation, measured_ns: int) -> Row:
    step_ns = simulation.predicted.step_time_ns
    error = step_ns / measured_ns - 1
    return setting.judge.within(
        name,
        error,
        _STEP_AIM,
        interval=f"{format_ns(simulation.low_ns)} to {format_ns(simulation.high_ns)}",
        how=(
            "Predicted from the run as recorded; predicted / measured typical step - 1. The "
            "interval is the prediction's own."
        ),
        numbers={"ratio": error, "predicted_ns": step_ns, "measured_ns": measured_ns},
    )


def _peak_row(setting: Setting, name: str, simulation: Simulation, run: StoredRun) -> Row:
    name = f"{name}: peak"
    predicted, measured = simulation.peak_bytes, measure_memory(run).peak_allocated_bytes
    if predicted is None or measured is None:
        return unavailable(name, simulation.memory_refusal or "the run has no measured peak.")
    error = predicted / measured - 1
    return setting.judge.within(
        name,
        error,
        _PEAK_AIM,
        interval=f"{format_bytes(predicted)} against {format_bytes(measured)}",
        how=(
            f"Predicted peak allocated of the plan / its peak as measured on {setting.place}, "
            "- 1. On a GPU, the allocator counts."
        ),
        numbers={"ratio": error, "predicted_bytes": predicted, "measured_bytes": measured},
    )


def _step_ns(run: StoredRun) -> int:
    times = measure_step_times(run).step_time_ns
    assert times is not None
    return times.typical
