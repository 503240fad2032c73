"""The simulated memory equals torch's: FSDP2's rules by arithmetic, and recorded peaks."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.simulation.machine import HostMachine
from fsdp_inspect.simulation.memory import Held, MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.simulation.schedule import Schedule
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.simulation.workload import (
    Microbatch,
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    tape_of,
)
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))
SIZE = 1000
RESTING = 300
NUM_BLOCKS = 6


def blocks(
    *, depth: int = 0, reshard: bool = True, is_async: bool = False, **piece: int
) -> Workload:
    """Equal blocks; gradients are only reduced if a piece has some."""
    last = NUM_BLOCKS
    policies = [
        UnitPolicy(
            reshard_after_forward=reshard,
            forward_prefetch=tuple(range(unit + 1, min(unit + 1 + depth, last))),
            is_async=is_async,
        )
        for unit in range(last)
    ]
    trains = piece.get("gradients", 0) > 0
    works = [UnitWork(gather_ns=1, reduce_ns=int(trains), is_trainable=trains)] * last
    pieces = [Piece(unit, 10, 20) for unit in range(last)]
    unit = UnitMemory(SIZE, SIZE if trains else 0, SIZE // 4 if trains else 0, RESTING)
    memory = MemoryWork([PieceMemory(**piece)] * last, [unit] * last, rest=7)
    return Workload(works, policies, pieces, passes_of(tape_of(pieces)), memory=memory)


def rise(workload: Workload, *, steps: int = 2) -> int:
    """The peak of the last step above the resting memory."""
    schedule = Schedule(workload, HostMachine(is_blocking=False))
    played = [schedule.simulate() for _ in range(steps)]
    assert workload.memory is not None
    assert played[-1].peak_bytes is not None
    return played[-1].peak_bytes - workload.memory.resting


def with_loss(plain: Workload, loss: PieceMemory) -> Workload:
    """The memory that the loss keeps is freed with the backward of the last block."""
    assert plain.memory is not None
    forward, backward = plain.passes
    *others, last = plain.memory.pieces
    pieces = [*others, replace(last, left=-loss.kept)]
    return replace(
        plain,
        passes=(forward, replace(backward, before_memory=loss)),
        memory=replace(plain.memory, pieces=pieces),
    )


def test_the_loss_rises_above_all_activations_and_what_it_leaves_goes_with_the_first_backward():
    plain = blocks(kept=10, backward_rise=10 * SIZE)
    assert plain.memory is not None
    loss = PieceMemory(kept=50, forward_rise=50_000)
    high = with_loss(plain, loss)
    assert rise(high) == NUM_BLOCKS * 10 + 50_000
    low = with_loss(plain, replace(loss, forward_rise=50))
    schedule = Schedule(low, HostMachine(is_blocking=False))
    played = [schedule.simulate() for _ in range(3)]
    assert played[1].peak_bytes == played[2].peak_bytes  # nothing remains
    assert rise(low) == rise(plain) + 50  # the first backward is the highest moment


def test_two_gather_outputs_and_one_unsharded_copy_are_alive_in_forward():
    assert rise(blocks()) == 3 * SIZE


@pytest.mark.parametrize(("depth", "sizes"), [(1, 3), (2, 4), (3, 5)])
def test_each_unit_prefetched_further_ahead_costs_one_more_output(depth: int, sizes: int):
    assert rise(blocks(depth=depth)) == sizes * SIZE


def test_an_asynchronous_gather_frees_its_output_early():
    assert rise(blocks(is_async=True)) == 2 * SIZE


def test_blocks_kept_unsharded_add_up():
    assert rise(blocks(reshard=False)) == (NUM_BLOCKS + 2) * SIZE


@pytest.mark.parametrize(
    ("options", "num_units"),
    [({}, 2), ({"depth": 1}, 3), ({"is_async": True}, 2), ({"reshard": False}, NUM_BLOCKS + 1)],
)
def test_since_torch_2_15_an_output_is_freed_before_the_next_copy_out(options, num_units):
    plain = blocks(**options)
    assert plain.memory is not None
    newer = replace(plain, memory=replace(plain.memory, frees_before_copy=True))
    assert rise(newer) == num_units * SIZE


def test_activations_of_all_blocks_are_alive_when_backward_begins():
    kept = 10 * SIZE
    assert rise(blocks(kept=kept, forward_rise=kept)) == NUM_BLOCKS * kept + 2 * SIZE


def test_steps_do_not_leak():
    workload = blocks(gradients=SIZE, backward_rise=SIZE)
    assert rise(workload, steps=1) == rise(workload, steps=5)


def test_gradients_that_are_not_reduced_stay_unsharded():
    reducing = blocks(gradients=SIZE, backward_rise=SIZE)
    tape = tape_of(reducing.pieces)
    every = replace(reducing, passes=passes_of(tape, [Microbatch(), Microbatch()]))
    last = replace(reducing, passes=passes_of(tape, [Microbatch(reduces=False), Microbatch()]))
    assert rise(last) - rise(every) > (NUM_BLOCKS - 2) * SIZE * 3 // 4


def test_where_memory_is_not_known_there_is_no_peak():
    played = Schedule(replace(blocks(), memory=None), HostMachine(is_blocking=False)).simulate()
    assert played.peak_bytes is None


def test_time_does_not_depend_on_memory():
    known = blocks(kept=50, forward_rise=70, gradients=400)
    steps = [
        Schedule(workload, HostMachine(is_blocking=False)).simulate()
        for workload in (known, replace(known, memory=None))
    ]
    assert steps[0].duration_ns == steps[1].duration_ns
    assert steps[0].spans == steps[1].spans


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_the_samples_own_peaks_play_again_within_a_percent(folder: Path):
    work = measure_work(open_run(folder))
    assert work.simulate().peak_bytes == pytest.approx(work.peak_bytes, rel=0.01)


def test_a_run_without_prefetch_predicts_the_peak_with_it():
    """The two samples differ in prefetch only; both ran for real."""
    plain, ahead = (
        open_run(Path(__file__).parents[2] / "samples" / name)
        for name in ("tiny-2-ranks", "async-prefetch-2-ranks")
    )
    predicted = simulate_plan(plain, Plan.from_dict(ahead.manifest.plan)).predicted.peak_bytes
    assert predicted == pytest.approx(measure_work(ahead).peak_bytes, rel=0.01)


def test_what_is_held_at_the_peak_adds_up_to_it():
    schedule = Schedule(
        blocks(kept=50, forward_rise=70, gradients=400), HostMachine(is_blocking=False)
    )
    step = [schedule.simulate() for _ in range(2)][-1]
    held = dict(zip(Held, step.peak_amounts, strict=True))
    assert sum(held.values()) == step.peak_bytes
    assert (held[Held.RESTING], held[Held.REST]) == (NUM_BLOCKS * RESTING, 7)
    assert held[Held.UNSHARDED_PARAMETER] >= SIZE
    assert min(held.values()) >= 0


def test_a_simulated_peak_says_what_fills_it():
    run = open_run(SAMPLES[0])
    simulation = simulate_plan(run, Plan.from_dict(run.manifest.plan))
    for played in (simulation.replayed, simulation.predicted):
        assert sum(played.peak_categories.values()) == played.peak_bytes
        assert played.peak_categories["activation"] > 0


def wide_reductions(*, last_gradient: int = 0) -> Workload:
    """Blocks whose reductions are ten times as wide as their parameters."""
    plain = blocks(gradients=SIZE)
    assert plain.memory is not None
    units = [
        replace(unit, reduce_input=10 * SIZE, last_gradient=last_gradient)
        for unit in plain.memory.units
    ]
    return replace(plain, memory=replace(plain.memory, units=units, copies_reduce_input=True))


def test_a_backend_that_copies_what_it_reduces_needs_room_for_the_copy():
    # The input and its copy, the prefetched gather, and five units' sharded gradients.
    assert rise(wide_reductions()) == (10 + 10 + 1) * SIZE + 5 * SIZE // 4


def test_the_last_parameters_gradient_is_there_until_the_reduction_is_issued():
    assert rise(wide_reductions(last_gradient=100)) - rise(wide_reductions()) == 100
