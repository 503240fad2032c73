"""An integer `reshard_after_forward`, by arithmetic on a run of eight ranks."""

from dataclasses import replace

import pytest

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.network import CostLine, Network, Node, NodeLink
from fsdp_inspect.simulation.recorded import Execution, RecordedWork, simulate_step
from fsdp_inspect.simulation.scenario import Scenario, make_scenario
from fsdp_inspect.simulation.simulate import predicted_events, simulate_work
from fsdp_inspect.simulation.workload import (
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    tape_of,
)
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.run import RunManifest, Unit
from tests.builders import RunBuilder

MS = 1_000_000
RANKS = 8
SIZE = 800_000
"""Bytes of a block: 200,000 parameters."""
WHOLE = CostLine(MS, 0.1e9)
INSIDE = CostLine(MS // 10, 1e9)
NETWORK = Network(
    {EventKind.ALL_GATHER: WHOLE, EventKind.REDUCE_SCATTER: WHOLE}, node=Node(4, INSIDE)
)
NUM_BLOCKS = 4


def gather_ns(line: CostLine, ranks: int) -> int:
    return round(line.latency_ns + SIZE * (ranks - 1) / ranks / line.bus_bytes_per_s * 1e9)


def block(index: int, **changes: object) -> Unit:
    name = f"layers.{index}"
    return Unit(
        **{
            "index": index,
            "fqn": name,
            "modules": [name],
            "num_parameters": SIZE // 4,
            "num_trainable_parameters": SIZE // 4,
            "num_tensors": 1,
            "parameters": {f"{name}.weight": [800, 250]},
            "unsharded_bytes": SIZE,
            "sharded_bytes": SIZE // RANKS,
            "reduce_bytes": SIZE,
            "param_dtype": "float32",
            "reduce_dtype": "float32",
            "reshard_after_forward": True,
            "shard_group": 0,
            **changes,
        }
    )


def plan(reshard: bool | int | None = True) -> Plan:
    blocks = (
        UnitPlan(modules=(f"layers.{at}",), reshard_after_forward=reshard)
        for at in range(NUM_BLOCKS)
    )
    return Plan(
        units=(UnitPlan(modules=("",)), *blocks),
        world_size=RANKS,
        mesh={"shard": RANKS},
    )


def recorded(network: Network = NETWORK) -> tuple[RecordedWork, RunManifest]:
    """Blocks of 10 ms forward and 20 ms backward; copy-in takes 1 ms, copy-out 8 ms."""
    own = UnitWork(
        gather_ns=gather_ns(WHOLE, RANKS),
        reduce_ns=gather_ns(WHOLE, RANKS),
        copy_in_ns=MS,
        copy_out_ns=8 * MS,
    )
    pieces = [Piece(at, 10 * MS, 20 * MS) for at in range(NUM_BLOCKS)]
    unit = UnitMemory(SIZE, SIZE, SIZE // RANKS, SIZE // RANKS)
    memory = MemoryWork([PieceMemory(gradients=SIZE)] * NUM_BLOCKS, [unit] * NUM_BLOCKS, rest=0)
    workload = Workload(
        [own] * NUM_BLOCKS,
        [UnitPolicy()] * NUM_BLOCKS,
        pieces,
        passes_of(tape_of(pieces)),
        memory=memory,
    )
    units = tuple(block(at) for at in range(NUM_BLOCKS))
    builder = RunBuilder([], world_size=RANKS, plan=plan().to_dict(), mesh={"shard": RANKS})
    manifest = builder.build().manifest.model_copy(update={"units": list(units)})
    return RecordedWork(0, (1,), 0, Execution.HOST, units, workload, network), manifest


def recorded_in_groups(network: Network = NETWORK) -> tuple[RecordedWork, RunManifest]:
    """The same with all-gathers over four ranks in backward, which took 123 ns each."""
    work, manifest = recorded(network)
    units = tuple(block(at, reshard_after_forward=4) for at in range(NUM_BLOCKS))
    measured = [replace(own, gather_backward_ns=123) for own in work.workload.units]
    work = replace(work, units=units, workload=replace(work.workload, units=measured))
    return work, manifest.model_copy(update={"units": list(units), "plan": plan(4).to_dict()})


def scenario_of(wanted: Plan, network: Network = NETWORK) -> Scenario:
    work, manifest = recorded(network)
    return make_scenario(work, manifest, wanted, network)


def test_backward_gathers_over_the_link_within_a_node():
    units = scenario_of(plan(4)).workload.units
    assert {unit.gather_ns for unit in units} == {gather_ns(WHOLE, RANKS)}
    assert {unit.gather_backward_ns for unit in units} == {gather_ns(INSIDE, 4)}


def test_copies_of_a_share_lie_between_those_of_a_shard_and_of_the_whole():
    unit = scenario_of(plan(4)).workload.units[0]
    # 1/4 of the parameters is 1/7 of the way from 1/8 to all of them: 1 ms + 7 ms / 7.
    assert (unit.copy_in_ns, unit.copy_in_backward_ns, unit.reshard_ns) == (MS, 2 * MS, 2 * MS)


@pytest.mark.parametrize(("number", "same"), [(1, False), (RANKS, True)])
def test_one_rank_keeps_all_and_all_ranks_keep_nothing_as_in_torch(number: int, same: bool):
    assert scenario_of(plan(number)).workload == scenario_of(plan(same)).workload


def test_groups_that_do_not_divide_the_ranks_are_refused_with_those_that_do():
    without_mesh = plan().model_copy(update={"mesh": {}})
    wanted = without_mesh.change(["layers.0"], reshard_after_forward=3)
    with pytest.raises(PlanError, match="a divisor of 8: 2, 4, 8"):
        scenario_of(wanted)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (Node(), "the ranks that share a node are unknown"),
        (Node(4), "its nodes have 4 ranks, and no all-gather ran within a node"),
        (Node(6), "cross the nodes of 6 ranks"),
    ],
)
def test_a_link_that_is_not_known_is_refused_with_the_option_that_tells_it(node: Node, why: str):
    with pytest.raises(MissingDataError, match=why) as caught:
        scenario_of(plan(4), replace(NETWORK, node=node))
    assert "--node-bandwidth" in str(caught.value)


def test_the_link_that_the_user_gives_counts():
    network = replace(NETWORK, node=Node()).change_node(NodeLink(2e9, 0.0))
    unit = scenario_of(plan(4), network).workload.units[0]
    assert unit.gather_backward_ns == gather_ns(CostLine(0.0, 2e9), 4)


def test_what_was_measured_in_a_smaller_group_stays_until_the_plan_leaves_it():
    work, manifest = recorded_in_groups()
    found = {
        wanted: make_scenario(work, manifest, plan(wanted), NETWORK).workload.units[0]
        for wanted in (4, 2, True)
    }
    assert found[4].gather_backward_ns == 123
    assert found[2].gather_backward_ns == gather_ns(INSIDE, 2)
    assert found[True].gather_backward_ns is None


def test_measured_groups_are_known_on_a_network_of_which_only_the_latency_is_another():
    work, manifest = recorded_in_groups(replace(NETWORK, smaller={4: INSIDE}, node=Node()))
    network = work.network.change(latency_ns=0)
    unit = make_scenario(work, manifest, plan(4), network).workload.units[0]
    assert unit.gather_backward_ns == gather_ns(CostLine(0, INSIDE.bus_bytes_per_s), 4)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(NETWORK.change(bus_bytes_per_s=2e9, latency_ns=0), id="another network"),
        pytest.param(NETWORK.change_node(NodeLink(2e9, 0.0)), id="another link in nodes"),
    ],
)
def test_copies_of_a_group_that_ran_are_in_its_compute_and_do_not_count_again(network: Network):
    work, manifest = recorded_in_groups()
    unit = make_scenario(work, manifest, plan(4), network).workload.units[0]
    assert unit.gather_backward_ns == gather_ns(CostLine(0.0, 2e9), 4)
    assert (unit.copy_in_ns, unit.copy_in_backward_ns, unit.reshard_ns) == (MS, None, 0)


def test_what_is_said_of_a_node_holds_beside_what_is_said_of_the_network():
    work, manifest = recorded()
    link = NodeLink(2e9, 0.0)
    beside, before = (
        simulate_work(
            replace(work, network=network), manifest, plan(4), latency_ns=0.0, node=node
        ).predicted.step_time_ns
        for network, node in ((NETWORK, link), (NETWORK.change_node(link), None))
    )
    alone = simulate_work(work, manifest, plan(4), latency_ns=0.0).predicted.step_time_ns
    assert beside == before < alone


def test_each_unit_keeps_its_share_until_backward_gathered_it():
    whole, quarter = (
        simulate_step(scenario_of(wanted).workload, Execution.HOST).peak_amounts
        for wanted in (plan(), plan(4))
    )
    assert sum(quarter) - sum(whole) <= NUM_BLOCKS * SIZE // 4
    first = scenario_of(plan(4)).workload
    assert first.memory is not None
    assert first.memory.units[0].share.kept == SIZE // 4


def test_smaller_groups_cost_their_shares_at_the_end_of_forward():
    def peak(wanted: Plan) -> int:
        workload = scenario_of(wanted).workload
        assert workload.memory is not None
        # The activations are so large that the peak is at the begin of the first backward.
        pieces = [PieceMemory(kept=100 * SIZE)] * NUM_BLOCKS
        return (
            simulate_step(
                replace(workload, memory=replace(workload.memory, pieces=pieces)), Execution.HOST
            ).peak_bytes
            or 0
        )

    # The last unit is then complete again, and its gather's output and its share still exist.
    assert peak(plan(4)) - peak(plan()) == NUM_BLOCKS * SIZE // 4
    assert peak(plan(2)) - peak(plan()) == NUM_BLOCKS * SIZE // 2


def test_predicted_gathers_of_smaller_groups_are_on_communicators_of_their_own():
    scenario = scenario_of(plan(4))
    step = simulate_step(scenario.workload, Execution.HOST)
    events = predicted_events([step], scenario.units, on_host=True)
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    in_backward = gathers.phase == Phase.BACKWARD
    assert set(gathers.group[~in_backward].tolist()) == {0}
    assert sorted(gathers.group[in_backward].tolist()) == [1, 2, 3, 4]
