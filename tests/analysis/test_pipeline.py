"""Sends between ranks, and units that each microbatch gathers again."""

import pytest

from fsdp_inspect.analysis.pipeline import measure_pipeline
from fsdp_inspect.trace.codes import EventKind, Phase
from tests.builders import RunBuilder


def stage(*, gathers_again: bool, sends: bool = True, microbatches: int = 3):
    """A unit with a forward for each microbatch; a gather lasts 20 and has a wait."""
    builder = RunBuilder(("layers.0",), device_type="cuda")
    rank = builder.rank(0)
    for number in range(2):
        at = 1000 * number
        rank.step(number, at, at + 1000)
        for place in range(microbatches):
            begin = at + 100 * place
            if gathers_again or place == 0:
                rank.all_gather("layers.0", begin, begin + 20, need=begin)
            rank.forward("layers.0", begin + 20, begin + 60)
            if sends:
                rank.add(EventKind.POINT_TO_POINT, begin + 60, begin + 70, phase=Phase.FORWARD)
        for place in range(microbatches):
            begin = at + 400 + 100 * place
            if gathers_again:
                in_backward = Phase.BACKWARD
                rank.all_gather(
                    "layers.0", begin, begin + 20, need=begin, phase=in_backward, microbatch=place
                )
            rank.backward("layers.0", begin + 20, begin + 80, microbatch=place)
    return measure_pipeline(builder.build())


def test_gathers_beyond_the_first_of_a_step_are_counted_with_their_waits():
    found = stage(gathers_again=True)
    assert (found.transfers_per_step, found.forwards_per_step) == (3, 3)
    (unit,) = found.units
    assert (unit.fqn, unit.forwards_per_step, unit.gathers_per_step) == ("layers.0", 3, 6)
    assert found.repeated_gathers_per_step == 5
    assert (found.repeated_ns, found.repeated_exposed_ns) == (100, 100)


def test_a_pipeline_that_keeps_its_parameters_repeats_nothing():
    found = stage(gathers_again=False)
    assert (found.units, found.repeated_gathers_per_step, found.repeated_exposed_ns) == ((), 0, 0)


@pytest.mark.parametrize("gathers_again", [True, False])
def test_accumulation_without_sends_is_no_pipeline(gathers_again: bool):
    assert stage(gathers_again=gathers_again, sends=False) is None
