import pytest

from fsdp_inspect.comparison.settings import (
    are_repeats,
    compare_settings,
    describe_plan,
    find_comparison_caveats,
    find_shared_settings,
)
from fsdp_inspect.trace.run import ModelInfo
from tests.builders import RunBuilder


def manifest(units=("layers.0", "layers.1"), *, unit=(), **changes):
    builder = RunBuilder(units=units, **changes)
    for fqn, settings in dict(unit).items():
        builder.unit(fqn, **settings)
    return builder.build().manifest


def differences(*manifests):
    return [(one.group, one.name, one.where, one.values) for one in compare_settings(manifests)]


def test_settings_that_differ_are_listed_with_every_value():
    first = manifest(config={"steps": 5, "sharding": {"wrap": "block", "depth": 1}})
    second = manifest(config={"steps": 5, "sharding": {"wrap": "root"}})
    third = manifest(config={"steps": 6, "sharding": {"wrap": "root"}})
    assert differences(first, second, third) == [
        ("config", "steps", "", (5, 5, 6)),
        ("config", "sharding.wrap", "", ("block", "root", "root")),
        ("config", "sharding.depth", "", (1, None, None)),
    ]


def test_only_equal_plans_of_one_model_have_the_same_description():
    first = manifest()
    usual = {"backwards": "1 a step", "gradient_sync": "every microbatch"}
    for same in (manifest(config={"lr": 1}), manifest(observed=usual)):
        assert describe_plan(first) == describe_plan(same)
    full = manifest(plan={"checkpointing": {"full": ["layers.0"], "selective": []}})
    others = [
        full,
        manifest(plan={"checkpointing": {"full": ["layers.1"], "selective": []}}),
        manifest(observed={"backwards": "2 a step"}),
        manifest(observed={"gradient_sync": "last microbatch"}),
        manifest(plan={"forward_prefetch": 1}),
        manifest(unit={"layers.0": {"num_parameters": 77}}),
        manifest(unit={"layers.0": {"reshard_after_forward": False}}),
        manifest(unit={"layers.1": {"reshard_after_forward": False}}),
        manifest(model=ModelInfo(class_name="Other")),
        manifest(mesh={"replicate": 2, "shard": 2}),
    ]
    assert len({describe_plan(each) for each in (first, *others)}) == 1 + len(others)
    assert ", full checkpointing, plan " in describe_plan(full)
    assert ", 2 backwards a step, plan " in describe_plan(others[2])


def test_gradient_hooks_differ_only_where_both_runs_record_them():
    old = manifest(observed={"dropout": "none"})
    none, some = (manifest(observed={"gradient_hooks": text}) for text in ("", "5 parameters"))
    name = "gradient_hooks"
    assert name not in [one.name for one in compare_settings([old, some])]
    assert ("model", name, "", ("none", "5 parameters")) in differences(none, some)


def test_recomputation_differs_only_where_both_runs_record_it() -> None:
    old, none, some = (
        manifest(observed=observed)
        for observed in ({}, {"recomputation": "none"}, {"recomputation": "3 forwards a backward"})
    )
    assert not differences(old, none)
    assert not differences(old, some)
    assert differences(none, some) == [
        ("model", "recomputation", "", ("none", "3 forwards a backward"))
    ]
    assert describe_plan(old) == describe_plan(none) != describe_plan(some)


def test_the_machine_comes_before_the_configuration_and_the_code_last():
    first = manifest(config={"a": 1}, versions={"torch": "2.13"}, git_commit="abc")
    second = manifest(world_size=4, config={"a": 2}, versions={"torch": "2.14"}, git_commit="def")
    assert [group for group, *_ in differences(first, second)] == [
        "machine", "config", "versions", "code",
    ]  # fmt: skip


def test_environment_variables_are_settings():
    second = manifest(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert differences(manifest(), second) == [
        ("environment", "CUDA_DEVICE_MAX_CONNECTIONS", "", (None, "1"))
    ]


def test_a_setting_of_units_is_one_difference_with_the_units_it_concerns():
    kept = {"reshard_after_forward": False}
    everywhere = manifest(unit={"layers.0": kept, "layers.1": kept})
    in_one = manifest(unit={"layers.1": kept})
    name = "reshard_after_forward"
    assert differences(manifest(), everywhere) == [("plan", name, "all 2 units", (True, False))]
    assert differences(manifest(), in_one) == [("plan", name, "layers.1", (True, False))]


def test_units_that_only_one_run_has_are_a_difference_of_the_plan():
    second = manifest(units=("layers.0", "layers.1.attention", "layers.1.ffn"))
    [wrapping] = [one for one in differences(manifest(), second) if one[0] == "plan"]
    assert wrapping == (
        "plan",
        "units",
        "units of some sides",
        ("layers.1", "layers.1.attention, layers.1.ffn"),
    )


def test_prefetch_is_compared_from_the_observed_plan():
    first, second = manifest(plan={"forward_prefetch": 0}), manifest(plan={"forward_prefetch": 1})
    assert differences(first, second) == [("plan", "forward_prefetch", "", (0, 1))]


def test_what_only_tells_the_runs_apart_is_no_difference():
    first = manifest(config={"name": "a", "runs_dir": "x", "upload": "s3://a/runs"}, run_id="1")
    second = manifest(config={"name": "b", "runs_dir": "y", "log_to": ["wandb"]}, run_id="2")
    assert differences(first, second) == []


def test_another_seed_is_listed_and_still_a_repeat():
    first, second = manifest(config={"seed": 0}), manifest(config={"seed": 1})
    assert [name for _, name, *_ in differences(first, second)] == ["seed"]
    assert are_repeats(first, second)
    assert not are_repeats(first, manifest(config={"seed": 0, "lr": 1}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"world_size": 4}, "Different world size (A: 2, B: 4)", id="ranks"),
        pytest.param({"versions": {"torch": "2.6"}}, "Different torch", id="torch"),
        pytest.param({"device_name": "H100"}, "Different device (A: cpu, B: H100)", id="device"),
        pytest.param({"source": "imported"}, "Different source", id="source"),
        pytest.param({"backend": "nccl"}, "Different backend", id="backend"),
        pytest.param({"model": ModelInfo(num_parameters=7)}, "Different model", id="model"),
    ],
)
def test_what_makes_runs_hard_to_compare_is_said(changes, said):
    known = {"versions": {"torch": "2.5"}}
    manifests = [manifest(**known), manifest(**known | changes)]
    [caveat] = find_comparison_caveats(manifests, ["A", "B"])
    assert caveat.startswith(said)


def test_what_a_run_does_not_know_is_not_called_different():
    unknown = {"backend": "unknown", "device_type": "unknown", "sharder": "unknown"}
    first = manifest(versions={"torch": "2.5"})
    second = manifest(**unknown, model=ModelInfo())
    assert list(find_comparison_caveats([first, second], ["A", "B"])) == [
        "Unknown of B: device, torch, backend, sharder, model. The other runs may have the same."
    ]


def test_an_unknown_setting_is_no_difference():
    of_import = {"param_dtype": "unknown", "reduce_dtype": "float32"}
    fields = {"source": "imported", "model": ModelInfo(class_name="unknown")}
    imported = manifest(("layers.0",), unit={"layers.0": of_import}, **fields)
    recorded = manifest(
        ("layers.0",),
        source="imported",
        model=ModelInfo(class_name="Decoder", num_parameters=200),
        plan={"forward_prefetch": 1},
        config={"lr": 1},
        unit={"layers.0": {"param_dtype": "float32", "reduce_dtype": "float32"}},
    )
    assert not differences(imported, recorded)
    third = manifest(
        ("layers.0",), unit={"layers.0": {**of_import, "param_dtype": "bfloat16"}}, **fields
    )
    assert differences(imported, recorded, third) == [
        ("plan", "param_dtype", "all 1 units", ("unknown", "float32", "bfloat16"))
    ]


@pytest.mark.parametrize("name", ["attention", "unused_parameters", "gradients_between_backwards"])
def test_an_observation_that_one_recording_lacks_is_a_difference(name):
    observed = {"dropout": "none"}
    first, second = manifest(observed=observed), manifest(observed={**observed, name: "sdpa"})
    assert differences(first, second) == [("model", name, "", (None, "sdpa"))]
    assert not are_repeats(first, second)
    imported = manifest(observed=observed, source="imported")
    assert [each[1] for each in differences(imported, second)] == ["source"]


def test_unknown_is_a_value_in_the_settings_of_a_script():
    first, second = (manifest(config={"dataset": name}) for name in ("unknown", "c4"))
    assert differences(first, second) == [("config", "dataset", "", ("unknown", "c4"))]


def test_an_import_does_not_state_its_sharder():
    (caveat,) = find_comparison_caveats(
        [manifest(sharder="ddp"), manifest(source="imported")], ["A", "B"]
    )
    assert caveat.startswith("Different source")


def test_runs_that_can_be_compared_need_no_caveat():
    assert list(find_comparison_caveats([manifest(), manifest(config={"x": 1})], ["A", "B"])) == []


def test_settings_that_all_share_are_listed_with_their_one_value():
    first = manifest(config={"a": 1, "b": 2, "c": None}, versions={"torch": "2.13"})
    second = manifest(config={"a": 1, "b": 3, "c": None}, versions={"torch": "2.13"})
    shared = {(one.group, one.name): one.value for one in find_shared_settings([first, second])}
    assert shared["config", "a"] == 1
    assert shared["versions", "torch"] == "2.13"
    assert ("config", "b") not in shared
    assert ("config", "c") not in shared


def test_the_parameters_of_one_pipeline_rank_are_no_other_model():
    whole = manifest(mesh={"fsdp": 2}, model=ModelInfo(class_name="Decoder", num_parameters=200))
    stage = manifest(
        mesh={"pp": 2, "fsdp": 1}, model=ModelInfo(class_name="Decoder", num_parameters=100)
    )
    assert [name for group, name, _, _ in differences(whole, stage) if group == "model"] == []
    [caveat] = find_comparison_caveats([whole, stage], ["A", "B"])
    assert caveat.startswith("Different model (A: Decoder 200, B: Decoder 100 on one pipeline rank")
