"""Ranks that read one clock: they agree, and contradictions are reported."""

import numpy as np

from fsdp_inspect.analysis.shared_collectives import (
    SynchronisationReader,
    Synchronisations,
)
from fsdp_inspect.trace.codes import Method
from tests.builders import RunBuilder


def spoken(*rows: tuple[int, int, int]) -> Synchronisations:
    """The synchronisations of one rank, as (key, start, end)."""
    key, start, end = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Synchronisations(key, start, end, np.zeros_like(key))


def run_of(*spans, **columns):
    """Two ranks of host `a`; `spans`: (start, end) of each rank's only collective."""
    builder = RunBuilder()
    for number, (start, end) in enumerate(spans):
        rank = builder.rank(number)
        rank.record = {"host": "a", "clock_uncertainty_ns": 5}
        rank.all_gather("layers.0", start, end, sequence=0, **columns)
    return builder.build()


def test_several_ranks_enter_with_the_last_and_leave_with_the_first():
    joined = Synchronisations.joined([spoken((1, 10, 50), (2, 60, 90)), spoken((1, 30, 45))])
    assert joined.key.tolist() == [1, 2]
    assert joined.start_ns.tolist() == [30, 60]
    assert joined.end_ns.tolist() == [45, 90]


def test_nobody_says_nothing():
    assert len(Synchronisations.joined([]).key) == 0


def test_times_are_widened_by_what_the_rank_itself_is_uncertain():
    reader = SynchronisationReader(run_of((100, 200), (120, 200)), [0])
    machines = reader.check({0: "a", 1: "a"}, [0, 1])
    together = reader.of_machine("a", machines)
    assert (together.start_ns.tolist(), together.end_ns.tolist()) == ([115], [205])


def test_ranks_of_one_machine_that_contradict_each_other_stand_alone():
    reader = SynchronisationReader(run_of((100, 200), (900, 999)), [0])
    assert reader.check({0: "a", 1: "a"}, [0, 1]) == {0: "a rank 0", 1: "a rank 1"}


def test_a_rank_of_an_unknown_machine_stands_alone():
    reader = SynchronisationReader(run_of((100, 200), (120, 200)), [0])
    assert reader.check({0: "", 1: ""}, [0, 1]) == {0: "rank 0", 1: "rank 1"}


def test_inferred_times_bound_nothing():
    reader = SynchronisationReader(run_of((100, 200), method=Method.INFERRED), [0])
    machines = reader.check({0: "a"}, [0])
    assert len(reader.of_machine("a", machines).key) == 0


def test_further_ranks_of_a_machine_are_read_once():
    reader = SynchronisationReader(run_of((100, 200), (120, 210)), [0])
    machines = reader.check({0: "a", 1: "a"}, [0])
    assert reader.read_more("a", machines)
    assert not reader.read_more("a", machines)
    assert reader.of_machine("a", machines).start_ns.tolist() == [115]
