"""The step of another plan has the time of the same compute with other units, by arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.network import CostLine, Network, Pace, fit_network
from fsdp_inspect.simulation.parameters import default_reduce_dtype, describe_parameters
from fsdp_inspect.simulation.recorded import (
    Execution,
    RecordedWork,
    measure_work,
    observed_plan,
    simulate_step,
)
from fsdp_inspect.simulation.scenario import (
    HOOK_TRAIL,
    Mesh,
    Scenario,
    ScenarioMaker,
    make_scenario,
    mesh_of,
)
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.simulation.workload import (
    Op,
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    tape_of,
)
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.run import ParameterTraits, RunManifest, Unit
from tests.builders import RunBuilder

MS = 1_000_000
SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))
RANKS = 2
MESSAGE = 1_000_000
LATENCY_NS, PER_BYTE_NS = MS, 4.0  # per bus byte: half the message on two ranks
NETWORK = Network(
    {
        EventKind.ALL_GATHER: CostLine(LATENCY_NS, 1e9 / PER_BYTE_NS),
        EventKind.REDUCE_SCATTER: CostLine(LATENCY_NS, 1e9 / PER_BYTE_NS),
    }
)


# Hooks of 3 ms around a gather, and of 1 ms around a reduction.
FORWARD_TRAIL_NS = round(HOOK_TRAIL[0] * 3 * MS)
BACKWARD_TRAIL_NS = round(HOOK_TRAIL[1] * 4 * MS)


def transfer_ns(message: int) -> int:
    return round(LATENCY_NS + message / 2 * PER_BYTE_NS)


def block(index: int) -> Unit:
    """A block of two matrices; the second one has three times as many elements."""
    name = f"layers.{index}"
    return Unit(
        index=index,
        fqn=name,
        modules=[name],
        num_parameters=MESSAGE // 4,
        num_trainable_parameters=MESSAGE // 4,
        num_tensors=2,
        parameters={f"{name}.attention.weight": [250, 250], f"{name}.ffn.weight": [750, 250]},
        unsharded_bytes=MESSAGE,
        sharded_bytes=MESSAGE // RANKS,
        reduce_bytes=MESSAGE,
        param_dtype="float32",
        reduce_dtype="float32",
        reshard_after_forward=True,
        shard_group=0,
        execution_index=index,
    )


def recorded(num_blocks: int = 4) -> tuple[RecordedWork, RunManifest]:
    """Blocks of 10 ms forward and 20 ms backward, hooks of 1 ms and 1 ms for each tensor."""
    work = UnitWork(
        gather_ns=transfer_ns(MESSAGE),
        reduce_ns=transfer_ns(MESSAGE),
        copy_out_ns=MS,
        gather_launch_ns=3 * MS,
        reduce_launch_ns=MS,
    )
    pieces = [Piece(unit, 10 * MS, 20 * MS) for unit in range(num_blocks)]
    policies = [UnitPolicy(root=unit) for unit in range(num_blocks)]
    workload = Workload([work] * num_blocks, policies, pieces, passes_of(tape_of(pieces)))
    units = tuple(block(index) for index in range(num_blocks))
    plan = block_plan(num_blocks)
    builder = RunBuilder([unit.fqn for unit in units], plan=plan.to_dict(), mesh={"shard": RANKS})
    recording = RecordedWork(0, (1,), 0, Execution.BLOCKING_HOST, units, workload, NETWORK)
    manifest = builder.build().manifest.model_copy(update={"units": list(units)})
    return recording, manifest


def block_plan(num_blocks: int = 4) -> Plan:
    names = [f"layers.{i}" for i in range(num_blocks)]
    return Plan(units=tuple(UnitPlan(modules=(n,), reshard_after_forward=True) for n in names))


def forward_ns(scenario: Scenario) -> int:
    return sum(piece.forward_ns for piece in scenario.workload.pieces)


def scenario_of(plan: Plan, network: Network = NETWORK) -> Scenario:
    work, manifest = recorded()
    return make_scenario(work, manifest, plan, network)


def unchanged(unit: Unit) -> Unit:
    """The unit under the recorded plan, if all blocks are like it."""
    work, manifest = recorded(1)
    work = replace(work, units=(unit,))
    manifest = manifest.model_copy(update={"units": [unit]})
    return make_scenario(work, manifest, block_plan(1), NETWORK).units[0]


NAMES = ("layers.0.experts", "layers.0.adapter", "layers.0.base")
EXPERTS_BYTES, BASE_BYTES = 3 * 64 * 96 * 4, 64 * 64


def traits(dtype: str = "float32", **changes: object) -> ParameterTraits:
    return ParameterTraits.model_validate({"dtype": dtype, "gathered_dtype": dtype, **changes})


def mixed_unit(**changes: object) -> Unit:
    """Experts sharded on dimension 1, an adapter of 5 rows, and a frozen base of one byte each."""
    numels = (3 * 64 * 96, 5 * 64, 64 * 64)
    adapter = 6 * 64 * 4  # padded to two ranks
    fields: dict[str, object] = {
        "parameters": dict(zip(NAMES, ([3, 64, 96], [5, 64], [64, 64]), strict=True)),
        "num_parameters": sum(numels),
        "num_trainable_parameters": sum(numels[:2]),
        "num_tensors": 3,
        "unsharded_bytes": EXPERTS_BYTES + adapter + BASE_BYTES,
        "sharded_bytes": (EXPERTS_BYTES + adapter + BASE_BYTES) // RANKS,
        "reduce_bytes": EXPERTS_BYTES + adapter,
        "traits": dict(
            zip(
                NAMES,
                (traits(shard_dim=1), traits(), traits("int8", is_trained=False)),
                strict=True,
            )
        ),
    }
    return block(0).model_copy(update={**fields, **changes})


@pytest.mark.parametrize("known", [True, False], ids=["its_settings", "an_older_run"])
def test_the_recorded_plan_has_the_recorded_bytes(known: bool):
    unit = mixed_unit() if known else mixed_unit(traits={})
    same = unchanged(unit)
    assert [
        (each.unsharded_bytes, each.sharded_bytes, each.reduce_bytes, each.traits)
        for each in (same, unit)
    ].count((unit.unsharded_bytes, unit.sharded_bytes, unit.reduce_bytes, unit.traits)) == 2


def test_each_parameter_keeps_its_dtype_and_its_sharded_dimension_in_another_unit():
    unit = mixed_unit()
    work, manifest = recorded(1)
    plan = Plan(units=(UnitPlan(modules=("layers.0",)), UnitPlan(modules=("layers.0.base",))))
    unit = unit.model_copy(
        update={
            "parameters": {f"{name}.weight": shape for name, shape in unit.parameters.items()},
            "traits": {f"{name}.weight": each for name, each in unit.traits.items()},
        }
    )
    manifest = manifest.model_copy(update={"units": [unit]})
    scenario = make_scenario(replace(work, units=(unit,)), manifest, plan, NETWORK)
    rest, base = scenario.units
    assert (base.unsharded_bytes, base.reduce_bytes, base.param_dtype) == (BASE_BYTES, 0, "int8")
    assert rest.unsharded_bytes == rest.reduce_bytes == unit.reduce_bytes
    assert not scenario.workload.units[1].is_trainable


def blocking_ns(scenario: Scenario) -> int:
    return simulate_step(scenario.workload, Execution.BLOCKING_HOST).duration_ns


def test_the_recorded_plan_is_the_recorded_work():
    work, _ = recorded()
    assert scenario_of(block_plan()).workload == work.workload


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_a_samples_own_plan_plays_as_the_sample_does(folder: Path):
    run = open_run(folder)
    work = measure_work(run)
    plan = observed_plan(run)
    scenario = make_scenario(work, run.manifest, plan, work.network)
    assert (
        simulate_step(scenario.workload, work.execution).duration_ns == work.simulate().duration_ns
    )


def test_merged_blocks_share_one_latency_and_keep_their_compute():
    merged = block_plan().merge(["layers.0", "layers.1"]).merge(["layers.2", "layers.3"])
    scenario = scenario_of(merged)
    first = scenario.workload.units[0]
    assert first.gather_ns == transfer_ns(2 * MESSAGE)
    assert first.copy_out_ns == 2 * MS
    assert first.gather_launch_ns == pytest.approx(6 * MS, rel=0.51)  # one size: no constant known
    # torch runs the hooks of a forward for each module, those of a backward for each unit.
    pieces = scenario.workload.pieces
    assert sum(piece.forward_ns for piece in pieces) == 40 * MS
    assert sum(piece.backward_ns for piece in pieces) == 80 * MS - 2 * BACKWARD_TRAIL_NS
    assert [unit.fqn for unit in scenario.units] == ["layers.0, layers.1", "layers.2, layers.3"]


def test_a_split_block_divides_its_compute_by_its_parameters_and_says_so():
    parts = [["layers.0.attention"], ["layers.0.ffn"]]
    scenario = scenario_of(block_plan().split("layers.0", parts))
    attention, ffn = scenario.workload.pieces[:2]
    # Each part has its own hooks, and the block's hooks were part of its compute.
    before, after = 0.25 * FORWARD_TRAIL_NS, FORWARD_TRAIL_NS
    assert attention.forward_ns == 2.5 * MS - before + after
    assert ffn.forward_ns == 7.5 * MS - 3 * before + after
    assert scenario.workload.units[0].gather_ns == transfer_ns(MESSAGE // 4)
    assert any("split" in sentence for sentence in scenario.assumptions)


def test_one_unit_around_all_is_gathered_once():
    scenario = scenario_of(Plan(units=(UnitPlan(modules=("",)),)))
    assert [entry for entry in scenario.workload.passes[0].tape if entry[0] is Op.ENTER] == [
        (Op.ENTER, 0)
    ]
    assert scenario.workload.units[0].gather_ns == transfer_ns(4 * MESSAGE)
    assert not scenario.workload.policies[0].reshard_after_forward  # torch's rule for the root
    assert forward_ns(scenario) == 40 * MS - 3 * FORWARD_TRAIL_NS


def test_the_interval_of_compute_after_hooks_is_from_none_to_twice_the_estimate():
    work, manifest = recorded()
    maker = ScenarioMaker(work, manifest)
    root = Plan(units=(UnitPlan(modules=("",)),))
    ends = [forward_ns(maker.make(root, NETWORK, pace)) for pace in (Pace.SLOW, Pace.FAST)]
    assert ends == [40 * MS, 40 * MS - 6 * FORWARD_TRAIL_NS]
    parts = block_plan().split("layers.0", [["layers.0.attention"], ["layers.0.ffn"]])
    ends = [forward_ns(maker.make(parts, NETWORK, pace)) for pace in (Pace.FAST, Pace.SLOW)]
    assert ends == [40 * MS, 40 * MS + 2 * FORWARD_TRAIL_NS]


def test_a_device_computes_independently_of_the_hosts_hooks():
    work, manifest = recorded()
    work = replace(work, execution=Execution.STREAM)
    root = Plan(units=(UnitPlan(modules=("",)),))
    assert forward_ns(make_scenario(work, manifest, root, NETWORK)) == 40 * MS


def test_keeping_blocks_unsharded_saves_their_second_gather():
    names = [f"layers.{index}" for index in range(4)]
    kept = block_plan().change(names, reshard_after_forward=False)
    # Each gather also saves its hooks and the copy out of its output.
    saved = 4 * (transfer_ns(MESSAGE) + 3 * MS + MS)
    assert blocking_ns(scenario_of(block_plan())) - blocking_ns(scenario_of(kept)) == saved


def test_a_faster_network_shortens_every_collective():
    faster = NETWORK.change(bus_bytes_per_s=1e9)
    units = scenario_of(block_plan(), faster).workload.units
    assert [unit.gather_ns for unit in units] == [LATENCY_NS + MESSAGE // 2] * 4


def test_half_the_bytes_take_half_the_bandwidth_term():
    plan = block_plan().change([f"layers.{i}" for i in range(4)], param_dtype="bfloat16")
    scenario = scenario_of(plan)
    assert scenario.workload.units[0].gather_ns == transfer_ns(MESSAGE // 2)
    assert scenario.units[0].reduce_dtype == "bfloat16"  # torch 2.13 reduces in the compute dtype


@pytest.mark.parametrize(
    ("version", "release", "reduce_dtype"),
    [
        ("2.13.0+cpu", (2, 13), "bfloat16"),
        ("2.15.0", (2, 15), "float32"),
        ("3.0.0a1", (3, 0), "float32"),
        ("unknown", (0, 0), "bfloat16"),
    ],
)
def test_since_torch_2_15_a_reduction_has_the_dtype_of_the_parameters(
    version: str, release: tuple[int, int], reduce_dtype: str
) -> None:
    assert RunBuilder(versions={"torch": version}).build().manifest.torch_release == release
    work, manifest = recorded()
    plan = block_plan().change([f"layers.{i}" for i in range(4)], param_dtype="bfloat16")
    scenario = make_scenario(replace(work, torch_release=release), manifest, plan, NETWORK)
    assert scenario.units[0].reduce_dtype == reduce_dtype


@pytest.mark.parametrize(("is_flat", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_fsdp1_reduces_in_the_dtype_of_compute_in_all_versions(is_flat: bool, dtype: str) -> None:
    of_block = describe_parameters(block(0), RANKS).values()
    parameters = [replace(each, is_flat=is_flat) for each in of_block]
    assert default_reduce_dtype(parameters, "bfloat16", (2, 15)) == dtype


@pytest.mark.parametrize(
    ("setting", "is_known"), [("param_dtype", False), ("reduce_dtype", True), ("reshard", True)]
)
def test_the_memory_of_another_compute_dtype_is_unknown(setting: str, is_known: bool) -> None:
    (plain,) = (path for path in SAMPLES if path.name == "tiny-2-ranks")
    run = open_run(plain)
    changes = {setting: "bfloat16"} if setting != "reshard" else {"reshard_after_forward": False}
    plan = observed_plan(run)
    found = simulate_plan(run, plan.change([unit.name for unit in plan.units], **changes))
    assert (found.peak_bytes is not None) is is_known
    assert ("the activations in bfloat16" in (found.memory_refusal or "")) is not is_known
    assert ("Compute takes as long in bfloat16" in " ".join(found.assumptions)) is not is_known


@pytest.mark.parametrize("stored", [4.0, 2.0])
def test_without_a_setting_a_unit_is_gathered_in_the_dtype_of_its_parameters(stored: float) -> None:
    """Also if it ran in another one: a plan without `param_dtype` leaves torch's default."""
    (parameter, *_) = describe_parameters(block(0), RANKS).values()
    traits = parameter.traits.model_copy(update={"gathered_dtype": "bfloat16"})
    one = replace(parameter, traits=traits, stored=stored)
    assert one.gathered_dtype(None) == ("float32" if stored == 4 else "bfloat16")
    assert replace(one, gathered_scale=0.5).gathered_dtype(None) == "bfloat16"


def test_more_ranks_pad_the_first_dimension():
    plan = block_plan().model_copy(update={"world_size": 512, "mesh": {"shard": 512}})
    assert scenario_of(plan).units[0].unsharded_bytes == (512 * 250 + 1024 * 250) * 4


def test_a_run_without_replicas_would_all_reduce_where_it_reduces():
    (plain,) = (path for path in SAMPLES if path.name == "tiny-2-ranks")
    work = measure_work(open_run(plain))
    assert [each.all_reduces for each in work.workload.passes] == [True, True]


def test_replicas_need_a_run_that_all_reduces():
    plan = block_plan().model_copy(update={"world_size": 4, "mesh": {"replicate": 2, "shard": 2}})
    with pytest.raises(MissingDataError, match="all_reduce"):
        scenario_of(plan)


def test_parameters_outside_all_units_are_refused():
    with pytest.raises(PlanError, match="no unit for the parameter 'layers"):
        scenario_of(block_plan(3))


def test_a_mesh_that_is_not_the_world_is_refused():
    plan = block_plan().model_copy(update={"world_size": 6, "mesh": {"replicate": 2, "shard": 2}})
    with pytest.raises(PlanError, match="whose product divides the world size"):
        mesh_of(plan, recorded()[1])


def test_the_mesh_of_a_run_is_that_of_its_plan_unless_told():
    assert mesh_of(block_plan(), recorded()[1]) == Mesh(shard=RANKS)


def test_a_network_is_learnt_from_messages_of_different_sizes():
    builder = RunBuilder(["layers.0"])
    rank = builder.rank(0)
    rank.step(0, 0, 100 * MS)
    for number, size in enumerate((100_000, 1_000_000, 2_000_000)):
        start = number * 20 * MS
        rank.all_gather("layers.0", start, start + transfer_ns(size), bytes=size)
    run = builder.build()
    network = fit_network(run.events(0), run.manifest.process_groups)
    predicted = network.duration_ns(EventKind.ALL_GATHER, 500_000, RANKS)
    assert predicted == pytest.approx(transfer_ns(500_000), rel=0.01)


@pytest.mark.parametrize("change", [{"bus_bytes_per_s": 0.0}, {"latency_ns": -1.0}])
def test_an_impossible_network_is_refused(change: dict[str, float]):
    with pytest.raises(ValueError, match=r"Invalid (bandwidth|latency): "):
        NETWORK.change(**change)


def test_a_unit_used_as_it_was_keeps_what_was_measured():
    work, manifest = recorded()
    measured = replace(work.workload.units[0], gather_ns=123)
    workload = replace(work.workload, units=[measured, *work.workload.units[1:]])
    scenario = make_scenario(replace(work, workload=workload), manifest, block_plan(), NETWORK)
    assert scenario.workload.units[0].gather_ns == 123
