"""The share of a smaller group, by torch's rules, in bytes."""

import pytest

from fsdp_inspect.simulation.parameters import (
    NO_SHARE,
    Share,
    flat_numel,
    is_inside,
    padded_numel,
    share_of,
)
from fsdp_inspect.trace.run import Unit

RANKS = 8


def unit(reshard: bool | int | None, **parameters: list[int]) -> Unit:
    numel = sum(padded_numel(shape, RANKS) for shape in parameters.values()) or 1000
    return Unit(
        index=0,
        fqn="layers.0",
        modules=["layers.0"],
        num_parameters=numel,
        num_trainable_parameters=numel,
        parameters=parameters,
        unsharded_bytes=2 * numel,
        sharded_bytes=4 * numel // RANKS,
        reduce_bytes=4 * numel,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        reshard_after_forward=reshard,
    )


def test_everything_lies_in_the_model_and_nothing_in_a_module_of_a_longer_name():
    assert is_inside("layers.1.w", "")
    assert is_inside("layers.1.w", "layers.1")
    assert not is_inside("layers.10.w", "layers.1")


def test_a_group_of_four_keeps_a_quarter_in_the_dtype_of_compute():
    assert share_of(unit(4, w=[64, 10]), RANKS).kept == 64 * 10 * 2 // 4


def test_the_first_copy_is_made_while_everything_is_still_there():
    kept = share_of(unit(2, large=[80, 10], small=[8, 10]), RANKS)
    assert kept == Share(kept=(800 + 80) * 2 // 2, rise=800 * 2 // 2)


def test_a_large_parameter_behind_a_small_one_rises_by_its_copy_less_what_went():
    kept = share_of(unit(2, small=[8, 10], large=[80, 10]), RANKS)
    assert kept.rise == 80 - 160 + 800


def test_the_sharded_dimension_is_padded():
    assert padded_numel([3, 64, 96], 8) == 8 * 64 * 96
    assert padded_numel([3, 64, 96], 8, dim=1) == 3 * 64 * 96
    assert padded_numel([], 8) == 8


def test_padding_is_kept_too():
    assert share_of(unit(4, w=[9, 10]), RANKS).kept == 16 * 10 * 2 // 4


@pytest.mark.parametrize("reshard", [True, False, None])
def test_without_a_smaller_group_nothing_is_kept(reshard: bool | None):
    assert share_of(unit(reshard, w=[64, 10]), RANKS) == NO_SHARE


def test_a_unit_without_recorded_parameters_is_copied_at_once():
    assert share_of(unit(4), RANKS) == Share(kept=500, rise=500)


@pytest.mark.parametrize(("alignment", "padded"), [(1, 8), (4, 12)])
def test_a_flat_parameter_is_padded_as_a_whole(alignment: int, padded: int) -> None:
    """4 ranks: 3 + 5 elements, without and with the alignment of `use_orig_params`."""
    assert flat_numel([3, 5], 4, alignment) == padded
