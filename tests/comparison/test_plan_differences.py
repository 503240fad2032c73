import pytest

from fsdp_inspect.comparison.settings import find_plan_differences
from fsdp_inspect.trace.plan import Plan

NAMES = ("", "a", "b", "c")


def plan(units=NAMES, settings=None, **whole):
    settings = settings or {}
    return Plan.from_dict(
        {"units": [{"modules": [name], **settings.get(name, {})} for name in units], **whole}
    )


def differences(asked, ran, with_parameters=NAMES):
    found = find_plan_differences(asked, ran, with_parameters=with_parameters)
    return [(each.name, each.where, each.asked, each.ran) for each in found]


def test_the_same_plan_has_none():
    assert differences(plan(forward_prefetch=2), plan(forward_prefetch=2)) == []


def test_other_units_are_named_on_both_sides():
    found = differences(plan(), plan(units=("", "a", "b")))
    assert found == [("units", "", "c", "none")]


def test_a_setting_names_the_units_that_ran_otherwise():
    asked = plan(settings={"a": {"reshard_after_forward": False}})
    assert differences(asked, plan()) == [("reshard_after_forward", "a", False, True)]


def test_left_to_torch_reshards_all_but_the_root():
    ran = plan(
        settings={
            "": {"reshard_after_forward": False},
            **{name: {"reshard_after_forward": True} for name in ("a", "b", "c")},
        }
    )
    assert differences(plan(), ran) == []


def test_a_dtype_that_is_left_to_torch_is_no_difference():
    assert differences(plan(), plan(settings={"a": {"param_dtype": "bfloat16"}})) == []


def test_settings_of_a_unit_without_parameters_are_observed_on_nothing():
    asked = plan(settings={"": {"reduce_scatter_max_input_buffers": 2}})
    assert differences(asked, plan(), with_parameters=("a", "b", "c")) == []
    assert differences(asked, plan())[0][:2] == ("reduce_scatter_max_input_buffers", "(root)")


def test_a_depth_and_the_list_that_it_means_are_the_same():
    lists = {"a": ("b",), "b": ("c",)}
    without_root = ("a", "b", "c")
    assert differences(plan(forward_prefetch=1), plan(forward_prefetch=lists), without_root) == []


@pytest.mark.parametrize(
    ("name", "asked", "ran"),
    [
        ("forward_prefetch", 1, 0),
        ("world_size", 8, 4),
        ("mesh", {"shard": 8}, {"replicate": 2, "shard": 4}),
    ],
)
def test_what_concerns_the_whole_plan_is_named(name, asked, ran):
    assert differences(plan(**{name: asked}), plan(**{name: ran})) == [(name, "", asked, ran)]
