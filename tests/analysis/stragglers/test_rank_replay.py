"""The replay of ranks: the recorded step, and steps with exchanged programs."""

from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.stragglers.rank_replay import Replay, read_programs
from fsdp_inspect.trace.codes import EventKind, Stream
from tests.builders import RunBuilder
from tests.cases import examples


class Lockstep:
    """Ranks that work, issue collectives and wait for them; records the events."""

    def __init__(self, num_ranks):
        self.builder = RunBuilder(world_size=num_ranks)
        self.ranks = [self.builder.rank(rank) for rank in range(num_ranks)]
        self.now = [0] * num_ranks
        self._open = []
        self._link_free, self._sequence, self._starts = 0, 0, [0] * num_ranks
        for rank in self.ranks:
            rank.record = {"host": "a"}
            rank.step(0, 0, 0)
            rank.events.clear()

    def work(self, *durations):
        self.now = [now + duration for now, duration in zip(self.now, durations, strict=True)]

    def issue(self, transfer):
        """Every rank issues the next collective; they run one by one."""
        self._link_free = max(*self.now, self._link_free) + transfer
        self._open.append((list(self.now), self._link_free, self._sequence))
        self._sequence += 1

    def wait(self):
        """Every rank waits for the oldest open collective."""
        issued, end, sequence = self._open.pop(0)
        for number, rank in enumerate(self.ranks):
            times = {"issue_ns": issued[number], "need": self.now[number], "sequence": sequence}
            rank.all_gather("layers.0", issued[number], end, step=self._step, **times)
        self.now = [max(now, end) for now in self.now]

    _step = 0

    def end_step(self):
        while self._open:
            self.wait()
        for number, rank in enumerate(self.ranks):
            rank.add(EventKind.STEP, self._starts[number], self.now[number], step=self._step)
        self._starts, self._step = list(self.now), self._step + 1

    def replay(self):
        run = self.builder.build()
        ranks = range(len(self.ranks))
        programs = read_programs(run, ranks, range(self._step), align_clocks(run))
        return Replay(run, programs)


def three_steps(*work, transfer=10):
    job = Lockstep(len(work))
    for _ in range(3):
        job.work(*work)
        job.issue(transfer)
        job.wait()
        job.end_step()
    return job.replay()


def test_the_recorded_step_is_reproduced():
    replay = three_steps(100, 100, 160)
    assert replay.recorded_ns == replay.step_time_ns() == 170


def test_a_straggler_that_works_like_another_no_longer_costs_what_it_was_late():
    replay = three_steps(100, 120, 160)
    assert replay.step_time_ns({2: 1}) == 130
    assert replay.step_time_ns({2: 0}) == 130
    assert replay.step_time_ns({1: 0, 2: 0}) == 110


def test_lateness_that_another_rank_shares_costs_nothing():
    assert three_steps(100, 160, 160).step_time_ns({2: 0}) == 170


def test_lateness_that_hides_behind_the_link_costs_nothing():
    job = Lockstep(2)
    for _ in range(3):
        job.issue(500)
        job.work(100, 300)
        job.wait()
        job.end_step()
    replay = job.replay()
    assert replay.recorded_ns == replay.step_time_ns() == replay.step_time_ns({1: 0}) == 500


def test_collectives_that_queue_on_the_link_stay_in_order():
    job = Lockstep(2)
    for _ in range(2):
        job.work(10, 30)
        job.issue(100)
        job.issue(100)
        job.wait()
        job.work(20, 40)
        job.wait()
        job.end_step()
    replay = job.replay()
    assert replay.step_time_ns() == replay.recorded_ns == 230
    assert replay.step_time_ns({1: 0}) == 210


def test_a_single_step_is_measured_from_its_own_beginning():
    job = Lockstep(2)
    job.work(50, 70)
    job.issue(10)
    job.end_step()
    assert job.replay().step_time_ns() == 80


def test_ranks_that_wait_for_each_other_in_turn_cannot_be_replayed():
    builder = RunBuilder()
    for number in (0, 1):
        rank = builder.rank(number)
        rank.record = {"host": "a"}
        rank.step(0, 0, 100)
        rank.all_gather("layers.0", 10, 20, need=10, sequence=number)
        rank.all_gather("layers.1", 30, 40, need=30, sequence=1 - number)
    run = builder.build()
    programs = read_programs(run, (0, 1), [0], align_clocks(run))
    assert Replay(run, programs).step_time_ns() is None


def test_kernel_traces_wait_where_no_kernel_runs():
    builder = RunBuilder()
    for number, work in ((0, 100), (1, 160)):
        rank = builder.rank(number)
        rank.record = {"host": "a"}
        rank.step(0, 0, 270)
        rank.add(EventKind.COMPUTE, 0, work, stream=Stream.COMPUTE)
        rank.all_gather("layers.0", work, 170, sequence=0)
        rank.add(EventKind.COMPUTE, 170, 270, stream=Stream.COMPUTE)
    run = builder.build()
    replay = Replay(run, read_programs(run, (0, 1), [0], align_clocks(run)))
    assert replay.step_time_ns() == replay.recorded_ns == 270
    assert replay.step_time_ns({1: 0}) == 210


work = st.integers(1, 1_000)
actions = st.one_of(
    st.tuples(st.just("work"), work, work, work),
    st.tuples(st.just("issue"), st.integers(1, 500)),
    st.tuples(st.just("wait")),
)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(actions, min_size=1, max_size=15))
def test_any_schedule_of_work_collectives_and_waits_is_reproduced(schedule):
    job = Lockstep(3)
    for _ in range(2):
        for name, *values in schedule:
            if name == "wait" and not job._open:
                continue
            getattr(job, name)(*values)
        job.end_step()
    replay = job.replay()
    assert replay.step_time_ns() == replay.recorded_ns
