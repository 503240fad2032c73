from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_inspect.comparison.verification.judgement import (
    differences_of,
    find_obstacles,
    find_prediction_caveats,
)
from fsdp_inspect.simulation.predictions.records import Circumstances
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.run import ModelInfo, ProcessGroup, RunManifest, RunStatus, Unit
from tests.prediction_records import prediction

LINK = {"bandwidth_bytes_per_s": 1e9, "latency_ns": 1000}
EMULATION = {"world_size": 8, "gpus_per_node": 8, "intra": LINK, "inter": None, "preset": None}
PLAN = {"units": [{"modules": [""]}], "accumulation": {"microbatches": 2}}
"""It declares its accumulation, so that no step must show it."""
CONFIG = {"batch_size": 4, "seed": 0, "wrap": "block", "name": "before"}


@dataclass
class Run:
    """The parts of a run that the comparison reads."""

    manifest: RunManifest
    status: RunStatus = RunStatus.COMPLETE


def run(**fields: Any) -> Run:
    plain = {
        "run_id": "after",
        "created": "",
        "created_unix_ns": 0,
        "world_size": 8,
        "backend": "fake",
        "device_type": "cpu",
        "device_name": "EPYC",
        "source": "emulated",
        "emulation": EMULATION,
        "config": CONFIG,
        "model": ModelInfo(class_name="Decoder", num_parameters=1000),
        "versions": {"torch": "2.13.0"},
        "plan": PLAN,
    }
    return Run(RunManifest(**{**plain, **fields}))


def predicted(**fields: Any):
    plan = {**PLAN, **fields.pop("plan", {})}
    circumstances = Circumstances.of(run(run_id="before").manifest)
    return prediction(circumstances=circumstances, plan=plan, baseline_plan=plan, **fields)


def obstacles(made, *runs: Run) -> list[str]:
    return list(find_obstacles(made, runs, ()))


def test_the_predicted_run_has_no_obstacle():
    assert obstacles(predicted(), run()) == []


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"versions": {"torch": "2.9"}}, "The torch version is '2.9' in after. Expected '2.13.0'."),
        ({"world_size": 4}, "The world size is 4 in after. Expected 8."),
        ({"device_name": "H100"}, "The device is 'H100' in after. Expected 'EPYC'."),
        ({"source": "recorded"}, "The source is 'recorded' in after. Expected 'emulated'."),
        ({"config": {**CONFIG, "batch_size": 8}}, "batch_size is 8 in after. Expected 4."),
    ],
)
def test_other_circumstances_are_named_with_what_was_expected(fields, complaint):
    assert obstacles(predicted(), run(**fields)) == [complaint]


def test_another_emulated_link_is_named():
    slow = {**EMULATION, "intra": {**LINK, "latency_ns": 9000}}
    (found,) = obstacles(predicted(), run(emulation=slow))
    assert found.startswith("The emulated intra is")


def test_a_prediction_for_another_network_expects_that_one():
    made = predicted(latency_ns=9000.0)
    slow = {**EMULATION, "intra": {**LINK, "latency_ns": 9000}}
    assert obstacles(made, run(emulation=slow)) == []
    assert len(obstacles(made, run())) == 1


def test_a_prediction_for_other_ranks_expects_those():
    made = predicted(plan={"world_size": 64})
    ranks = {**EMULATION, "world_size": 64, "gpus_per_node": 64}
    plan = {**PLAN, "world_size": 64}
    assert obstacles(made, run(world_size=64, emulation=ranks, plan=plan)) == []
    assert len(obstacles(made, run())) == 3


def test_runs_of_different_plans_are_no_repeats():
    other = run(run_id="odd", plan={"units": [{"modules": ["", "a"][1:]}]})
    assert "Runs after and odd ran different plans." in obstacles(predicted(), run(), other)


def whole(param: str | None = None, reduce: str | None = None) -> dict[str, Any]:
    """The plan of a model of one unit with these dtypes; None: torch decides."""
    unit = {"modules": [""], "param_dtype": param, "reduce_dtype": reduce}
    return {**PLAN, "units": [unit]}


def of_dtypes(param: str, reduce: str, plan: dict[str, Any], **fields: Any) -> Run:
    """A run of float32 parameters with the dtypes that it used and its plan."""
    unit = Unit(
        index=0, fqn="", modules=[""], num_parameters=1000, num_trainable_parameters=1000,
        unsharded_bytes=1000 * ITEMSIZE[param], sharded_bytes=500, reduce_bytes=4000,
        param_dtype=param, reduce_dtype=reduce, reshard_after_forward=False, shard_group=0,
    )  # fmt: skip
    group = ProcessGroup(index=0, name="shard", ranks=list(range(8)))
    return run(units=[unit], process_groups=[group], plan=plan, **fields)


BF16, FP32 = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("predicted_dtypes", "dtypes", "ran", "names"),
    [
        ((BF16, BF16), (BF16, BF16), (BF16, None), []),
        ((BF16, None), (BF16, BF16), (BF16, BF16), []),
        ((FP32, None), (FP32, FP32), (None, None), []),
        ((FP32, FP32), (FP32, FP32), (None, None), []),
        ((None, None), (FP32, FP32), (FP32, FP32), []),
        ((BF16, FP32), (BF16, BF16), (BF16, None), ["reduce_dtype"]),
        ((BF16, None), (BF16, FP32), (BF16, FP32), ["reduce_dtype"]),
        ((None, None), (BF16, FP32), (BF16, FP32), ["param_dtype"]),
    ],
)
def test_a_default_that_is_spelled_out_is_the_same_plan(predicted_dtypes, dtypes, ran, names):
    made = of_dtypes(*dtypes, whole(*ran))
    found = differences_of(whole(*predicted_dtypes), made, recorded=whole())
    assert [each.name for each in found] == names


def test_since_torch_2_15_the_default_reduction_is_that_of_the_parameters():
    made = of_dtypes(BF16, FP32, whole(BF16), versions={"torch": "2.15.0"})
    assert differences_of(whole(BF16, FP32), made, recorded=whole()) == ()
    spelled = of_dtypes(BF16, FP32, whole(BF16, FP32), versions={"torch": "2.15.0"})
    assert differences_of(whole(BF16), spelled, recorded=whole()) == ()
    (found,) = differences_of(whole(BF16, BF16), made, recorded=whole())
    assert (found.name, found.asked, found.ran) == ("reduce_dtype", BF16, FP32)


def test_runs_that_spell_out_a_default_ran_the_same_plan():
    first, other = of_dtypes(BF16, BF16, whole(BF16)), of_dtypes(BF16, BF16, whole(BF16, BF16))
    made = predicted(plan=whole(BF16))
    assert obstacles(made, first, other) == []
    reduces = of_dtypes(BF16, FP32, whole(BF16, FP32), run_id="odd")
    assert obstacles(made, first, reduces) == ["Runs after and odd ran different plans."]


def test_a_plan_without_dtypes_keeps_those_of_its_baseline():
    made = of_dtypes(BF16, BF16, whole(BF16))
    assert differences_of(whole(), made, recorded=whole(BF16)) == ()


def test_a_run_without_an_observed_plan_cannot_be_judged():
    assert "has no observed plan" in obstacles(predicted(), run(plan={}))[0]


def test_settings_that_a_plan_decides_and_names_are_no_caveat_but_others_are():
    config = {**CONFIG, "seed": 1, "wrap": "every:2", "name": "after"}
    found = list(find_prediction_caveats(predicted(), [run(config=config)], [run(run_id="before")]))
    assert found == ["seed is 1; the baseline has 0."]


def test_a_verification_without_a_baseline_says_so():
    (found,) = find_prediction_caveats(predicted(), [run()], [])
    assert "--baseline RUN" in found


def test_a_run_that_did_not_end_well_says_so():
    crashed = Run(run().manifest, RunStatus.CUT_OFF)
    assert "Run after is cut off" in next(iter(find_prediction_caveats(predicted(), [crashed], [])))


def test_a_baseline_of_another_plan_is_named():
    other = run(run_id="b2", plan={**PLAN, "accumulation": {"microbatches": 4}})
    (found,) = find_obstacles(predicted(), [run()], [other])
    assert found == "Baseline: b2 ran a plan other than the predicted baseline."
