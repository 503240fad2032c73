"""Collectives that a script starts for a unit are told from those of FSDP's hooks."""

import pytest

from fsdp_inspect.simulation.step_pieces import set_own_collectives_apart
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder

BY_SCRIPT = {"issued_by": NO_UNIT, "flags": EventFlag.PREFETCHED, "bytes": 8}


def events(*, forward_gathers: bool) -> EventTable:
    builder = RunBuilder(units=["head"])
    builder.unit("head", reshard_after_forward=True)
    rank = builder.rank(0)
    rank.all_gather("head", 10, 20, **BY_SCRIPT)
    if forward_gathers:
        rank.all_gather("head", 30, 40, bytes=8)
    return builder.build().events(0)


@pytest.mark.parametrize("forward_gathers", [True, False])
def test_a_gather_beside_that_of_the_forward_is_the_scripts(forward_gathers: bool) -> None:
    """Otherwise the script has gathered for the forward: a prefetch by hand."""
    before = events(forward_gathers=forward_gathers)
    after, units = set_own_collectives_apart(before)
    gathers = after.kind == EventKind.ALL_GATHER
    expected = [NO_UNIT, 0] if forward_gathers else [0]
    assert after.unit[gathers].tolist() == expected
    assert units == ({0} if forward_gathers else frozenset())
