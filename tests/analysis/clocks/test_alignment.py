"""Clocks of different machines: aligned within the stated uncertainty, or refused."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.clocks.alignment import align_clocks, last_arrivals
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder
from tests.cases import examples


@dataclass(frozen=True)
class Clock:
    """A machine's true clock."""

    offset: int = 0
    drift: float = 0.0

    def __call__(self, true_ns: int) -> int:
        return true_ns + self.offset + round(self.drift * true_ns)


class Job:
    """Ranks on machines, which communicate in true time and record on their own clocks."""

    def __init__(self, machines, clocks, *, groups=None, uncertainty=0, step_ns=10**9):
        world_size = len(machines)
        self.groups = groups or [list(range(world_size))]
        described = [
            ProcessGroup(index=index, name=str(index), ranks=members)
            for index, members in enumerate(self.groups)
        ]
        self.builder = RunBuilder(world_size=world_size, process_groups=described)
        self.clocks = {rank: clocks[machine] for rank, machine in enumerate(machines)}
        for rank, machine in enumerate(machines):
            one = self.builder.rank(rank)
            one.record = {"host": machine, "clock_uncertainty_ns": uncertainty}
            one.step(0, self.clocks[rank](0), self.clocks[rank](0) + step_ns)
        self.sequences = {}

    def gather(self, arrivals, transfer, *, group=0, kind=EventKind.ALL_GATHER, **columns):
        """Run a gather; `arrivals` are true times by rank. All ranks leave at the same time."""
        instance = (group, min(arrivals))
        sequence = self.sequences.setdefault(instance, 0)
        self.sequences[instance] += 1
        end = max(arrivals.values()) + transfer
        for rank, arrival in arrivals.items():
            clock = self.clocks[rank]
            row = {"group": group, "sequence": sequence, "bytes": 64, **columns}
            self.builder.rank(rank).add(
                kind, clock(arrival), clock(end), unit="layers.0", phase=Phase.FORWARD, **row
            )
        return end

    def run(self):
        return self.builder.build()


def two_machines(offset=5_000_000, **options):
    return Job(["a", "b"], {"a": Clock(), "b": Clock(offset)}, **options)


def test_ranks_of_one_machine_share_its_clock():
    job = Job(["a", "a"], {"a": Clock()}, uncertainty=7)
    alignment = align_clocks(job.run())
    assert alignment.to_reference(1, np.array([123])).tolist() == [123]
    assert alignment.between_ns(0, 1) == alignment.uncertainty_ns == 14


def test_ranks_of_one_boot_share_a_clock_whatever_their_host_is_called():
    job = Job(["pod-a", "pod-b"], {"pod-a": Clock(), "pod-b": Clock()})
    for rank in (0, 1):
        job.builder.rank(rank).record["pid_scope"] = f"boot-1 {rank}"
    assert align_clocks(job.run()).uncertainty_ns == 0


def test_an_offset_is_found_to_within_the_shortest_transfer():
    job = two_machines(offset=5_000_000)
    job.gather({0: 1_000, 1: 41_000}, 300)
    job.gather({0: 60_000, 1: 50_000}, 200)
    alignment = align_clocks(job.run())
    found = alignment.clocks[1].clock.offset_ns
    assert abs(found - 5_000_000) <= alignment.uncertainty_ns
    assert alignment.uncertainty_ns < 50_000


def test_simultaneous_arrivals_bound_the_offset_by_the_transfer():
    job = two_machines()
    for start in range(0, 100_000, 10_000):
        job.gather({0: start, 1: start}, 200)
    assert 200 <= align_clocks(job.run()).uncertainty_ns <= 320


def test_machines_without_a_common_collective_are_refused():
    job = two_machines()
    alignment = align_clocks(job.run())
    assert alignment.ranks == (0,)
    assert "rank 1 cannot be aligned: it shares no collective" in alignment.refusals[1]


def test_collectives_that_contradict_each_other_are_refused():
    job = two_machines()
    job.gather({0: 0, 1: 0}, 100)
    job.clocks[1] = Clock(5_000_000 + 10_000)
    job.gather({0: 1_000, 1: 1_000}, 100)
    assert "order is contradictory" in align_clocks(job.run()).refusals[1]


def test_unlike_collectives_of_one_number_are_refused():
    job = two_machines()
    job.gather({0: 0}, 100)
    job.gather({1: 0}, 100, kind=EventKind.REDUCE_SCATTER)
    assert (
        "collective 0 of process group 0 has another kind or message there"
        in (align_clocks(job.run()).refusals[1])
    )


def test_a_clock_that_says_nothing_about_lateness_is_refused():
    job = two_machines(step_ns=1_000)
    job.gather({0: 0, 1: 0}, 500)
    refusal = align_clocks(job.run()).refusals[1]
    assert "more than 10% of the median step" in refusal


def test_machines_of_hybrid_sharding_are_chained_and_their_uncertainties_add_up():
    clocks = {"a": Clock(), "b": Clock(1_000_000), "c": Clock(-2_000_000)}
    job = Job(["a", "b", "b", "c"], clocks, groups=[[0, 1], [0, 2]])
    for start in range(0, 100_000, 10_000):
        job.gather({0: start, 1: start}, 100)
        job.gather({2: start, 3: start}, 100)
    alignment = align_clocks(job.run(), [0, 3])
    near = align_clocks(job.run(), [0, 1]).uncertainty_ns
    assert abs(alignment.clocks[3].clock.offset_ns + 2_000_000) <= alignment.uncertainty_ns
    assert 1.9 * near < alignment.uncertainty_ns < 2.2 * near


def test_machines_that_are_read_by_one_rank_each_are_aligned_over_replicas():
    machines = [f"host-{rank // 8:02}" for rank in range(96)]
    clocks = {machine: Clock(1_000_000 * number) for number, machine in enumerate(set(machines))}
    groups = [list(range(8)), list(range(0, 96, 8))]
    job = Job(machines, clocks, groups=groups)
    for start in range(0, 100_000, 10_000):
        for local in range(8):
            job.gather(dict.fromkeys(range(local, 96, 8), start), 100, group=1)
    alignment = align_clocks(job.run())
    assert len(alignment.ranks) == 96
    truth = clocks[machines[95]].offset - clocks[machines[0]].offset
    assert abs(alignment.clocks[95].clock.offset_ns - truth) <= alignment.between_ns(0, 95)


def test_no_ranks_need_no_alignment():
    assert align_clocks(two_machines().run(), []).reference is None


def test_the_last_arrival_is_told_on_the_clock_of_the_rank_that_waits():
    job = Job(["a", "a"], {"a": Clock()})
    job.gather({0: 100, 1: 160}, 10)
    job.gather({0: 300, 1: 250}, 10)
    run = job.run()
    alignment = align_clocks(run)
    assert last_arrivals(run, 0, run.events(0), alignment).tolist() == [160, 300]
    assert last_arrivals(run, 1, run.events(1), alignment).tolist() == [160, 300]


def test_an_arrival_is_moved_forward_by_what_is_uncertain():
    job = Job(["a", "a"], {"a": Clock()}, uncertainty=20)
    job.gather({0: 100, 1: 160}, 50)
    run = job.run()
    assert last_arrivals(run, 0, run.events(0), align_clocks(run)).tolist() == [120]


def test_the_last_arrival_is_unknown_without_a_partner():
    job = two_machines()
    job.gather({0: 100, 1: 160}, 10, sequence=-1)
    run = job.run()
    assert last_arrivals(run, 0, run.events(0), align_clocks(run)).tolist() == [-1]


offsets = st.integers(-(10**12), 10**12)
drifts = st.floats(-2e-4, 2e-4)
collectives = st.lists(
    st.tuples(
        st.integers(0, 5_000_000),
        st.lists(st.integers(0, 400_000), min_size=4, max_size=4),
        st.integers(1, 300_000),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.tuples(offsets, drifts), st.tuples(offsets, drifts), collectives, st.booleans())
def test_the_true_offset_lies_within_the_stated_uncertainty(one, two, schedule, chained):
    machines, clocks = ["a", "a", "b", "c"], {"a": Clock(), "b": Clock(*one), "c": Clock(*two)}
    groups = [[0, 1], [0, 2]] if chained else [[0, 1, 2, 3]]
    job = Job(machines, clocks, groups=groups, step_ns=10**15)
    now, times = 0, []
    for pause, lateness, transfer in schedule:
        arrivals = {rank: now + pause + late for rank, late in enumerate(lateness)}
        pairs = [(0, 2), (2, 3)] if chained else [(0, 1, 2, 3)]
        for group, members in enumerate(pairs):
            mine = {rank: arrivals[rank] for rank in members}
            columns = {"group": 1 - group} if chained else {}
            times.append(max(mine.values()))
            now = max(now, job.gather(mine, transfer, **columns))
    alignment = align_clocks(job.run())
    true = np.array(times)
    for rank, other in [(0, 2), (0, 3), (2, 3)]:
        shown = {r: np.array([job.clocks[r](t) for t in times]) for r in (rank, other)}
        there = alignment.from_reference(rank, alignment.to_reference(other, shown[other]))
        assert np.abs(there - shown[rank]).max() <= alignment.between_ns(rank, other) + 2
    assert np.array_equal(alignment.to_reference(0, true), true)


@pytest.mark.parametrize("drift", [-1e-4, 3e-5])
def test_a_drift_is_found_over_a_long_run(drift):
    job = Job(["a", "b"], {"a": Clock(), "b": Clock(77, drift)})
    for start in range(0, 10**12, 10**10):
        job.gather({0: start, 1: start}, 1_000)
    alignment = align_clocks(job.run())
    assert alignment.clocks[1].clock.drift == pytest.approx(drift, abs=1e-8)
    assert alignment.uncertainty_ns < 1_000_000
