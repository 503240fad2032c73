import pytest

from fsdp_inspect.analysis.plan_check.unit_waste import find_waste
from fsdp_inspect.trace.run import ModelInfo, ParameterTraits, RunManifest
from tests.builders import RunBuilder


def manifest_of(*, num_parameters=200, **changes) -> RunManifest:
    builder = RunBuilder(units=("embed", "head"), model=ModelInfo(num_parameters=num_parameters))
    for fqn in ("embed", "head"):
        builder.unit(fqn, unsharded_bytes=400)
    for fqn, change in changes.items():
        builder.unit(fqn, **change)
    return builder.build().manifest


def test_units_without_padding_in_one_dtype_waste_nothing():
    assert list(find_waste(manifest_of())) == []


@pytest.mark.parametrize(
    ("unsharded", "is_named"),
    [pytest.param(404, False, id="just below 1%"), pytest.param(408, True, id="2%")],
)
def test_padding_is_named_above_one_percent(unsharded, is_named):
    found = list(find_waste(manifest_of(head={"unsharded_bytes": unsharded})))
    assert [(waste.rule, waste.fqns) for waste in found] == [("R30", ("head",))] * is_named


def test_padding_says_how_much_of_each_gather_it_is():
    [padding] = find_waste(manifest_of(head={"unsharded_bytes": 800}))
    assert padding.sentence.startswith("50% of each all-gather (400 B) is padding")


def test_one_unit_in_float32_beside_bfloat16_ones_is_named():
    half = {"param_dtype": "bfloat16", "unsharded_bytes": 200}
    [found] = find_waste(manifest_of(embed=half))
    assert (found.rule, found.fqns) == ("R14", ("head",))


def test_units_that_hold_more_than_the_model_share_a_tied_weight():
    single = {"num_tensors": 1}
    [found] = find_waste(manifest_of(num_parameters=100, embed=single, head=single))
    assert (found.rule, found.fqns) == ("R27", ("embed", "head"))


def test_a_tied_weight_whose_units_hold_more_is_counted_without_names():
    [found] = find_waste(manifest_of(num_parameters=160))
    assert (found.rule, found.fqns) == ("R27", ())
    assert "The units hold 40 more parameters than the model" in found.sentence


@pytest.mark.parametrize(("size", "is_named"), [(512, False), (1024, True)])
def test_small_norms_in_full_precision_are_no_waste(size, is_named):
    half = {"param_dtype": "bfloat16", "unsharded_bytes": 40_000, "num_parameters": 20_000}
    norm = {"unsharded_bytes": size, "num_parameters": size // 4}
    manifest = manifest_of(embed=half, head=norm, num_parameters=20_000 + size // 4)
    found = [(waste.rule, waste.fqns) for waste in find_waste(manifest)]
    assert found == [("R14", ("head",))] * is_named


def test_a_frozen_base_in_another_dtype_is_no_padding():
    traits = {
        "base": ParameterTraits(dtype="int8", gathered_dtype="int8", is_trained=False),
        "adapter": ParameterTraits(dtype="float32", gathered_dtype="float32"),
    }
    shapes = {"base": [90], "adapter": [10]}
    unit = {"parameters": shapes, "traits": traits, "unsharded_bytes": 90 + 40}
    assert not list(find_waste(manifest_of(head=unit)))
    [padding] = find_waste(manifest_of(head={**unit, "unsharded_bytes": 90 + 64}))
    assert "(24 B) is padding" in padding.sentence
