"""The budget of a recording: which steps are detailed, on all ranks alike, and at what cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fsdp_inspect import Recorder
from fsdp_inspect.recording import overhead
from fsdp_inspect.recording.overhead import (
    BLOCK,
    FIRST_DETAILED,
    DetailSchedule,
    OverheadControl,
    period_of,
    read_overhead,
)
from fsdp_inspect.recording.unit_timing import UnitTimer
from fsdp_inspect.statistics import compare_blocks
from fsdp_inspect.store.folder import ask_for_detail, ask_for_profile
from fsdp_inspect.trace.codes import EventKind
from tests.cases import examples

STEP_NS = 10_000_000
NUM_FIRST = 3 + FIRST_DETAILED


class Store:
    """A key-value store of ranks that share this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def _control(folder: Path, rank: int = 0, *, world_size: int = 2, budget: float = 0.01) -> Any:
    session: Any = SimpleNamespace(
        detail=True,
        step=0,
        times_plain=False,
        plain_ns=0,
        black_box=SimpleNamespace(num_issued=0, keeper_cpu_ns=0),
    )
    return OverheadControl(
        session,
        budget,
        rank=rank,
        world_size=world_size,
        num_first=NUM_FIRST,
        folder=folder,
    )


class Job:
    """Ranks whose detailed steps take a known time longer, each with its own control."""

    def __init__(
        self, controls: list[Any], *, cost: float, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.controls, self.store = controls, Store()
        self.cost, self.noise, self.cost_of_all = cost, noise, 1.0
        self.random = np.random.default_rng(seed)
        self.chosen: list[list[bool]] = [[] for _ in controls]
        self.clock_ns = 0

    def run(self, steps: int, *, slow: frozenset[int] = frozenset()) -> None:
        for step in range(len(self.chosen[0]), len(self.chosen[0]) + steps):
            wanted = [control.choose(step, needs_detail=False) for control in self.controls]
            time_ns = STEP_NS * self.cost_of_all * (1 + self.cost * any(wanted))
            time_ns *= 1 + self.noise * abs(self.random.standard_normal()) + 4 * (step in slow)
            start, self.clock_ns = self.clock_ns, self.clock_ns + round(time_ns)
            for control, chosen, seen in zip(self.controls, wanted, self.chosen, strict=True):
                seen.append(chosen)
                control._session.detail, control._session.step = chosen, step + 1
                control.note_step(step, start, self.clock_ns, counts=True)
            if step % 100 == 99:  # one second of these steps
                for control in self.controls:
                    control.tick(self.store, "run")

    @property
    def ratio(self) -> float:
        """What the detailed steps of rank 0 cost, as a part of all its steps."""
        return self.cost * sum(self.chosen[0]) / len(self.chosen[0])


@pytest.fixture(autouse=True)
def decide_at_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_DECIDE_EVERY_S", 0.0)
    monkeypatch.setattr(overhead, "_cpu_of_threads", lambda: (0, 0))


def test_the_first_steps_are_detailed_then_blocks_alternate() -> None:
    schedule = DetailSchedule(NUM_FIRST, 0.01)
    chosen = [schedule.is_detailed(step) for step in range(NUM_FIRST + 4 * BLOCK)]
    assert chosen[:NUM_FIRST] == [True] * NUM_FIRST
    assert chosen[NUM_FIRST:] == ([False] * BLOCK + [True] * BLOCK) * 2


@given(st.lists(st.tuples(st.integers(0, 3000), st.floats(0.0005, 1.0)), max_size=5))
def test_each_part_has_the_share_that_was_published(parts: list[tuple[int, float]]) -> None:
    schedule = DetailSchedule(NUM_FIRST, 0.01)
    for ahead, share in parts:
        first = schedule.last_begin + ahead
        schedule.space(first, period_of(share))
        period = schedule.period
        chosen = [schedule.is_detailed(step) for step in range(first, first + 3 * period)]
        assert sum(chosen) == 3 * BLOCK
        assert sum(chosen) <= 3 * period * min(share, 1) + 3 * BLOCK * (period == 2000)


@settings(max_examples=examples(30))
@given(
    cost=st.floats(0.005, 0.4),
    noise=st.floats(0.0, 0.05),
    budget=st.sampled_from([0.005, 0.01, 0.03]),
    seed=st.integers(0, 100),
)
def test_the_cost_of_detail_stays_in_the_budget(
    tmp_path_factory: pytest.TempPathFactory,
    cost: float,
    noise: float,
    budget: float,
    seed: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    job = Job([_control(folder, budget=budget)], cost=cost, noise=noise, seed=seed)
    job.run(4000)
    # The blocks at the start, those of the assumed cost until the first choice, and one at the end.
    fixed = cost * (NUM_FIRST + BLOCK * (overhead.NUM_PROBES + 5)) / 4000
    assert job.ratio <= max(1.1 * budget + cost * BLOCK / 4000, fixed)


def test_a_quiet_machine_uses_most_of_the_budget(tmp_path: Path) -> None:
    job = Job([_control(tmp_path)], cost=0.05, noise=0.002)
    job.run(8000)
    assert 0.006 < job.ratio <= 0.0105


def test_detail_below_the_budget_is_kept_in_nearly_all_steps(tmp_path: Path) -> None:
    job = Job([_control(tmp_path, budget=0.03)], cost=0.01, noise=0.001)
    job.run(3000)
    assert sum(job.chosen[0][1000:]) > 0.6 * 2000


def test_ranks_choose_the_same_steps(tmp_path: Path) -> None:
    job = Job([_control(tmp_path, rank) for rank in range(3)], cost=0.05, noise=0.01)
    job.run(4000, slow=frozenset({900, 2500}))
    assert job.chosen[0] == job.chosen[1] == job.chosen[2]
    assert len(job.store.values) >= 2


def test_without_a_store_the_ranks_keep_to_one_schedule(tmp_path: Path) -> None:
    controls = [_control(tmp_path, rank) for rank in range(2)]
    for step in range(1000):
        chosen = [control.choose(step, needs_detail=False) for control in controls]
        assert chosen[0] == chosen[1]
        for control in controls:
            control._session.detail = chosen[0]
            control.note_step(step, step * STEP_NS, (step + 1) * STEP_NS, counts=True)
            control.tick(None, "run")


def test_a_slow_step_asks_for_detail_soon_and_not_too_often(tmp_path: Path) -> None:
    usual, job = (Job([_control(tmp_path)], cost=0.2) for _ in range(2))
    for each in (usual, job):
        each.run(2000)
    usual.run(1000)
    job.run(1000, slow=frozenset({2150, 2160, 2170}))
    added = [
        step
        for step, (before, now) in enumerate(zip(usual.chosen[0], job.chosen[0], strict=True))
        if now and not before
    ]
    assert 1 <= len(added) <= BLOCK
    assert 2150 < added[0] <= 2150 + 100 + 300 + BLOCK


def test_a_lasting_change_asks_once_for_as_much_detail_as_its_causes_need(tmp_path: Path) -> None:
    usual, job = (Job([_control(tmp_path)], cost=0.05, noise=0.02) for _ in range(2))
    for each in (usual, job):
        each.run(2000)
    usual.run(1000)
    job.cost_of_all = 1.5
    job.run(1000)
    added = [
        step
        for step, (before, now) in enumerate(zip(usual.chosen[0], job.chosen[0], strict=True))
        if now and not before and step < 2500
    ]
    assert 2010 < added[0] <= added[-1] < added[0] + 2 * BLOCK
    assert all(job.chosen[0][added[0] : added[0] + 2 * BLOCK])


def test_another_number_of_collectives_asks_for_detail(tmp_path: Path) -> None:
    control = _control(tmp_path)
    job = Job([control], cost=0.2)
    job.run(2000)
    before = len(job.store.values)
    control._session.black_box.num_issued += 3
    job.run(100)
    assert len(job.store.values) == before + 1


def test_the_dashboard_asks_for_detail_by_a_file(tmp_path: Path) -> None:
    job = Job([_control(tmp_path), _control(tmp_path, 1)], cost=0.2)
    job.run(2000)
    before = len(job.store.values)
    ask_for_detail(tmp_path)
    job.run(100)
    assert len(job.store.values) == before + 1
    assert not list(tmp_path.iterdir())


def test_the_dashboard_asks_for_a_profile_of_equal_steps_on_all_ranks(tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []
    controls = [_control(tmp_path, rank) for rank in range(2)]
    for rank, control in enumerate(controls):
        control.profile = lambda *steps, rank=rank: asked.append((rank, *steps))
    job = Job(controls, cost=0.2)
    job.run(100)
    ask_for_profile(tmp_path)
    job.run(1000)
    (first, *steps), (second, *others) = asked
    assert (first, second) == (0, 1)
    assert steps == others
    assert steps[1] - steps[0] == 2
    assert steps[0] > 100
    assert not list(tmp_path.iterdir())


def test_a_step_that_needs_detail_has_it(tmp_path: Path) -> None:
    control = _control(tmp_path)
    plain = next(step for step in range(100) if not control.choose(step, needs_detail=False))
    assert control.choose(plain, needs_detail=True)


def test_a_plain_collective_is_noted_with_its_own_size() -> None:
    """FSDP1 gathers full precision in an evaluation; a rank that does so alone must differ."""
    noted: list[int] = []

    def issue(*entry: Any) -> int:
        noted.append(entry[3])
        return len(noted)

    session = MagicMock(active=True, times_plain=False, in_backward=False)
    session.black_box.issue = issue
    timer = UnitTimer(session, MagicMock(), 0, MagicMock())
    for size in (8, 8, 16, 8):
        timer.plain_note(EventKind.ALL_GATHER)(torch.zeros(size), MagicMock())
    assert noted == [32, 32, 64, 32]
    session.fail.assert_not_called()


def test_the_notes_of_the_first_plain_step_of_a_block_are_timed(tmp_path: Path) -> None:
    control = _control(tmp_path)
    timed = []
    for step in range(NUM_FIRST + 4 * BLOCK):
        control._session.detail = control.choose(step, needs_detail=False)
        timed.append(control._session.times_plain)
    assert [step for step, each in enumerate(timed) if each] == [
        NUM_FIRST,
        NUM_FIRST + 2 * BLOCK,
    ]


@pytest.mark.parametrize(("text", "budget"), [("1%", 0.01), ("0.5 %", 0.005), (0.03, 0.03)])
def test_a_budget_is_a_percentage_or_a_part(text: Any, budget: float) -> None:
    assert read_overhead(text) == pytest.approx(budget)


@pytest.mark.parametrize("value", ["1", "-1%", "0%", "101%", "x%", 0, 1.5, True, "nan%"])
def test_other_budgets_are_refused_with_the_value(value: Any) -> None:
    with pytest.raises(ValueError, match="overhead must be") as raised:
        Recorder(SimpleNamespace(), overhead=value)  # type: ignore[arg-type]
    assert repr(value) in str(raised.value)


# --- the comparison of blocks


@settings(max_examples=examples(100))
@given(
    cost=st.floats(-0.05, 0.3),
    drift=st.floats(-0.3, 0.3),
    num_blocks=st.integers(1, 30),
)
def test_a_known_cost_is_found_under_a_slow_drift(
    cost: float, drift: float, num_blocks: int
) -> None:
    steps = np.arange(2 * 4 * num_blocks + 4)
    marked = steps // 4 % 2 == 1
    times = 1e7 * (1 + drift * steps / len(steps)) * (1 + cost * marked)
    found = compare_blocks(steps, times.astype(np.int64), marked, length=4)
    assert found is not None
    assert found.num_blocks == num_blocks
    assert found.low - 1e-9 <= found.ratio <= found.high + 1e-9
    assert found.ratio == pytest.approx(cost, abs=0.02 + abs(drift) * 0.1)


def test_the_interval_holds_the_cost_in_most_runs() -> None:
    steps, hits = np.arange(2 * 4 * 20 + 4), 0
    marked = steps // 4 % 2 == 1
    for seed in range(200):
        noise = np.random.default_rng(seed).gamma(2.0, 0.02, len(steps))
        times = (1e7 * (1 + 0.03 * marked) * (1 + noise)).astype(np.int64)
        found = compare_blocks(steps, times, marked, length=4)
        assert found is not None
        hits += found.low <= 0.03 <= found.high
    assert 180 <= hits <= 200


def test_blocks_without_steps_on_both_sides_do_not_count() -> None:
    steps = np.arange(12)
    times = np.full(12, 1000)
    assert compare_blocks(steps, times, steps < 4, length=4) is None
    assert compare_blocks(steps, times, steps >= 8, length=4) is None
    assert compare_blocks(steps, times, np.zeros(12, dtype=bool), length=4) is None
    assert compare_blocks(steps, times, (steps >= 2) & (steps < 8), length=4) is None
