"""The schedule equals torch's own FSDP2 code on virtual streams to the nanosecond."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation.machine import HostMachine, StreamMachine
from fsdp_inspect.simulation.schedule import Schedule, SimulatedStep, Span
from fsdp_inspect.simulation.workload import (
    Microbatch,
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    tape_of,
)
from fsdp_inspect.trace.codes import EventKind
from tests.cases import examples
from tests.simulation.oracle import Case, Layer, Move, play_with_torch, workload_of

US = 1_000
MS = 1_000_000
NUM_CASES = 60

Spans = list[tuple[str, str, int, int]]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def hybrid_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))


def durations(most_us: int) -> st.SearchStrategy[int]:
    return st.integers(0, most_us).map(lambda us: us * US)


@st.composite
def layers(draw: st.DrawFn, unit: int, num_layers: int, launch_ns: int) -> Layer:
    depth = draw(st.sampled_from([0, 0, 1, 2, 3]))
    behind = draw(st.sampled_from([None, 1, 2, 3])) if unit else None
    named = None if behind is None else tuple(range(unit - 1, max(0, unit - behind - 1), -1))
    group = draw(st.sampled_from([None, None, 2, 4]))
    smaller = {
        "gather_backward_ns": draw(durations(9_000)),
        "copy_in_backward_ns": draw(durations(400)),
        "reshard_ns": draw(durations(400)),
    }
    work = UnitWork(
        **(smaller if group else {}),
        gather_ns=draw(durations(9_000)),
        reduce_ns=draw(durations(9_000)),
        all_reduce_ns=draw(durations(4_000)) + US,
        copy_in_ns=draw(durations(200)),
        reduce_copy_in_ns=draw(durations(200)),
        gather_launch_ns=draw(durations(200)),
        reduce_launch_ns=draw(durations(100)),
    )
    policy = UnitPolicy(
        reshard_after_forward=group is not None or draw(st.booleans()),
        smaller_group=group,
        forward_prefetch=tuple(range(unit + 1, min(num_layers, unit + depth) + 1)),
        backward_prefetch=named,
    )
    return Layer(draw(durations(3_000)), draw(durations(6_000)), work, policy, launch_ns=launch_ns)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_layers = draw(st.integers(1, 6))
    launch_ns = draw(st.sampled_from([0, 10 * US, 100 * US, 2 * MS]))
    last = draw(st.integers(0, 2))
    reduces_each, finishes_each = draw(st.booleans()), draw(st.booleans())
    return Case(
        head=draw(layers(0, num_layers, launch_ns)),
        layers=[draw(layers(unit, num_layers, launch_ns)) for unit in range(1, num_layers + 1)],
        input_needs_grad=draw(st.booleans()),
        max_reduce_buffers=draw(st.integers(1, 3)),
        separate_reduce_group=draw(st.booleans()),
        microbatches=[
            Microbatch(reduces=reduces_each or at == last, finishes=finishes_each or at == last)
            for at in range(last + 1)
        ],
    )


@st.composite
def programs(draw: st.DrawFn) -> Case:
    """Forwards and backwards in any order, of a model whose root ran at least once.

    Some units are frozen.
    """
    case = replace(draw(cases()), input_needs_grad=True, separate_reduce_group=False)
    is_frozen = draw(st.lists(st.booleans(), min_size=len(case.all), max_size=len(case.all)))
    if draw(st.booleans()):
        case = frozen(case, is_frozen)
    blocks = st.lists(st.integers(1, len(case.layers)), max_size=4).map(tuple)
    moves = [Move("forward", draw(blocks))]
    num_graphs = 1
    for _ in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["forward", "no_grad", "layer", "backward", "backward"]))
        if kind == "backward":
            if num_graphs:
                num_graphs -= 1
                moves.append(Move(kind, graph=draw(st.integers(0, num_graphs))))
            continue
        num_graphs += kind != "no_grad"
        moves.append(Move(kind, draw(blocks) if kind != "layer" else (draw(blocks) or (1,))[:1]))
    # A whole pass at the end leaves no all-gather in flight for the next step.
    moves.append(Move("forward", tuple(range(1, len(case.layers) + 1))))
    moves.append(Move("backward", graph=num_graphs))
    return replace(case, program=moves)


def frozen(case: Case, is_frozen: Sequence[bool]) -> Case:
    layers = [
        replace(layer, work=replace(layer.work, is_trainable=not freeze))
        for layer, freeze in zip(case.all, is_frozen, strict=True)
    ]
    return replace(case, head=layers[0], layers=layers[1:])


def simulate_step(case: Case) -> SimulatedStep:
    """The second step, because every stream is idle at the begin of the first step."""
    schedule = Schedule(workload_of(case), StreamMachine())
    schedule.simulate()
    return schedule.simulate()


def of_two_at_most(case: Case) -> Case:
    """The case; if four ranks shard, two is the only smaller group."""
    layers = [
        replace(each, policy=replace(each.policy, smaller_group=each.policy.smaller_group and 2))
        for each in case.all
    ]
    return replace(case, head=layers[0], layers=layers[1:])


def without_replicas(case: Case) -> Case:
    alone = [replace(each, work=replace(each.work, all_reduce_ns=0)) for each in case.all]
    return replace(case, head=alone[0], layers=alone[1:])


def spans_of(step: SimulatedStep, kinds: Sequence[EventKind]) -> Spans:
    return sorted(
        (
            _label(span),
            f"layers.{span.unit - 1}" if span.unit else "",
            span.start_ns - step.start_ns,
            span.end_ns - step.start_ns,
        )
        for span in step.spans
        if span.kind in kinds and span.end_ns > span.start_ns
    )


def _label(span: Span) -> str:
    """The label of a span; the oracle names compute by its phase."""
    return span.phase.label if span.kind is EventKind.COMPUTE else span.kind.label


COMPARED = (
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.ALL_REDUCE,
    EventKind.COMPUTE,
)


def assert_same_schedule(case: Case, mesh: DeviceMesh) -> None:
    duration, device = play_with_torch(case, mesh)
    step = simulate_step(case)
    assert step.duration_ns == duration
    start = device.compute.free_ns - device.clock_offset_ns - duration
    labels = {"forward", "backward", *(kind.label for kind in COMPARED)}
    truth = sorted(
        (kind, unit, low - start, high - start)
        for kind, unit, low, high in device.log
        if kind in labels and high > low
    )
    assert spans_of(step, COMPARED) == truth


@given(case=cases())
@settings(max_examples=examples(NUM_CASES), deadline=None)
def test_the_schedule_is_that_of_torch_on_streams(mesh: DeviceMesh, case: Case):
    assert_same_schedule(without_replicas(case), mesh)


@given(case=programs())
@settings(max_examples=examples(NUM_CASES), deadline=None)
def test_any_program_of_passes_runs_as_on_torch(mesh: DeviceMesh, case: Case):
    assert_same_schedule(without_replicas(case), mesh)


@given(case=cases())
@settings(max_examples=examples(NUM_CASES // 2), deadline=None)
def test_the_schedule_is_that_of_torch_with_replicas(hybrid_mesh: DeviceMesh, case: Case):
    case = of_two_at_most(case)
    assert_same_schedule(replace(case, separate_reduce_group=False), hybrid_mesh)


@given(case=cases())
@settings(max_examples=examples(NUM_CASES), deadline=None)
def test_a_step_without_spans_takes_the_same_time(case: Case):
    schedule = Schedule(workload_of(case), StreamMachine())
    bare = [schedule.simulate(with_spans=False) for _ in range(2)][1]
    assert replace(simulate_step(case), spans=()) == bare


def blocks(num: int, work: UnitWork, *, reshard: bool = True) -> Workload:
    """Consecutive blocks of 10 ms forward and 20 ms backward, without a root."""
    pieces = [Piece(unit, 10 * MS, 20 * MS) for unit in range(num)]
    policies = [UnitPolicy(reshard_after_forward=reshard)] * num
    return Workload([work] * num, policies, pieces, passes_of(tape_of(pieces)))


def test_a_synchronous_backend_adds_every_collective_to_the_step():
    workload = blocks(4, UnitWork(gather_ns=3 * MS, reduce_ns=5 * MS))
    step = Schedule(workload, HostMachine(is_blocking=True)).simulate()
    assert step.duration_ns == 4 * (10 + 20) * MS + 4 * (3 + 3 + 5) * MS


def test_on_a_host_without_prefetch_every_forward_gather_is_waited_for():
    workload = blocks(4, UnitWork(gather_ns=3 * MS, reduce_ns=0, is_trainable=False))
    step = Schedule(workload, HostMachine(is_blocking=False)).simulate()
    # Backward hides all but the last unit's gather, which is issued at its need.
    assert step.duration_ns == 4 * (10 + 20) * MS + (4 + 1) * 3 * MS


def test_on_a_host_prefetch_hides_gathers_behind_compute():
    work = UnitWork(gather_ns=3 * MS, reduce_ns=0, is_trainable=False)
    plain = blocks(4, work)
    policies = [UnitPolicy(forward_prefetch=(unit + 1,) if unit < 3 else ()) for unit in range(4)]
    ahead = replace(plain, policies=policies)
    plain_step, ahead_step = (
        Schedule(workload, HostMachine(is_blocking=False)).simulate() for workload in (plain, ahead)
    )
    assert plain_step.duration_ns - ahead_step.duration_ns == 3 * 3 * MS


def test_units_that_stay_unsharded_are_gathered_once():
    work = UnitWork(gather_ns=3 * MS, reduce_ns=MS)
    step = Schedule(blocks(3, work, reshard=False), StreamMachine()).simulate()
    assert sum(span.kind is EventKind.ALL_GATHER for span in step.spans) == 3


def test_policies_that_do_not_match_the_units_are_refused():
    with pytest.raises(ValueError, match="Invalid number of policies: 0"):
        Workload([UnitWork(1, 1)], [], [], ())
