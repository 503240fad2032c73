"""The method of measurement of each group of numbers."""

from fsdp_inspect.analysis.provenance import name_methods
from fsdp_inspect.trace.codes import EventKind, Method
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder


def test_a_group_names_every_method_of_its_events() -> None:
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 0, 10, need=0)
    rank.all_gather("layers.1", 10, 20, need=10, method=Method.HOST_BLOCKING)
    rank.add(EventKind.OPTIMIZER, 80, 90, method=Method.INFERRED)

    assert name_methods(builder.build().events(0)) == {
        "step": "measured",
        "all_gather": "measured, host_blocking",
        "optimizer": "inferred",
    }


def test_nothing_is_said_of_nothing() -> None:
    assert name_methods(EventTable.empty()) == {}
