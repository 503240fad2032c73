"""Decide whether a run is comparable with a prediction.

A difference in the compute or the messages of a step makes a run incomparable. A difference that
may only shift times a little is a caveat.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_inspect.comparison.plan_differences import PlanDifference, find_plan_differences
from fsdp_inspect.comparison.settings import NAMES_AND_PLACES
from fsdp_inspect.errors import MissingDataError, StoreError
from fsdp_inspect.simulation.predictions.records import Circumstances, Prediction
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN, Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus

_WORDS_OF_SHAPE = ("batch", "seq", "length", "compile", "dim", "layers", "heads", "vocab")
"""Words in the name of a script's setting that decides how much a step computes."""


def differences_of(plan: Mapping[str, Any], run: RunSource) -> tuple[PlanDifference, ...]:
    """Differences between the predicted plan and the plan that ran; empty if none was observed."""
    manifest = run.manifest
    if not manifest.plan:
        return ()
    try:
        ran = observed_plan(run)
    except (MissingDataError, StoreError):  # no readable step: only the model's part is known
        ran = Plan.from_dict(manifest.plan)
    return find_plan_differences(
        Plan.from_dict(plan), ran, with_parameters={unit.fqn for unit in manifest.units}
    )


def find_obstacles(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """The reasons why the prediction cannot be judged, one sentence each.

    Args:
        prediction: The prediction.
        runs: Runs of the predicted plan.
        baselines: Runs of the plan that the prediction was made from.
    """
    for run in runs:
        manifest = run.manifest
        if manifest.run_id == prediction.run_id:
            yield (
                f"Run {manifest.run_id} is the baseline of the prediction. "
                "Expected a run of the predicted plan."
            )
        elif not manifest.plan:
            yield f"Run {manifest.run_id} has no observed plan, so its plan is unknown."
        yield from _other_circumstances(_expected(prediction), manifest)
        if manifest.plan != runs[0].manifest.plan:
            yield f"Runs {runs[0].manifest.run_id} and {manifest.run_id} ran different plans."
    if differences_of(prediction.plan, runs[0]):
        yield "The plan of the run differs from the predicted plan."
    for run in baselines:
        for sentence in _other_circumstances(prediction.circumstances, run.manifest):
            yield f"Baseline: {sentence}"
        if differences_of(prediction.baseline_plan, run):
            yield f"Baseline: {run.manifest.run_id} ran a plan other than the predicted baseline."


def _expected(prediction: Prediction) -> Circumstances:
    """The baseline's circumstances, with the ranks and the network of the prediction."""
    there = prediction.circumstances
    world_size = prediction.plan.get("world_size") or there.world_size
    emulation = dict(there.emulation)
    if emulation:
        emulation["world_size"] = world_size
        changed = _given(prediction.bus_bytes_per_s, prediction.latency_ns)
        inside = _given(prediction.node_bus_bytes_per_s, prediction.node_latency_ns)
        for link, values in (("intra", {**changed, **inside}), ("inter", changed)):
            if emulation.get(link) is not None:
                emulation[link] = {**emulation[link], **values}
        if changed or inside:
            emulation["preset"] = None
    return there.model_copy(update={"world_size": world_size, "emulation": emulation})


def _given(bytes_per_s: float | None, latency_ns: float | None) -> dict[str, float]:
    """The requested values of a link, with the names that an emulation uses."""
    asked = {"bandwidth_bytes_per_s": bytes_per_s, "latency_ns": latency_ns}
    return {name: value for name, value in asked.items() if value is not None}


_NAMES = {
    "model": "model",
    "num_parameters": "number of parameters",
    "world_size": "world size",
    "backend": "backend",
    "device": "device",
    "source": "source",
    "torch": "torch version",
}


def _other_circumstances(expected: Circumstances, manifest: RunManifest) -> Iterator[str]:
    ran = Circumstances.of(manifest)
    for field, name in _NAMES.items():
        wanted, got = getattr(expected, field), getattr(ran, field)
        if wanted != got:
            yield f"The {name} is {got!r} in {manifest.run_id}. Expected {wanted!r}."
    for name in dict.fromkeys([*expected.emulation, *ran.emulation]):
        if expected.emulation.get(name) != ran.emulation.get(name) and not _is_implied(name, ran):
            yield (
                f"The emulated {name.replace('_', ' ')} is {ran.emulation.get(name)!r} in "
                f"{manifest.run_id}. Expected {expected.emulation.get(name)!r}."
            )
    for name in _other_settings(expected.config, ran.config):
        if decides_shape(name):
            yield (
                f"{name} is {ran.config.get(name)!r} in {manifest.run_id}. Expected "
                f"{expected.config.get(name)!r}."
            )


def _is_implied(name: str, ran: Circumstances) -> bool:
    """Whether a value follows from the world size and is not set explicitly."""
    return name == "gpus_per_node" and ran.emulation.get("inter") is None


def _other_settings(expected: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    shared = [name for name in expected if name in ran and name not in DECIDED_BY_PLAN]
    return [name for name in shared if expected[name] != ran[name]]


def decides_shape(name: str) -> bool:
    """Whether the words of a setting's name show that it decides how much a step computes."""
    words = name.lower()
    return not words.startswith("eval") and any(part in words for part in _WORDS_OF_SHAPE)


_HARMLESS = NAMES_AND_PLACES | {"steps", "emulate", "fixed_compute"}
"""Settings of the trainer that do not change a step, or whose effect is compared elsewhere."""


def find_prediction_caveats(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """Caveats of the comparison, one sentence each."""
    for run in (*runs, *baselines):
        if run.status not in (RunStatus.COMPLETE, RunStatus.IMPORTED):
            yield f"Run {run.manifest.run_id} is {run.status.value}: steps may be missing."
    before, after = prediction.circumstances.config, runs[0].manifest.config
    for name in _other_settings(before, after):
        if name not in _HARMLESS and not decides_shape(name):
            yield f"{name} is {after[name]!r}; the baseline has {before[name]!r}."
    if not baselines:
        yield (
            "No run of the baseline is given, so the comparison uses the prediction's numbers of "
            "one process. Pass one or, better, several runs: --baseline RUN."
        )
