"""May a run be held against a prediction? What ran otherwise than it was predicted for.

What changes what a step computes or sends forbids a judgement; what may move a time a little is
said beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_inspect.comparison.plan_differences import PlanDifference, find_plan_differences
from fsdp_inspect.predictions.records import Circumstances, Prediction
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN, Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus

_WORDS_OF_SHAPE = ("batch", "seq", "length", "compile", "dim", "layers", "heads", "vocab")
"""What names a setting of a script that decides how much is computed."""


def differences_of(plan: Mapping[str, Any], manifest: RunManifest) -> tuple[PlanDifference, ...]:
    """In what another plan ran than the one asked for; nothing where none was observed."""
    if not manifest.plan:
        return ()
    return find_plan_differences(
        Plan.from_dict(plan),
        Plan.from_dict(manifest.plan),
        with_parameters={unit.fqn for unit in manifest.units},
    )


def find_obstacles(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """Why nothing can be judged, one sentence each.

    Args:
        prediction: Made before.
        runs: That should have run the predicted plan.
        baselines: That should have run the plan that it was predicted from.
    """
    for run in runs:
        manifest = run.manifest
        if manifest.run_id == prediction.run_id:
            yield (
                f"Run {manifest.run_id} is the baseline that the prediction was made from. "
                "Expected a run of the predicted plan."
            )
        elif not manifest.plan:
            yield f"Run {manifest.run_id} has no observed plan, so what ran is not known."
        yield from _other_circumstances(_expected(prediction), manifest)
        if manifest.plan != runs[0].manifest.plan:
            yield f"Runs {runs[0].manifest.run_id} and {manifest.run_id} ran different plans."
    if differences_of(prediction.plan, runs[0].manifest):
        yield "Another plan ran than the one asked for."
    for run in baselines:
        for sentence in _other_circumstances(prediction.circumstances, run.manifest):
            yield f"Baseline: {sentence}"
        if differences_of(prediction.baseline_plan, run.manifest):
            yield f"Baseline: {run.manifest.run_id} ran another plan than the one predicted from."


def _expected(prediction: Prediction) -> Circumstances:
    """Those of the baseline, with the ranks and the network that the prediction is for."""
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
    """What was asked for of a link, as an emulation names it."""
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
    """Whether a value follows from the world size where it is not given by itself."""
    return name == "gpus_per_node" and ran.emulation.get("inter") is None


def _other_settings(expected: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    shared = [name for name in expected if name in ran and name not in DECIDED_BY_PLAN]
    return [name for name in shared if expected[name] != ran[name]]


def decides_shape(name: str) -> bool:
    """Whether a setting of this name says how much a step computes, by the words in it."""
    words = name.lower()
    return not words.startswith("eval") and any(part in words for part in _WORDS_OF_SHAPE)


_HARMLESS = ("name", "runs_dir", "tag", "steps", "emulate", "fixed_compute")
"""Settings of the trainer that change no step, or that are compared by what came of them."""


def find_prediction_caveats(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """What to know before the numbers are believed, one sentence each."""
    for run in (*runs, *baselines):
        if run.status not in (RunStatus.COMPLETE, RunStatus.IMPORTED):
            yield f"Run {run.manifest.run_id} is {run.status.value}: it may lack steps."
    before, after = prediction.circumstances.config, runs[0].manifest.config
    for name in _other_settings(before, after):
        if name not in _HARMLESS and not decides_shape(name):
            yield f"{name} is {after[name]!r}, and was {before[name]!r} in the baseline."
    if not baselines:
        yield (
            "No run of the baseline was given, so its numbers are those that the prediction holds, "
            "of one process. Give it, better several: --baseline RUN."
        )
