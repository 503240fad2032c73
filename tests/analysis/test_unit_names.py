import pytest

from fsdp_inspect.analysis.units import find_unit
from fsdp_inspect.errors import MissingDataError
from tests.builders import RunBuilder


def manifest_of(*units):
    builder = RunBuilder(units, world_size=1)
    return builder.build().manifest


def test_a_unit_is_found_by_its_name():
    assert find_unit(manifest_of("layers.0", "norm, lm_head"), "norm, lm_head").index == 1


@pytest.mark.parametrize("name", ["", "(root)"])
def test_the_root_is_found_by_the_name_that_it_is_shown_by(name):
    assert find_unit(manifest_of("layers.0", ""), name).fqn == ""


def test_a_name_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(
        MissingDataError, match=r"Unit 'layers\.9' not found.* Nearest: 'layers\.0'"
    ):
        find_unit(manifest_of("layers.0", "layers.1"), "layers.9")


def test_a_run_without_units_says_so():
    with pytest.raises(MissingDataError, match="There are no units"):
        find_unit(manifest_of(), "layers.0")
