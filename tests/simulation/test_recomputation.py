"""Plans with other checkpointing: time and memory by arithmetic, and refusals."""

from dataclasses import replace

import pytest

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.recomputation import recompute
from fsdp_inspect.simulation.recorded import Execution, RecordedWork, simulate_step
from fsdp_inspect.simulation.scenario import make_scenario
from fsdp_inspect.simulation.workload import Op, Piece, passes_of
from fsdp_inspect.trace.plan import Checkpointing, Plan, UnitPlan
from fsdp_inspect.trace.run import RunManifest
from tests.simulation.test_scenario import MS, NETWORK, block_plan, recorded

KEPT, OUTPUT, FORWARD_RISE, BACKWARD_RISE = 1000, 100, 1200, 500
NUM_BLOCKS = 4


def run(
    *, forward_rise: int = FORWARD_RISE, output: int = OUTPUT
) -> tuple[RecordedWork, RunManifest]:
    """Blocks of 10 ms and 20 ms; a forward keeps 1000 bytes, with 100 bytes of output."""
    work, manifest = recorded(NUM_BLOCKS)
    piece = PieceMemory(KEPT, forward_rise, BACKWARD_RISE, gradients=10, output=output)
    unit = UnitMemory(unsharded=0, reduce_input=0, sharded_gradients=0, resting=7)
    memory = MemoryWork([piece] * NUM_BLOCKS, [unit] * NUM_BLOCKS, rest=0)
    return replace(work, workload=replace(work.workload, memory=memory)), manifest


def checkpointed(*names: str, plan: Plan | None = None) -> Plan:
    full = names or tuple(f"layers.{at}" for at in range(NUM_BLOCKS))
    return (plan or block_plan()).model_copy(update={"checkpointing": Checkpointing(full=full)})


def test_backward_repeats_the_forwards_of_checkpointed_units():
    work, manifest = run()
    scenario = make_scenario(work, manifest, checkpointed("layers.1"), NETWORK)
    assert [piece.recompute_ns for piece in scenario.workload.pieces] == [0, 10 * MS, 0, 0]
    longer = (
        simulate_step(scenario.workload, work.execution).duration_ns - work.simulate().duration_ns
    )
    assert longer == 10 * MS
    assert any("repeated forward" in sentence for sentence in scenario.assumptions)


def test_of_the_activations_the_output_stays_and_the_rest_comes_back_in_backward():
    pieces = recompute(run()[0], block_plan(), checkpointed()).work.workload.memory.pieces
    assert [piece.kept for piece in pieces] == [OUTPUT] * NUM_BLOCKS
    assert [piece.backward_rise for piece in pieces] == [KEPT - OUTPUT + BACKWARD_RISE] * NUM_BLOCKS


def test_a_forward_that_rises_higher_than_its_backward_does_so_when_it_is_repeated():
    work, _ = run(forward_rise=5000)
    pieces = recompute(work, block_plan(), checkpointed()).work.workload.memory.pieces
    assert pieces[0].backward_rise == 5000


def test_a_piece_of_a_block_that_keeps_nothing_keeps_no_output():
    """Such as the part of a backward outside that of the block, which a busy machine lengthens."""
    work, _ = run()
    outside = PieceMemory(0, 0, BACKWARD_RISE, output=OUTPUT)
    memory = work.workload.memory
    workload = replace(
        work.workload,
        pieces=[*work.workload.pieces, Piece(1, 0, MS)],
        memory=replace(memory, pieces=[*memory.pieces, outside]),
    )
    found = recompute(replace(work, workload=workload), block_plan(), checkpointed())
    assert found.work.workload.memory.pieces[-1] == outside


def test_the_peak_falls_by_what_all_blocks_but_the_running_one_forget():
    work, _ = run()
    before = work.simulate().peak_bytes
    peak = recompute(work, block_plan(), checkpointed()).work.simulate().peak_bytes
    assert before - peak == (NUM_BLOCKS - 1) * (KEPT - OUTPUT)


def test_without_checkpointing_nothing_is_repeated_and_memory_is_not_told():
    work, manifest = run()
    pieces = [replace(piece, backward_ns=20 * MS, recompute_ns=9 * MS)
              for piece in work.workload.pieces]  # fmt: skip
    work = replace(work, workload=replace(work.workload, pieces=pieces))
    manifest = manifest.model_copy(update={"plan": checkpointed().to_dict()})
    scenario = make_scenario(work, manifest, block_plan(), NETWORK)
    faster = (
        work.simulate().duration_ns - simulate_step(scenario.workload, work.execution).duration_ns
    )
    assert faster == NUM_BLOCKS * 9 * MS
    assert scenario.workload.memory is None
    assert "fsdp-inspect plan memory" in (scenario.memory_refusal or "")


def test_where_the_run_does_not_tell_what_was_repeated_it_is_the_forward():
    work, _ = run()
    found = recompute(work, checkpointed(), block_plan()).work.workload.pieces
    assert [(piece.recompute_ns, piece.backward_ns) for piece in found] == [
        (0, 10 * MS)
    ] * NUM_BLOCKS


def test_the_same_checkpointing_changes_nothing():
    work, _ = run()
    assert recompute(work, checkpointed(), checkpointed()).work is work


def test_compute_between_units_is_not_repeated():
    work, _ = run()
    between = Piece(1, 3 * MS, 4 * MS)
    pieces = [*work.workload.pieces, between]
    tape = list(work.workload.passes[0].tape)
    tape.insert(tape.index((Op.ENTER, 1)), (Op.RUN, len(pieces) - 1))
    workload = replace(work.workload, pieces=pieces, passes=passes_of(tuple(tape)), memory=None)
    found = recompute(replace(work, workload=workload), block_plan(), checkpointed())
    assert [piece.recompute_ns for piece in found.work.workload.pieces] == [10 * MS] * 4 + [0]


def test_merged_blocks_are_checkpointed_one_by_one():
    merged = block_plan().merge(["layers.0", "layers.1"])
    work, manifest = run()
    scenario = make_scenario(work, manifest, checkpointed(plan=merged), NETWORK)
    assert [piece.recompute_ns for piece in scenario.workload.pieces] == [10 * MS] * 4


@pytest.mark.parametrize("output", [0, KEPT + 1], ids=["not told", "more than is kept"])
def test_an_output_that_the_run_does_not_tell_leaves_memory_open(output: int):
    found = recompute(run(output=output)[0], block_plan(), checkpointed())
    assert found.work.workload.memory is None
    assert "checkpointing=full" in (found.memory_refusal or "")


def test_parts_of_a_unit_are_refused():
    work, manifest = run()
    with pytest.raises(MissingDataError, match=r"a part of the unit layers\.0"):
        make_scenario(work, manifest, checkpointed("layers.0.ffn"), NETWORK)


def test_a_block_of_several_units_is_refused():
    parts = [["layers.0.attention"], ["layers.0.ffn"]]
    work, manifest = run()
    wanted = checkpointed(plan=block_plan().split("layers.0", parts))
    with pytest.raises(MissingDataError, match="several units gather"):
        make_scenario(work, manifest, wanted, NETWORK)


def test_the_model_itself_is_refused_as_where_a_plan_is_applied():
    work, manifest = run()
    with pytest.raises(PlanError, match="Invalid checkpointing of the model itself"):
        make_scenario(work, manifest, checkpointed(""), NETWORK)


def test_a_model_that_ran_checkpointed_as_a_whole_is_more_than_a_unit():
    with pytest.raises(MissingDataError, match="several units gather"):
        recompute(run()[0], checkpointed(""), block_plan())


def test_selective_checkpointing_is_refused_with_the_command_that_tells_it():
    work, manifest = run()
    wanted = block_plan().model_copy(
        update={"checkpointing": Checkpointing(selective=("layers.0",))}
    )
    with pytest.raises(MissingDataError, match="plan memory --set checkpointing=selective"):
        make_scenario(work, manifest, wanted, NETWORK)


def test_every_block_is_named_whatever_the_units_are():
    shapes = {f"model.layers.{at}.mlp.experts.{e}.w": [1] for at in range(2) for e in range(2)}
    plan = Plan(units=(UnitPlan(modules=("",)),))
    changed = apply_changes(plan, Changes(checkpointing="full"), shapes)
    assert changed.checkpointing.full == ("model.layers.0", "model.layers.1")
    assert apply_changes(changed, Changes(checkpointing="none")).checkpointing == Checkpointing()


def test_a_numbered_parameter_is_no_block():
    shapes = {"scales.0": [1], "layers.0.scales.0": [1]}
    plan = Plan(units=(UnitPlan(modules=("",)),))
    changed = apply_changes(plan, Changes(checkpointing="full"), shapes)
    assert changed.checkpointing.full == ("layers.0",)


def test_a_model_without_numbered_blocks_is_refused():
    with pytest.raises(PlanError, match="no block to checkpoint"):
        apply_changes(Plan(units=(UnitPlan(modules=("",)),)), Changes(checkpointing="full"))


def test_on_streams_the_host_issues_the_repeated_forward_too():
    work, _ = run()
    launching = [
        replace(p, forward_launch_ns=2, backward_launch_ns=3) for p in work.workload.pieces
    ]
    work = replace(
        work,
        execution=Execution.STREAM,
        workload=replace(work.workload, pieces=launching, memory=None),
    )
    again = recompute(work, block_plan(), checkpointed()).work
    assert {piece.backward_launch_ns for piece in again.workload.pieces} == {5}
    back = recompute(again, checkpointed(), block_plan()).work
    assert {piece.backward_launch_ns for piece in back.workload.pieces} == {3}


def test_repetition_of_the_script_stays_in_every_plan_and_is_not_changed():
    """The run repeats its forwards, and its plan does not say so: the script calls torch."""
    work = recompute(run()[0], block_plan(), checkpointed()).work
    kept = recompute(work, block_plan(), block_plan())
    assert kept.work is work
    [sentence] = kept.assumptions
    assert sentence.startswith("The script itself repeats the forward of ")
    with pytest.raises(MissingDataError, match="the script itself repeats the forward of "):
        recompute(work, block_plan(), checkpointed())
