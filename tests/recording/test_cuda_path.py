"""The CUDA path without a GPU: the recorder records a known schedule on virtual streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.recording.clocks import CudaClock
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.torch_api.fsdp2 import groups_of
from fsdp_inspect.simulation.network import fit_network
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import EventFlag, EventKind, Method, StepPart
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect.trace.run import ProcessGroup

from .virtual_device import MS, VirtualDevice
from .virtual_training import (
    WORLD_SIZE,
    Replay,
    shard_blocks_and_root,
    shard_to_pairs_after_forward,
    shard_without_root,
)

COMPUTE = ("forward", "backward")


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def bandwidth_bound() -> Replay:
    return Replay(gather_ms=6, scatter_ms=6)


@pytest.fixture(scope="module")
def well_hidden() -> Replay:
    return Replay(gather_ms=1, scatter_ms=1)


def test_collective_ends_are_those_of_the_device(bandwidth_bound: Replay) -> None:
    for unit in bandwidth_bound.units:
        for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
            recorded = [end for _, end in bandwidth_bound.recorded(kind, unit)]
            happened = [end for _, end in bandwidth_bound.happened(kind.label, unit)]
            assert recorded
            assert recorded == pytest.approx(happened, abs=200), (kind, unit)


def test_a_collective_starts_no_later_than_it_ran_and_after_its_predecessor_on_the_stream(
    bandwidth_bound: Replay,
) -> None:
    for unit in bandwidth_bound.units:
        recorded = bandwidth_bound.recorded(EventKind.REDUCE_SCATTER, unit)
        happened = bandwidth_bound.happened("reduce_scatter", unit)
        for (start, _), (true_start, _) in zip(recorded, happened, strict=True):
            assert start <= true_start + 200


def test_forward_spans_hold_the_compute_of_their_unit(well_hidden: Replay) -> None:
    for unit in well_hidden.units[1:]:
        [(start, end)] = well_hidden.recorded(EventKind.FORWARD, unit)
        [(true_start, true_end)] = well_hidden.happened("forward", unit)
        assert start <= true_start + 200
        assert end == pytest.approx(true_end, abs=200)


def test_backward_spans_hold_the_compute_of_their_unit(bandwidth_bound: Replay) -> None:
    for unit in bandwidth_bound.units[1:]:
        [(start, end)] = bandwidth_bound.recorded(EventKind.BACKWARD, unit)
        [(true_start, true_end)] = bandwidth_bound.happened("backward", unit)
        assert start <= true_start + 200
        assert end >= true_end - 200


# --- plain steps

PLAIN = (2, 3, 4, 6)


def _times(replay: Replay, step: int) -> list[tuple[int, ...]]:
    """The rows of a step, with times from its start on."""
    events = replay.events.where(replay.events.step == step)
    [begin] = events.start_ns[events.kind == EventKind.STEP].tolist()
    ends = (events.start_ns - begin, events.end_ns - begin)
    need = np.where(events.need_ns >= 0, events.need_ns - begin, -1)
    columns = (events.kind, events.unit, events.phase, events.bytes, *ends, need)
    rows = zip(*(each.tolist() for each in columns), strict=True)
    return sorted(rows)


@pytest.mark.parametrize(("gather_ms", "scatter_ms"), [(6, 6), (1, 1), (1, 12)])
def test_a_detailed_step_between_plain_steps_is_recorded_as_in_a_whole_recording(
    gather_ms: float, scatter_ms: float
) -> None:
    whole, sampled = (
        Replay(gather_ms=gather_ms, scatter_ms=scatter_ms, plain=plain, num_steps=8)
        for plain in ((), PLAIN)
    )
    for step in {*range(8)} - {*PLAIN}:
        assert _times(sampled, step) == _times(whole, step), step
    of_step = reduce_rank(sampled.events, rank=0), reduce_rank(whole.events, rank=0)
    ours, theirs = (rows.where(rows.step == 7) for rows in of_step)
    assert ours.duration_ns.tolist() == theirs.duration_ns.tolist()
    assert ours.exposed_ns.tolist() == theirs.exposed_ns.tolist()


@pytest.mark.parametrize("shard", [shard_blocks_and_root, shard_without_root])
def test_a_plain_step_has_rows_of_its_parts_and_notes_each_collective(shard: Any) -> None:
    whole, sampled = (
        Replay(gather_ms=6, scatter_ms=6, shard=shard, plain=plain, num_steps=8)
        for plain in ((), PLAIN)
    )
    rows = sampled.events.where(np.isin(sampled.events.step, PLAIN))
    assert set(rows.unit.tolist()) == {-1}
    assert set(rows.kind.tolist()) == {EventKind.STEP, EventKind.FORWARD, EventKind.BACKWARD}
    for step in PLAIN:
        parts = [row for row in _times(whole, step) if row[0] in set(rows.kind.tolist())]
        assert _times(sampled, step) == [row for row in parts if row[1] == -1]
    assert sampled.box.num_issued == whole.box.num_issued > 0
    assert sampled.box.num_finished == whole.box.num_finished
    assert [order.last for order in sampled.box.orders] == [
        order.last for order in whole.box.orders
    ]


def test_plain_steps_make_no_further_events_on_the_device() -> None:
    replay = Replay(gather_ms=6, scatter_ms=6, plain=range(4, 40), num_steps=40)
    assert replay.events_made[-1] == replay.events_made[6]


def _idle_ns(replay: Replay) -> int:
    """The idle time of the compute stream between the last step's first and last work."""
    work = [(start, end) for kind, _, start, end in replay.device.log if kind in COMPUTE]
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(sorted(work))]
    return sum(gap for gap in gaps if gap > 0)


def test_exposed_time_is_the_time_the_compute_stream_stood_still(bandwidth_bound: Replay) -> None:
    summary = reduce_rank(bandwidth_bound.events, rank=0)
    last = summary.where(summary.step == summary.step.max())
    steps = last.where(last.kind == EventKind.STEP)
    first_gather = bandwidth_bound.happened("all_gather", "")[0]
    last_scatter = max(
        end for kind, _, _, end in bandwidth_bound.device.log if kind == "reduce_scatter"
    )
    last_compute = max(end for kind, _, _, end in bandwidth_bound.device.log if kind == "backward")
    head = bandwidth_bound.happened("forward", "layers.0")[0][0] - first_gather[0]
    expected = _idle_ns(bandwidth_bound) + head + (last_scatter - last_compute)
    assert steps.exposed_ns[0] == pytest.approx(expected, rel=0.02)


def test_the_parts_of_each_step_add_up(bandwidth_bound: Replay) -> None:
    summary = reduce_rank(bandwidth_bound.events, rank=0)
    for step in np.unique(summary.step):
        rows = summary.where(summary.step == step)
        parts = rows.where((rows.kind >= 100) & (rows.kind < StepPart.COMMUNICATION))
        whole = rows.where(rows.kind == EventKind.STEP)
        assert parts.duration_ns.sum() == whole.duration_ns[0]


def test_little_is_exposed_when_compute_is_long(well_hidden: Replay) -> None:
    summary = reduce_rank(well_hidden.events, rank=0)
    last = summary.where((summary.step == summary.step.max()) & (summary.kind == EventKind.STEP))
    floor_ns = 4 * MS  # the first two gathers of the forward, the last two reductions
    assert last.exposed_ns[0] == pytest.approx(floor_ns, abs=0.2 * MS)


def test_the_wait_for_a_reduction_belongs_to_the_unit_that_is_reduced() -> None:
    replay = Replay(gather_ms=1, scatter_ms=12)
    events = replay.events
    waits = events.where(events.kind == EventKind.REDUCE_SCATTER_WAIT)
    elsewhere = waits.where((waits.unit != waits.issued_by) & (waits.end_ns > waits.start_ns))
    names = {
        (replay.units[unit], replay.units[place])
        for unit, place in zip(elsewhere.unit, elsewhere.issued_by, strict=True)
        if place >= 0
    }
    assert {("layers.3", "layers.2"), ("layers.2", "layers.1")} <= names


def _host_behind_ns(replay: Replay) -> tuple[int, int]:
    """The time in which the device may lack work in the last step, and the time of that step."""
    summary = reduce_rank(replay.events, rank=0)
    last = summary.where(summary.step == summary.step.max())
    durations = [
        int(last.duration_ns[last.kind == kind][0])
        for kind in (StepPart.HOST_BEHIND, EventKind.STEP)
    ]
    return durations[0], durations[1]


@pytest.mark.parametrize("host_ms", [1, 2, 5])
def test_the_host_is_behind_for_at_least_the_idle_time_of_the_device(host_ms: float) -> None:
    replay = Replay(gather_ms=0.2, scatter_ms=0.2, forward_ms=0.5, host_ms=host_ms)
    behind_ns, step_ns = _host_behind_ns(replay)
    assert behind_ns > _idle_ns(replay) - 0.5 * MS  # exposed waits are idle time, too
    assert behind_ns <= step_ns
    assert host_ms < 2 or behind_ns > 0.6 * step_ns


def test_a_host_that_runs_ahead_is_not_behind(well_hidden: Replay) -> None:
    behind_ns, step_ns = _host_behind_ns(well_hidden)
    assert behind_ns < 0.1 * step_ns


def test_host_bound_waits_are_not_called_exposed() -> None:
    replay = Replay(gather_ms=1, scatter_ms=1, forward_ms=0.5, host_ms=5)
    summary = reduce_rank(replay.events, rank=0)
    last = summary.where(summary.step == summary.step.max())
    step = last.where(last.kind == EventKind.STEP)
    assert step.exposed_ns[0] < 0.4 * step.duration_ns[0]


def _waited_ns(replay: Replay, kind: EventKind) -> int:
    events = replay.events
    waits = events.where((events.kind == kind) & (events.step == events.step.max()))
    return int((waits.end_ns - waits.start_ns).sum())


def test_units_that_are_roots_wait_for_their_own_reductions_only() -> None:
    # torch keeps one communication context for each root, so a block never waits for another
    # block's reduction. All remaining reductions are awaited at the end of the backward.
    replay = Replay(gather_ms=1, scatter_ms=12, shard=shard_without_root)
    ends = {k: max(e for kind, _, _, e in replay.device.log if kind == k)
            for k in ("backward", "reduce_scatter")}  # fmt: skip
    waited = _waited_ns(replay, EventKind.REDUCE_SCATTER_WAIT)
    assert waited == pytest.approx(ends["reduce_scatter"] - ends["backward"], abs=0.2 * MS)
    assert waited > 20 * MS


def _make_asynchronous(model: Any) -> None:
    model._set_unshard_async_op(True)
    blocks = list(model.layers)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


@pytest.mark.parametrize("prepare", [None, _make_asynchronous], ids=["implicit", "async"])
def test_copies_into_a_gather_have_the_length_they_had_on_their_stream(prepare: Any) -> None:
    replay = Replay(gather_ms=3, scatter_ms=1, copy_ms=2, prepare=prepare)
    for unit in replay.units:
        for start, end in replay.recorded(EventKind.ALL_GATHER_COPY_IN, unit):
            assert end - start == pytest.approx(2 * MS, abs=200), unit


def test_a_copy_begins_after_its_wait_for_the_shards_that_the_forward_has_made() -> None:
    # The host runs ahead: at the call of the backward's gather, the forward is not computed yet.
    replay = Replay(
        gather_ms=1, scatter_ms=1, forward_ms=6, copy_ms=0.05, shard=shard_to_pairs_after_forward
    )
    lengths = [
        end - start
        for unit in replay.units[1:]
        for start, end in replay.recorded(EventKind.ALL_GATHER_COPY_IN, unit)
    ]
    assert lengths == [pytest.approx(0.05 * MS, abs=200)] * len(lengths)
    assert len(lengths) >= 2 * len(replay.units[1:]) - 1


@pytest.fixture(scope="module")
def asynchronous() -> Replay:
    return Replay(gather_ms=1, scatter_ms=1, forward_ms=6, prepare=_make_asynchronous)


def test_an_asynchronous_gather_is_inferred_and_lasts_no_shorter_than_it_did(
    asynchronous: Replay,
) -> None:
    events = asynchronous.events
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    assert set(gathers.method.tolist()) == {Method.INFERRED}
    assert np.all(gathers.flags & EventFlag.ASYNC)
    assert np.all(gathers.flags & EventFlag.LATEST_END)
    for unit in asynchronous.units:
        recorded = asynchronous.recorded(EventKind.ALL_GATHER, unit)
        for (start, end), (begin, finish) in zip(
            recorded, asynchronous.happened("all_gather", unit), strict=True
        ):
            assert start <= begin + 200
            assert end >= finish - 200
    # A hidden gather appears to last until it is needed: six times its true 1 ms.
    [hidden] = asynchronous.recorded(EventKind.ALL_GATHER, "layers.2")[:1]
    assert hidden[1] - hidden[0] > 4 * MS


def test_nothing_calibrates_on_the_duration_of_an_asynchronous_gather(
    asynchronous: Replay,
) -> None:
    groups = [ProcessGroup(index=0, name="0", ranks=list(range(WORLD_SIZE)), role="shard")]
    events = asynchronous.events
    rates = bus_bytes_per_s(events, groups)
    assert np.isnan(rates[events.kind == EventKind.ALL_GATHER]).all()
    assert np.isfinite(rates[events.kind == EventKind.REDUCE_SCATTER]).any()
    lines = fit_network(events.where(events.step == events.step.max()), groups).lines
    assert set(lines) == {EventKind.REDUCE_SCATTER}


def test_the_wait_for_an_asynchronous_gather_is_exact(asynchronous: Replay) -> None:
    replay = Replay(gather_ms=9, scatter_ms=1, forward_ms=4, prepare=_make_asynchronous)
    summary = reduce_rank(replay.events, rank=0)
    last = summary.where((summary.step == summary.step.max()) & (summary.kind == EventKind.STEP))
    first = replay.happened("all_gather", "")[0][0]
    head = replay.happened("forward", "layers.0")[0][0] - first
    tail = max(e for kind, _, _, e in replay.device.log if kind == "reduce_scatter") - max(
        e for kind, _, _, e in replay.device.log if kind == "backward"
    )
    assert last.exposed_ns[0] == pytest.approx(_idle_ns(replay) + head + tail, rel=0.02)


class PrefetchingReplay(Replay):
    """Prefetches a block for the next step at the end of each step."""

    def finish_step(self, model: Any, session: Session) -> None:
        [group] = groups_of(model.layers[1]._get_fsdp_state())
        group._prefetch_unshard(group, "forward")


def test_only_the_prefetch_behind_the_last_step_is_unused() -> None:
    replay = PrefetchingReplay(gather_ms=1, scatter_ms=1)
    events = replay.events
    unused = events.where((events.flags & EventFlag.UNUSED) != 0)
    assert unused.unit.tolist() == [replay.units.index("layers.1")]
    assert unused.step.tolist() == [3]
    last_gather = replay.happened("all_gather", "layers.1")[-1]
    assert unused.end_ns[0] == pytest.approx(last_gather[1], abs=200)


def test_events_go_back_to_the_pool() -> None:
    device = VirtualDevice()
    clock = CudaClock(device)
    for _ in range(10):
        marks = [clock.mark() for _ in range(5)]
        device.spend(MS)
        for mark in marks:
            clock.read(mark)
    assert len(clock._pool) == 5
