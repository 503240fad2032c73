import pytest

from fsdp_inspect.analysis.plan_check.unit_waste import find_waste
from fsdp_inspect.trace.run import ModelInfo, RunManifest
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
