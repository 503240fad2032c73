"""A measured run replays exactly: simulate, write as a run, read back."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.recorded import Execution, measure_work
from fsdp_inspect.simulation.schedule import Schedule
from fsdp_inspect.simulation.simulate import predicted_events
from fsdp_inspect.simulation.step_pieces import read_step
from fsdp_inspect.simulation.workload import (
    Microbatch,
    Op,
    Pass,
    Piece,
    Tape,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    reversed_tape,
    tape_of,
)
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase, Source
from fsdp_inspect.trace.plan import Plan, UnitPlan
from tests.builders import InMemoryRun, RunBuilder
from tests.cases import examples

US = 1_000
MS = 1_000_000
SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))
NUM_STEPS = 5

durations = st.integers(1, 5_000).map(lambda us: us * US)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Consecutive blocks with hooks, copies and passes of any length; one block may be frozen."""
    num = draw(st.integers(2, 6))
    policies = [UnitPolicy(reshard_after_forward=draw(st.booleans())) for _ in range(num)]
    units = [
        UnitWork(
            gather_ns=draw(durations),
            reduce_ns=draw(durations),
            copy_in_ns=draw(durations),
            copy_out_ns=draw(durations),
            reduce_copy_in_ns=draw(durations),
            gather_launch_ns=draw(durations),
            reduce_launch_ns=draw(durations),
            ends_with_backward=unit == 0,
        )
        for unit in range(num)
    ]
    pieces = [Piece(unit, draw(durations), draw(durations)) for unit in range(num)]
    return Workload(
        units,
        policies,
        pieces,
        passes_of(
            tape_of(pieces),
            [Microbatch()] * draw(st.integers(1, 2)),
            before_forward_ns=draw(durations),
            after_forward_ns=draw(durations),
        ),
        after_ns=draw(durations),
    )


@st.composite
def programs(draw: st.DrawFn) -> Workload:
    """Passes over some of the blocks in any order, with or without a root unit around them."""
    workload = draw(workloads())
    num, has_root = len(workload.units), draw(st.booleans())
    units = [replace(unit, ends_with_backward=False) for unit in workload.units]
    passes: list[Pass] = []
    graphs: list[Tape] = []
    for _ in range(draw(st.integers(1, 6))):
        number = sum(not each.is_forward for each in passes)
        if graphs and draw(st.booleans()):
            tape = reversed_tape(graphs.pop(draw(st.integers(0, len(graphs) - 1))))
            reduced = frozenset(unit for op, unit in tape if op is Op.ENTER)
            passes.append(_drawn(draw, Pass(Phase.BACKWARD, tape, number, reduces=reduced)))
            continue
        blocks = draw(st.lists(st.integers(1, num - 1), min_size=1, max_size=5))
        tape = tuple(entry for unit in blocks for entry in _whole(unit, unit))
        if has_root:
            tape = ((Op.ENTER, 0), *tape, (Op.RUN, 0), (Op.LEAVE, 0))
        keeps_graph = draw(st.integers(0, 3)) > 0
        graphs += [tape] if keeps_graph else []
        passes.append(_drawn(draw, Pass(Phase.FORWARD, tape, number, keeps_graph=keeps_graph)))
    last = tuple(entry for unit in range(1, num) for entry in _whole(unit, unit))
    if has_root:
        last = ((Op.ENTER, 0), *last, (Op.RUN, 0), (Op.LEAVE, 0))
    number = sum(not each.is_forward for each in passes)
    passes.append(Pass(Phase.FORWARD, last, number))
    reduced = frozenset(unit for op, unit in last if op is Op.ENTER)
    passes.append(Pass(Phase.BACKWARD, reversed_tape(last), number, reduces=reduced))
    return replace(workload, units=units, passes=tuple(passes))


def _whole(unit: int, piece: int) -> Tape:
    return ((Op.ENTER, unit), (Op.RUN, piece), (Op.LEAVE, unit))


def _drawn(draw: st.DrawFn, one: Pass) -> Pass:
    return replace(one, before_ns=draw(durations))


UNIT_SIZES = {
    "num_parameters": 1_000_000,
    "num_trainable_parameters": 1_000_000,
    "unsharded_bytes": 4_000_000,
    "sharded_bytes": 2_000_000,
    "reduce_bytes": 4_000_000,
}
"""Large enough for milliseconds on any network."""


def names_of(workload: Workload) -> list[str]:
    return [f"layers.{unit}" for unit in range(len(workload.units))]


def as_run(
    workload: Workload, execution: Execution, sizes: Mapping[str, int] = UNIT_SIZES
) -> InMemoryRun:
    """The run that a recorder would write for these steps."""
    schedule = Schedule(workload, execution.machine())
    steps = [schedule.simulate() for _ in range(NUM_STEPS)]
    plan = Plan(
        units=(
            UnitPlan(modules=("",)),  # the root, which owns no parameters
            *(
                UnitPlan(modules=(name,), reshard_after_forward=policy.reshard_after_forward)
                for name, policy in zip(names_of(workload), workload.policies, strict=True)
            ),
        ),
        forward_prefetch={
            f"layers.{unit}": tuple(f"layers.{target}" for target in policy.forward_prefetch)
            for unit, policy in enumerate(workload.policies)
            if policy.forward_prefetch
        },
    )
    source = "emulated" if execution is Execution.HOST else "recorded"
    builder = RunBuilder(names_of(workload), plan=plan.to_dict(), source=source, warmup_steps=1)
    for name in names_of(workload):
        builder.unit(name, **sizes)
    builder.rank(0).step(0, 0, 1)
    run = builder.build()
    events = predicted_events(steps, run.manifest.units, on_host=True)
    return replace(run, event_tables={0: events})


def played_again(run: InMemoryRun) -> tuple[int, int]:
    """The simulated and the measured time of a run, ns."""
    work = measure_work(run)
    return work.simulate().duration_ns, work.step_time_ns


@given(workload=workloads())
@settings(max_examples=examples(60), deadline=None)
def test_a_blocking_run_plays_again_in_its_own_time(workload: Workload):
    played, measured = played_again(as_run(workload, Execution.BLOCKING_HOST))
    assert abs(played - measured) <= 200  # ns: every mean is rounded


@given(workload=workloads())
@settings(max_examples=examples(60), deadline=None)
def test_an_emulated_run_plays_again_in_its_own_time(workload: Workload):
    played, measured = played_again(as_run(workload, Execution.HOST))
    assert abs(played - measured) <= 200  # ns: every mean is rounded


@given(workload=programs())
@settings(max_examples=examples(150), deadline=None)
def test_any_program_of_passes_plays_again_in_its_own_time(workload: Workload):
    played, measured = played_again(as_run(workload, Execution.BLOCKING_HOST))
    assert abs(played - measured) <= 500  # ns: every mean is rounded


def test_a_unit_that_a_backward_gathers_in_advance_and_never_uses_costs_its_recorded_time():
    """Its entry without an all-gather is compute of the root, not hooks."""
    work = UnitWork(gather_ns=MS, reduce_ns=MS, gather_launch_ns=MS, reduce_launch_ns=MS)
    whole = {unit: _whole(unit, unit) for unit in range(1, 4)}

    def forward(number: int, *blocks: int, keeps_graph: bool = True) -> Pass:
        inside = tuple(entry for block in blocks for entry in whole[block])
        tape = ((Op.ENTER, 0), *inside, (Op.RUN, 0), (Op.LEAVE, 0))
        return Pass(Phase.FORWARD, tape, number, keeps_graph=keeps_graph)

    def backward(one: Pass) -> Pass:
        used = frozenset(unit for op, unit in one.tape if op is Op.ENTER)
        return Pass(Phase.BACKWARD, reversed_tape(one.tape), one.microbatch, reduces=used)

    first, second = forward(0, 1, 3), forward(1, 1, 2, 3)
    again = [forward(0, 1, keeps_graph=False), forward(0, 3, 1, keeps_graph=False)]
    workload = Workload(
        [work] * 4,
        [UnitPolicy(reshard_after_forward=False)] * 4,
        [Piece(unit, MS, MS) for unit in range(4)],
        (first, *again, backward(first), second, backward(second)),
    )
    played, measured = played_again(as_run(workload, Execution.BLOCKING_HOST))
    assert played == measured


def test_a_run_with_other_collectives_than_the_schedule_is_refused():
    run = as_run(simple(3), Execution.BLOCKING_HOST)
    events = run.events(0)
    is_first = (events.kind == EventKind.ALL_GATHER) & (events.unit == 1)
    is_first &= events.phase == Phase.BACKWARD
    without = replace(run, event_tables={0: events.where(~is_first)})
    with pytest.raises(MissingDataError, match=r"2 all-gathers of unit layers\.1 .* issued 1"):
        measure_work(without)


def test_shards_of_one_rank_gather_nothing_and_are_refused_by_name():
    run = as_run(simple(3), Execution.BLOCKING_HOST)
    [group, *_] = run.manifest.process_groups
    alone = group.model_copy(update={"ranks": [0]})
    events = run.event_tables[0]
    lone = replace(
        run,
        manifest=run.manifest.model_copy(update={"process_groups": [alone]}),
        event_tables={0: events.where(events.kind != EventKind.ALL_GATHER)},
    )
    assert (run.manifest.can_rank_plans, lone.manifest.can_rank_plans) == (True, False)
    with pytest.raises(MissingDataError, match="each shard has one rank, so FSDP gathers nothing"):
        measure_work(lone)


@given(workload=programs().filter(lambda drawn: drawn.passes[0].tape[0] == (Op.ENTER, 0)))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_any_program_of_a_root_plays_again_in_its_own_time(workload: Workload):
    # Code before a pass is part of its compute. Passes with one tape share its mean.
    workload = replace(workload, passes=tuple(replace(p, before_ns=0) for p in workload.passes))
    played, measured = played_again(as_run(workload, Execution.HOST))
    # Inside a root, its own short compute counts as hooks, so a gather may be issued later.
    assert abs(played - measured) <= 0.1 * measured


@given(workload=workloads())
@settings(max_examples=examples(30), deadline=None)
def test_the_stretches_and_what_is_taken_make_up_the_step(workload: Workload):
    run = as_run(workload, Execution.BLOCKING_HOST)
    member = timed_rank(run)
    assert member is not None
    events = run.events(0, steps=[member.closest_step])
    reading = read_step(events)
    assert reading is not None
    kinds = (
        EventKind.ALL_GATHER,
        EventKind.REDUCE_SCATTER,
        EventKind.ALL_GATHER_COPY_IN,
        EventKind.ALL_GATHER_COPY_OUT,
        EventKind.REDUCE_SCATTER_COPY_IN,
    )
    taken = sum(int((events.end_ns - events.start_ns)[events.kind == kind].sum()) for kind in kinds)
    assert sum(each.duration_ns for each in reading.stretches) + taken == reading.duration_ns


def test_a_predicted_table_says_so():
    run = as_run(simple(3), Execution.HOST)
    assert set(run.events(0).source.tolist()) == {Source.PREDICTED}


def simple(num: int, **unit: int) -> Workload:
    work = UnitWork(**{"gather_ns": 2 * MS, "reduce_ns": 3 * MS, **unit})
    pieces = [Piece(at, 10 * MS, 20 * MS) for at in range(num)]
    return Workload([work] * num, [UnitPolicy()] * num, pieces, passes_of(tape_of(pieces)))


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("forward_ms", [0, 30])
def test_the_compute_of_a_root_between_its_blocks_is_no_hook(num_blocks: int, forward_ms: int):
    """A plan without the blocks would otherwise skip it."""
    work = UnitWork(
        gather_ns=MS,
        reduce_ns=MS,
        copy_in_ns=MS,
        copy_out_ns=MS,
        gather_launch_ns=MS,
        reduce_launch_ns=MS,
    )
    blocks = range(1, num_blocks + 1)
    pieces = [Piece(0, forward_ms * MS, 40 * MS), *(Piece(at, 10 * MS, 20 * MS) for at in blocks)]
    inside = tuple(entry for at in blocks for entry in (*_whole(at, at), (Op.RUN, 0)))
    tape = ((Op.ENTER, 0), *inside, (Op.LEAVE, 0))
    workload = Workload([work] * len(pieces), [UnitPolicy()] * len(pieces), pieces, passes_of(tape))
    found = measure_work(as_run(workload, Execution.BLOCKING_HOST)).workload
    # After the end of a unit, a part of the compute as long as usual hooks may be hooks.
    backward = sum(piece.backward_ns for piece in found.pieces)
    assert backward == pytest.approx(num_blocks * 60 * MS, abs=num_blocks * MS)
    forward = sum(piece.forward_ns for piece in found.pieces)
    assert forward == pytest.approx(num_blocks * (10 + forward_ms) * MS, abs=num_blocks * MS)


def test_the_work_of_each_unit_is_found_again():
    work = measure_work(as_run(simple(3, copy_out_ns=MS), Execution.BLOCKING_HOST))
    assert [unit.gather_ns for unit in work.workload.units] == [2 * MS] * 3
    assert [unit.reduce_ns for unit in work.workload.units] == [3 * MS] * 3
    assert [unit.copy_out_ns for unit in work.workload.units] == [MS] * 3
    assert [(piece.forward_ns, piece.backward_ns) for piece in work.workload.pieces] == [
        (10 * MS, 20 * MS)
    ] * 3


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_the_samples_play_again_within_five_percent(folder: Path):
    work = measure_work(open_run(folder))
    assert work.simulate().duration_ns == pytest.approx(work.step_time_ns, rel=0.05)


def test_a_run_without_a_plan_is_refused():
    run = as_run(simple(2), Execution.HOST)
    bare = replace(run, manifest=run.manifest.model_copy(update={"plan": {}}))
    with pytest.raises(MissingDataError, match="no observed plan"):
        measure_work(bare)


def test_a_run_without_timed_steps_is_refused():
    run = as_run(simple(2), Execution.HOST)
    short = replace(run, manifest=run.manifest.model_copy(update={"warmup_steps": NUM_STEPS}))
    with pytest.raises(MissingDataError, match="no timed step"):
        measure_work(short)


@pytest.mark.parametrize("second", ["layers.1 [pg=2]", "layers.1 [pg=2] #2", "layers.1 #2"])
def test_a_module_with_units_on_several_meshes_is_refused_with_its_reason(second: str) -> None:
    run = as_run(simple(3), Execution.HOST)
    units = list(run.manifest.units)
    units[2] = units[2].model_copy(update={"fqn": second})
    shared = replace(run, manifest=run.manifest.model_copy(update={"units": units}))
    with pytest.raises(MissingDataError, match=r"1 of its 3 units share their module"):
        measure_work(shared)
