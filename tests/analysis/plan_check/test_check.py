"""Compare the declared and the observed plan: each rule of FSDP2 satisfied and violated."""

import math
from pathlib import Path

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, EventFlag, EventKind, Phase
from fsdp_inspect.trace.correctness import RoundSeen, TrainingSeen
from fsdp_inspect.trace.run import ModelInfo
from tests.builders import MESSAGE_BYTES, RunBuilder
from tests.llama70b import NUM_BLOCKS, llama_70b_run

SAMPLES = Path(__file__).parents[3] / "samples"
BLOCKS = ("layers.0", "layers.1")
MESSAGE = {"bytes": MESSAGE_BYTES}


def train(
    rank,
    step,
    *,
    units=BLOCKS,
    without=(),
    idle=(),
    microbatches=1,
    reduces=lambda mb: True,
    **more,
):
    """One step as FSDP2 runs it.

    `without` names gathers that did not happen: (unit, phase). `idle` units get no gradient, or
    not in one microbatch: (unit, microbatch).
    """
    rank.step(step, 1000 * step, 1000 * step + 1000)
    now = 1000 * step
    for microbatch in range(microbatches):
        place = {"microbatch": microbatch}
        for phase, add in ((Phase.FORWARD, rank.forward), (Phase.BACKWARD, rank.backward)):
            for unit in units if phase == Phase.FORWARD else units[::-1]:
                if (unit, phase) not in without and (unit, phase, microbatch) not in without:
                    rank.all_gather(unit, now, now + 5, need=now, phase=phase, **MESSAGE, **place)
                add(unit, now + 5, now + 10, **place)
                is_idle = unit in idle or (unit, microbatch) in idle
                if phase == Phase.BACKWARD and reduces(microbatch) and not is_idle:
                    rank.reduce_scatter(unit, now + 10, now + 15, **{**MESSAGE, **place, **more})
                now += 20


def trained(*, num_steps=2, reshard=True, plan=None, manifest=(), spare=(), **step):
    builder = RunBuilder(units=(*BLOCKS, *spare), plan=plan or {}, **dict(manifest))
    for unit in BLOCKS:
        builder.unit(unit, reshard_after_forward=reshard)
    for number in range(num_steps):
        train(builder.rank(0), number, **step)
    return builder


def contradictions(check):
    return [
        (finding.rule, finding.fqns, finding.sentence)
        for finding in check.findings
        if finding.is_contradiction
    ]


@pytest.mark.parametrize(
    ("gradients", "num_forwards", "num_batches", "adds_up"),
    [
        pytest.param("kept", 4, 0, True, id="microbatches"),
        pytest.param("kept", 4, 4, True, id="microbatches of a loader"),
        pytest.param("kept", 4, 1, False, id="parts of one batch"),
        pytest.param("kept", 1, 0, False, id="several losses of one batch"),
        pytest.param("changed", 4, 0, False, id="models of their own"),
    ],
)
def test_the_backwards_of_a_model_without_units_are_counted(
    gradients, num_forwards, num_batches, adds_up
):
    """DDP records forward and backward of the whole model."""
    builder = RunBuilder(world_size=2, observed={"gradients_between_backwards": gradients})
    rank = builder.rank(0)
    amounts = dict.fromkeys(("step", "num_passes", "num_cleared", "num_moved", "num_rates"), 0)
    given = {"num_backwards": 4, "num_batches": num_batches, "num_loaders": 1}
    seen = RoundSeen(**amounts, **given, is_kept=False)
    rank.record = {"training": TrainingSeen(rounds=[seen] * 3)}
    for step in range(3):
        rank.step(step, 100 * step, 100 * step + 100)
        for number in range(4):
            at = {"microbatch": number, "phase": Phase.BACKWARD}
            rank.add(EventKind.BACKWARD, 100 * step + 20 * number, 100 * step + 20, **at)
            if number < num_forwards:
                at["phase"] = Phase.FORWARD
                rank.add(EventKind.FORWARD, 100 * step + 20 * number, 100 * step + 5, **at)
    loop = check_plan(builder.build()).loop
    assert (loop.microbatches, loop.adds_up) == (4, adds_up)


def test_a_run_that_does_what_its_plan_says_is_consistent():
    check = check_plan(trained().build())
    assert check.is_consistent is True
    assert check.sentence == (
        "The run follows its plan: 12 collectives in 2 checked steps of 2 units, as expected."
    )
    gathers = check.units[0].all_gather
    assert (gathers.expected_per_step, gathers.observed_per_step) == (2, 2)
    assert gathers.rule == "one per forward and one per backward: the unit reshards after forward"


def test_a_unit_without_modules_is_checked_under_its_name():
    builder = trained()
    builder.unit("layers.0", modules=[])
    assert check_plan(builder.build()).is_consistent is True


def test_a_last_block_that_stays_unsharded_is_found_from_the_counts_alone():
    check = check_plan(trained(without=[("layers.1", Phase.BACKWARD)]).build())
    assert contradictions(check) == [
        (
            "R5",
            ("layers.1",),
            "stays unsharded after forward, but the plan declares that it reshards",
        )
    ]
    assert check.sentence == (
        "The run does not follow its plan. 6 all-gathers ran in 2 steps of 2 units; 8 are "
        "expected. layers.1: stays unsharded after forward, but the plan declares that it reshards."
    )


def test_the_published_counts_of_llama_70b_mean_that_the_last_block_stayed_unsharded():
    """RULES G: 318 all-gathers of 80 blocks in two steps; the root is gathered once a step."""
    check = check_plan(llama_70b_run())
    blocks = [unit for unit in check.units if unit.fqn]
    assert len(blocks) == NUM_BLOCKS
    assert sum(unit.all_gather.observed_count for unit in blocks) == 318
    assert sum(unit.all_gather.expected_count for unit in blocks) == 320
    assert sum(unit.reduce_scatter.observed_count for unit in check.units) == 162
    assert check.sentence == (
        "The run does not follow its plan. 320 all-gathers ran in 2 steps of 81 units; 322 are "
        "expected. layers.79: stays unsharded after forward, but the plan declares that it "
        "reshards."
    )


def test_kept_parameters_are_gathered_once():
    freed = [(unit, Phase.BACKWARD) for unit in BLOCKS]
    assert check_plan(trained(reshard=False, without=freed).build()).is_consistent is True


def test_a_unit_declared_to_stay_unsharded_must_not_be_gathered_again():
    [(rule, fqns, sentence)] = contradictions(check_plan(trained(reshard=False).build()))
    assert (rule, fqns) == ("R8", BLOCKS)
    assert sentence.startswith("is gathered again in backward")


def test_an_integer_reshard_gathers_in_backward_as_well():
    assert check_plan(trained(reshard=2).build()).is_consistent is True


def test_without_a_declaration_resharding_is_told_from_the_gathers():
    check = check_plan(trained(reshard=None).build())
    assert check.is_consistent is True
    assert check.units[0].is_reshard_inferred


@pytest.mark.parametrize(
    ("reduces", "sync"),
    [
        pytest.param(lambda mb: True, "every", id="each microbatch"),
        pytest.param(lambda mb: mb == 2, "last", id="the last one"),
        pytest.param(lambda mb: mb == 0, "some", id="another one"),
        pytest.param(lambda mb: False, "never", id="none"),
    ],
)
def test_accumulation_is_read_from_the_reductions(reduces, sync):
    check = check_plan(trained(microbatches=3, reduces=reduces).build())
    assert check.is_consistent is True
    assert (check.loop.microbatches, check.loop.sync) == (3, sync)


def test_a_declared_accumulation_is_held_against_what_ran():
    plan = {
        "units": [{"modules": [unit]} for unit in BLOCKS],
        "accumulation": {"microbatches": 3, "sync": "last"},
    }
    assert "The plan accumulates over 3" in check_plan(trained(plan=plan).build()).sentence
    every = check_plan(trained(plan=plan, microbatches=3).build())
    assert "gradients synchronise 'last', but the steps synchronise 'every'." in every.sentence


def test_units_kept_between_microbatches_are_no_contradiction_and_are_named():
    kept = [(unit, Phase.FORWARD, 1) for unit in BLOCKS]
    kept += [(unit, Phase.BACKWARD, 1) for unit in BLOCKS]
    kept += [(unit, Phase.BACKWARD, 0) for unit in BLOCKS]
    run = trained(reshard=False, microbatches=2, without=kept)
    check = check_plan(run.build())
    assert check.is_consistent is True
    assert check.loop.kept_between_microbatches == BLOCKS


def evaluated_before_a_step(*, reshards: bool) -> RunBuilder:
    """Units that stay unsharded; `reshards`: the script reshards them after an evaluation."""
    builder = trained(reshard=False, without=[(unit, Phase.BACKWARD) for unit in BLOCKS])
    rank = builder.rank(0)
    rank.step(2, 2000, 3000)
    for unit in BLOCKS:
        evaluation = {"phase": Phase.EVALUATION}
        rank.all_gather(unit, 2000, 2005, bytes=MESSAGE_BYTES, **evaluation)
        rank.add(EventKind.FORWARD, 2005, 2010, unit=unit, **evaluation)
        if reshards:  # no event shows it
            rank.all_gather(unit, 2015, 2020, bytes=MESSAGE_BYTES)
        rank.forward(unit, 2020, 2030)
        rank.backward(unit, 2040, 2050)
        rank.reduce_scatter(unit, 2050, 2055, bytes=MESSAGE_BYTES)
    return builder


def test_a_unit_that_evaluation_left_unsharded_is_not_gathered_again():
    check = check_plan(evaluated_before_a_step(reshards=False).build())
    assert check.is_consistent is True
    assert check.units[0].all_gather.expected_count == 2


def test_a_unit_may_be_resharded_between_evaluation_and_training():
    found = check_plan(evaluated_before_a_step(reshards=True).build())
    assert [each.is_consistent for each in found.units] == [True] * len(BLOCKS)


def test_a_unit_used_twice_is_gathered_for_each_use_and_reduced_once():
    builder = RunBuilder(units=("layers.0",))
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    for now, add, phase in (
        (0, rank.forward, Phase.FORWARD),
        (100, rank.forward, Phase.FORWARD),
        (200, rank.backward, Phase.BACKWARD),
        (300, rank.backward, Phase.BACKWARD),
    ):
        rank.all_gather("layers.0", now, now + 5, phase=phase, bytes=MESSAGE_BYTES)
        add("layers.0", now + 5, now + 50)
    rank.reduce_scatter("layers.0", 350, 360, bytes=MESSAGE_BYTES)
    assert check_plan(builder.build()).is_consistent is True


def test_a_frozen_unit_is_gathered_and_never_reduced():
    builder = trained(reduces=lambda mb: False)
    for unit in BLOCKS:
        builder.unit(unit, num_trainable_parameters=0, reduce_bytes=0)
    check = check_plan(builder.build())
    assert check.is_consistent is True
    assert check.units[0].reduce_scatter.rule == "none: the unit is frozen and has no gradients"


def remarks(check):
    assert check.is_consistent is True
    return [(each.fqns, each.sentence) for each in check.findings if not each.is_contradiction]


@pytest.mark.parametrize(
    ("frozen", "trained_steps", "remark"),
    [
        (True, range(4), "has gradients, although it was frozen at the start"),
        (True, (2, 3), "gets gradients from step 2 on, as after unfreezing"),
        (False, (1, 2, 3), "gets gradients from step 1 on, as after unfreezing"),
        (False, (0, 1), "gets no gradients from step 2 on, as after freezing"),
    ],
)
def test_a_unit_that_the_script_freezes_or_unfreezes_follows_its_plan(
    frozen, trained_steps, remark
):
    builder = RunBuilder(units=BLOCKS)
    if frozen:
        builder.unit("layers.0", num_trainable_parameters=0, reduce_bytes=0)
    for step in range(4):
        train(builder.rank(0), step, idle=() if step in trained_steps else ("layers.0",))
    assert (("layers.0",), remark) in remarks(check_plan(builder.build()))


def test_a_unit_that_is_frozen_in_turns_follows_its_plan():
    builder = RunBuilder(units=BLOCKS)
    builder.unit("layers.0", num_trainable_parameters=0, reduce_bytes=0)
    for step in range(4):
        train(builder.rank(0), step, idle=("layers.0",) if step % 2 else ())
    check = check_plan(builder.build())
    remark = "gets gradients in 2 of 4 steps, as if frozen in turns"
    assert (("layers.0",), remark) in remarks(check)
    assert not contradictions(check)


def test_a_unit_that_is_frozen_in_a_part_of_each_step_follows_its_plan():
    """As a critic while the loss of an actor passes through it."""
    check = check_plan(trained(microbatches=2, idle=(("layers.0", 1),)).build())
    remark = "gets gradients in 1 of 2 backwards of each step, as if it is frozen in the others"
    assert (("layers.0",), remark) in remarks(check)
    assert not contradictions(check)


def test_parameters_without_a_gradient_follow_the_plan_and_their_cost_is_stated():
    [(fqns, sentence)] = remarks(check_plan(trained(bytes=50).build()))
    assert fqns == BLOCKS
    assert sentence == (
        "has parameters without a gradient: a reduce-scatter carries 50 B of 64 B, but its "
        "all-gathers carry all parameters"
    )


def test_a_unit_without_gradients_among_others_is_named():
    builder = RunBuilder(units=BLOCKS)
    rank = builder.rank(0)
    for step in (0, 2):
        train(rank, step, units=("layers.0",))
        train(rank, step + 1, units=("layers.1",), reduces=lambda mb: False)
        end = 1000 * (step + 2)
        rank.reduce_scatter("layers.0", end - 10, end - 5, bytes=MESSAGE_BYTES)
    [first, second] = contradictions(check_plan(builder.build()))
    assert "at other times than its backwards require" in first[2]
    assert second[1:] == (
        ("layers.1",),
        "never reduces its gradients (reduce-scatter), but other units do: its parameters get no "
        "gradient, or its gradient synchronisation is off",
    )


@pytest.mark.parametrize(
    ("sent", "meaning"),
    [
        pytest.param(128, "as with float32 instead of a 16-bit dtype", id="twice"),
        pytest.param(32, "as with a 16-bit dtype instead of float32", id="half"),
        pytest.param(80, "its parameters or its padding differ", id="more"),
    ],
)
def test_messages_of_another_size_than_declared_are_explained(sent, meaning):
    dtype = {"dtype": DTYPES.index("bfloat16")} if sent < MESSAGE_BYTES else {}
    [(_, fqns, sentence)] = contradictions(check_plan(trained(bytes=sent, **dtype).build()))
    assert fqns == BLOCKS
    assert meaning in sentence


def test_a_gather_for_nobody_is_wasted():
    builder = trained()
    unused = {"bytes": MESSAGE_BYTES, "flags": int(EventFlag.UNUSED)}
    for step in range(2):
        at = 1000 * step + 900
        builder.rank(0).all_gather("layers.0", at, at + 5, step=step, **unused)
    [(rule, _, sentence)] = contradictions(check_plan(builder.build()))
    assert (rule, "has unused all-gathers" in sentence) == ("R28", True)


def test_one_rank_alone_communicates_nothing_and_is_consistent():
    builder = RunBuilder(units=BLOCKS, world_size=1)
    everything = [(unit, phase) for unit in BLOCKS for phase in Phase]
    train(builder.rank(0), 0, without=everything, reduces=lambda mb: False)
    check = check_plan(builder.build())
    assert check.is_consistent is True
    assert check.units[0].all_gather.rule == "none: one rank holds the whole unit"


@pytest.mark.parametrize(("torch_version", "is_consistent"), [("2.9.1", True), ("2.13.0", False)])
def test_torch_before_2_11_reduces_to_one_rank(torch_version, is_consistent):
    builder = RunBuilder(units=BLOCKS, world_size=1, versions={"torch": torch_version})
    everything = [(unit, phase) for unit in BLOCKS for phase in Phase]
    for step in range(2):
        train(builder.rank(0), step, without=everything)
    assert check_plan(builder.build()).is_consistent is is_consistent


def test_a_declared_prefetch_that_never_happens_is_a_contradiction():
    plan = {
        "units": [{"modules": [unit]} for unit in BLOCKS],
        "forward_prefetch": {"layers.0": ["layers.1"]},
    }
    [(rule, fqns, _)] = contradictions(check_plan(trained(plan=plan).build()))
    assert (rule, fqns) == ("R9", ("layers.1",))


@pytest.mark.parametrize(("issuer", "is_late"), [("experts", False), ("layers.1", True)])
def test_a_module_with_units_on_several_meshes_prefetches_with_each(issuer, is_late):
    plan = {
        "units": [{"modules": ["layers.0"]}, {"modules": ["layers.1"]}],
        "forward_prefetch": {"layers.0": ["layers.1"]},
    }
    units = ("layers.0", "experts", "layers.1")
    builder = RunBuilder(units=units, plan=plan)
    for unit, mesh in (("layers.0", 4), ("experts", 2)):
        named = {"fqn": f"layers.0 [pg={mesh}]", "modules": ["layers.0"]}
        builder.units[unit] = builder.units[unit].model_copy(update=named)
    rank = builder.rank(0)
    for step in range(2):
        at = 1000 * step
        train(rank, step, units=units, without=[("layers.1", Phase.FORWARD)])
        rank.all_gather(
            "layers.1", at + 22, at + 25, phase=Phase.FORWARD, issued_by=units.index(issuer)
        )
    late = [found for found in check_plan(builder.build()).findings if found.rule == "R9"]
    assert [found.fqns for found in late] == [("layers.1",)] * is_late


@pytest.mark.parametrize(
    ("spare", "sentence"),
    [
        (("spare",), "never runs, so its shards only use memory"),
        (("spare", "more"), "never run, so their shards only use memory"),
    ],
)
def test_a_unit_that_never_runs_costs_memory_and_contradicts_nothing(spare, sentence):
    model = {"model": ModelInfo(num_parameters=200 + 100 * len(spare))}
    builder = trained(manifest=model, spare=spare)
    assert check_plan(builder.build()).findings == ()  # rank 1 may run it
    train(builder.rank(1), 0)
    check = check_plan(builder.build())
    assert check.is_consistent is True
    assert [(f.fqns, f.sentence) for f in check.findings] == [(spare, sentence)]


@pytest.mark.parametrize(
    ("rank", "step"), [(1, 0), (0, 30)], ids=["on another rank", "in a later step"]
)
def test_a_unit_that_runs_elsewhere_does_run(rank, step):
    model = {"model": ModelInfo(num_parameters=300)}
    builder = trained(num_steps=60, manifest=model, spare=("expert",))
    builder.rank(1).step(0, 0, 1000)
    builder.rank(rank).forward("expert", 1000 * step + 300, 1000 * step + 310, step=step)
    assert check_plan(builder.build()).findings == ()


def test_a_unit_of_an_import_comes_from_an_event_so_it_runs():
    """Rank 1 is another pipeline stage. A unit of DDP has no passes at all."""
    imported = {"source": "imported", "model": ModelInfo(num_parameters=400)}
    builder = trained(manifest=imported, spare=("layers.2", "all_reduce 1.25 MiB"))
    train(builder.rank(1), 0, units=("layers.2",))
    check = check_plan(builder.build())
    assert check.findings == ()
    assert "12 collectives in 2 checked steps of 2 units" in check.sentence


@pytest.mark.parametrize(("updates", "adds_up"), [((500,), True), ((85, 500), False), ((), False)])
def test_backwards_of_an_import_are_microbatches_of_one_update(updates, adds_up):
    """A trace without marks of steps is one step with all updates of the trace."""
    builder = trained(num_steps=1, manifest={"source": "imported"}, microbatches=2)
    for start in updates:
        builder.rank(0).add(EventKind.OPTIMIZER, start, start + 5, phase=Phase.OPTIMIZER)
    loop = check_plan(builder.build()).loop
    assert (loop.microbatches, loop.adds_up) == (2, adds_up)


def test_a_long_run_is_checked_in_its_first_steps():
    check = check_plan(trained(num_steps=60).build())
    assert (len(check.steps), check.is_consistent) == (20, True)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        pytest.param(RunBuilder().build(), "no rank wrote data", id="nothing recorded"),
        pytest.param(RunBuilder(units=()).build(), "the run has no FSDP units", id="no units"),
        pytest.param(
            trained(manifest={"warmup_steps": 9}).build(), "no timed step", id="only warm-up"
        ),
    ],
)
def test_what_cannot_be_told_is_said(run, reason):
    check = check_plan(run)
    assert check.is_consistent is None
    assert reason in check.sentence


def test_a_rank_that_dropped_events_is_not_counted():
    builder = trained()
    builder.rank(0).record["dropped"] = {"events": 3}
    assert "dropped events" in check_plan(builder.build()).sentence


def test_a_step_that_the_rank_did_not_finish_is_not_counted():
    """The rank was killed after a gather, while another rank finished the step."""
    builder = trained()
    builder.rank(1).step(2, 2000, 3000)
    rank = builder.rank(0)
    rank.all_gather("layers.0", 2000, 2005, step=2, bytes=MESSAGE_BYTES)
    check = check_plan(builder.build())
    assert (check.steps, check.is_consistent) == ((0, 1), True)


@pytest.mark.parametrize("group", [-1, 5], ids=["no group", "a group of unknown size"])
def test_an_import_with_unnamed_process_groups_is_not_judged(group):
    """Traces of gloo name no groups, so with several groups the number of shards is unknown."""
    builder = trained(manifest={"source": "imported"}, group=group, microbatches=2)
    check = check_plan(builder.build())
    assert check.is_consistent is None
    assert "does not name the process groups" in check.sentence
    assert check.loop.microbatches == 2


def test_an_imported_run_without_passes_is_not_judged():
    builder = RunBuilder(units=BLOCKS, source="imported")
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).all_gather("layers.0", 0, 10)
    assert (
        "does not record forward and backward of its units" in check_plan(builder.build()).sentence
    )


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SAMPLES.glob("*/run.json")))
def test_every_sample_did_what_its_plan_says(name):
    check = check_plan(open_run(SAMPLES / name))
    assert check.is_consistent is True, check.sentence


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SAMPLES.glob("*/run.json")))
def test_gathered_bytes_are_the_padded_parameters_in_their_dtype(name):
    """RULES E: all-gather bytes are the sum of the padded numel times the dtype's size."""
    manifest = open_run(SAMPLES / name).manifest
    check = check_plan(open_run(SAMPLES / name))
    for unit, described in zip(check.units, manifest.units, strict=True):
        shards = len(manifest.process_groups[described.shard_group].ranks)
        padded = sum(
            shards * math.ceil(rows / shards) * math.prod(rest)
            for rows, *rest in described.parameters.values()
        )
        assert unit.all_gather.observed_bytes == (padded * ITEMSIZE[described.param_dtype],)


# --- what frameworks do


def test_a_prefetch_that_an_evaluation_misleads_is_expected_and_named():
    """torch prefetches the evaluation's last unit in the first backward after it."""
    builder = trained(num_steps=20, reshard=True)
    rank = builder.rank(0)
    rank.add(EventKind.FORWARD, 19_001, 19_002, unit="layers.1", phase=Phase.EVALUATION)
    rank.all_gather(
        "layers.1", 19_062, 19_063, phase=Phase.BACKWARD, issued_by=0, flags=EventFlag.PREFETCHED
    )

    check = check_plan(builder.build())

    assert check.is_consistent is True
    (finding,) = check.findings
    assert finding.fqns == ("layers.1",)
    assert "is prefetched in backward without a use (0.05 all-gathers and" in finding.sentence
    assert finding.sentence.endswith("all forwards, also of those without a backward")


def test_an_unused_prefetch_without_an_evaluation_contradicts_the_plan():
    builder = trained(reshard=True)
    prefetched = {"phase": Phase.BACKWARD, "issued_by": 0, "flags": EventFlag.PREFETCHED}
    for step in range(2):
        at = 1000 * step + 62
        builder.rank(0).all_gather("layers.1", at, at + 1, step=step, **prefetched)

    assert check_plan(builder.build()).is_consistent is False


def test_a_unit_that_the_script_gathers_itself_is_not_checked():
    """A chunked loss calls `unshard()` and `reshard()` on the head; only the first call is seen."""
    builder = trained(reshard=True)
    builder.rank(0).all_gather("layers.1", 1036, 1037, issued_by=-1, flags=EventFlag.PREFETCHED)

    check = check_plan(builder.build())

    assert check.is_consistent is True
    assert check.units[1].all_gather.rule == (
        "one per forward and one per backward: the unit reshards after forward. The script calls "
        "unshard() on it: such all-gathers are not checked"
    )


def test_an_imported_trace_does_not_show_who_gathers():
    builder = trained(reshard=True, manifest={"source": "imported"})
    unknown = {"issued_by": -1, "flags": EventFlag.PREFETCHED}
    for step in range(2):
        at = 1000 * step + 36
        builder.rank(0).all_gather("layers.1", at, at + 1, step=step, **unknown)

    assert check_plan(builder.build()).is_consistent is False


def test_a_deviation_in_one_step_only_is_a_note():
    """A forward that is tried again gathers once more; a plan would act in every step."""
    builder = trained(num_steps=3)
    builder.rank(0).all_gather("layers.0", 2900, 2905, bytes=MESSAGE_BYTES)
    check = check_plan(builder.build())
    assert check.is_consistent is True
    assert check.sentence == (
        "The run follows its plan, except in step 2. layers.0: is gathered more often than its "
        "forwards and backwards require, in step 2 only, as after a retried forward, a "
        "checkpoint or reshard()."
    )
    [note] = check.findings
    assert note.is_normal
    assert not note.is_contradiction


@pytest.mark.parametrize(("steps", "is_consistent"), [((2, 5), True), ((1, 2, 4, 5), False)])
def test_a_deviation_in_fewer_than_half_of_the_steps_is_a_note(steps, is_consistent):
    """A target network that takes new values is gathered again after each of them."""
    builder = trained(num_steps=7)
    for step in steps:
        begin = 1000 * step + 900
        builder.rank(0).all_gather("layers.0", begin, begin + 5, step=step, bytes=MESSAGE_BYTES)
    check = check_plan(builder.build())
    assert check.is_consistent is is_consistent
    assert ("in steps 2, 5 only" in check.sentence) is is_consistent


@pytest.mark.parametrize(
    ("parts", "is_consistent"), [((MESSAGE_BYTES - 8, 8), True), ((MESSAGE_BYTES, 8), False)]
)
def test_reductions_in_parts_add_up_to_the_message_of_the_unit(parts, is_consistent):
    """The head of a chunked loss reduces before the norm of its unit."""
    builder = trained(num_steps=1, reduces=lambda microbatch: False)
    rank = builder.rank(0)
    for unit in BLOCKS:
        for size in parts if unit == "layers.1" else (MESSAGE_BYTES,):
            rank.reduce_scatter(unit, 90, 91, bytes=size)

    assert check_plan(builder.build()).is_consistent is is_consistent
