from dataclasses import replace

import pytest

from fsdp_inspect.analysis.batch_work import UnevenWork
from fsdp_inspect.analysis.host_stops import HostStopCost
from fsdp_inspect.analysis.memory.growth import MemoryGrowth
from fsdp_inspect.analysis.placement import FarDevice, SharedCores
from fsdp_inspect.analysis.trust import RunDelay, Trust
from fsdp_inspect.analysis.verdict import (
    COMPARE_PLANS,
    HighestMoment,
    Limit,
    OtherPart,
    RareWork,
    StepFacts,
    Straggler,
    Waiting,
    give_rank_verdict,
    give_verdict,
)
from fsdp_inspect.report.memory_wording import describe_growth
from fsdp_inspect.trace.sharders import DDP, traits_of

MS = 1_000_000
GIB, MIB = 1 << 30, 1 << 20


FIRST = Waiting(fqn="", kind="all_gather", phase="forward", exposed_ns=20 * MS)


def facts(**changes):
    """A step of 100 ms with compute only, with some changes."""
    plain = {
        "step_time_ns": 100 * MS,
        "compute_ns": 90 * MS,
        "data_ns": 0,
        "host_bound_ns": 0,
        "exposed_ns": 0,
        "floor_ns": 0,
        "other_ns": 0,
        "num_units": 9,
        "largest_unit_ratio": 0.2,
    }
    return StepFacts(**{**plain, **changes})


def waiting(kind="all_gather", phase="forward"):
    return Waiting(fqn="layers.7", kind=kind, phase=phase, exposed_ns=8 * MS)


def straggler(cost_ns=10 * MS, **changes):
    plain = {
        "rank": 4,
        "host": "node-1",
        "cost_ns": cost_ns,
        "cost_low_ns": cost_ns,
        "cost_high_ns": cost_ns,
        "last_ratio": 0.861,
        "late_ns": 2 * MS,
        "phase": "backward",
        "meanwhile": "data",
        "meanwhile_ns": 9 * MS,
        "like_rank": 0,
        "cost_ratio": cost_ns / (100 * MS),
        "waits_ns": {},
    }
    return Straggler(**{**plain, **changes})


def stop(what=".item()", **changes):
    plain = {
        "what": what,
        "place": "train.py:42",
        "phase": "forward",
        "fqn": "layers.7",
        "rank": 1,
        "count": 2000.0,
        "duration_ns": 30 * MS,
        "num_steps": 10,
        "out_of": 10,
        "idle_ns": None,
        "is_alone": False,
        "is_cost": True,
        "reason": "",
    }
    return HostStopCost(**{**plain, **changes})


def uneven(**changes):
    plain = {"ratio": 2.1, "num_more": 34, "out_of": 40, "word": "tokens"}
    rest = {"rank": 4, "padding_ratio": None, "balanced_ratio": 0.6}
    return UnevenWork(**{**plain, **rest, **changes})


def without_cores(ratio):
    return Trust(run_delay=RunDelay(0, ratio))


def growth(bytes_per_step=1 << 20, steps_until_full=500):
    return MemoryGrowth(3, 20, 1, 2, True, bytes_per_step, 0.001, "", False, steps_until_full)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        pytest.param({}, Limit.COMPUTE, id="nothing stands out"),
        pytest.param({"data_ns": 10 * MS}, Limit.INPUT, id="data at its threshold"),
        pytest.param({"data_ns": 9 * MS}, Limit.COMPUTE, id="data below its threshold"),
        pytest.param({"host_bound_ns": 10 * MS}, Limit.HOST, id="host"),
        pytest.param({"exposed_ns": 5 * MS}, Limit.COMMUNICATION, id="communication"),
        pytest.param({"other_ns": 30 * MS}, Limit.OTHER, id="other"),
        pytest.param(
            {"other_ns": 40 * MS, "collection_ns": 35 * MS}, Limit.COLLECTION, id="collections"
        ),
        pytest.param({"collection_ns": 4 * MS}, Limit.COMPUTE, id="few collections"),
        pytest.param(
            {"between_ns": 50 * MS, "exposed_ns": 20 * MS}, Limit.BETWEEN, id="between steps"
        ),
        pytest.param({"between_ns": 10 * MS}, Limit.COMPUTE, id="little between steps"),
        pytest.param({"recompute_ns": 25 * MS}, Limit.RECOMPUTE, id="recomputation"),
        pytest.param(
            {"recompute_ns": 25 * MS, "exposed_ns": 40 * MS}, Limit.COMMUNICATION, id="the larger"
        ),
        pytest.param(
            {"exposed_ns": 24 * MS, "floor_ns": 24 * MS, "first_gather": FIRST},
            Limit.FIRST_GATHER,
            id="a large root",
        ),
        pytest.param({"exposed_ns": 24 * MS, "floor_ns": 24 * MS}, Limit.COMPUTE, id="a floor"),
        pytest.param({"device_ratio": 0.95}, Limit.MEMORY, id="memory"),
        pytest.param({"device_ratio": 0.94}, Limit.COMPUTE, id="memory below its threshold"),
        pytest.param(
            {"data_ns": 20 * MS, "exposed_ns": 30 * MS}, Limit.COMMUNICATION, id="largest"
        ),
        pytest.param(
            {"host_bound_ns": 12 * MS, "exposed_ns": 40 * MS}, Limit.HOST, id="host first"
        ),
        pytest.param(
            {"host_behind_ns": 80 * MS, "utilisation_ratio": 0.5}, Limit.HOST, id="an idle device"
        ),
        pytest.param(
            {"host_behind_ns": 8 * MS, "utilisation_ratio": 0.5},
            Limit.COMPUTE,
            id="a device that is idle for another reason",
        ),
        pytest.param(
            {"host_behind_ns": 80 * MS, "utilisation_ratio": 0.95},
            Limit.COMPUTE,
            id="a busy device",
        ),
        pytest.param(
            {"host_behind_ns": 80 * MS}, Limit.HOST_OR_COMPUTE, id="a device of unknown use"
        ),
        pytest.param(
            {"host_behind_ns": 40 * MS}, Limit.COMPUTE, id="a device that seldom lacks work"
        ),
        pytest.param({"device_ratio": 0.99, "data_ns": 50 * MS}, Limit.MEMORY, id="memory first"),
        pytest.param({"stop": stop()}, Limit.HOST_STOP, id="reads at one line"),
        pytest.param({"stop": stop(duration_ns=4 * MS)}, Limit.COMPUTE, id="few reads"),
        pytest.param(
            {"stop": stop(), "other_ns": 50 * MS}, Limit.HOST_STOP, id="reads are in other code"
        ),
        pytest.param(
            {"stop": stop(), "exposed_ns": 40 * MS}, Limit.COMMUNICATION, id="waits beyond reads"
        ),
        pytest.param(
            {"stop": stop(is_alone=True), "exposed_ns": 40 * MS, "straggler": straggler(35 * MS)},
            Limit.HOST_STOP,
            id="the others wait for the rank that reads",
        ),
        pytest.param(
            {"stop": stop(is_alone=True, duration_ns=6 * MS), "straggler": straggler(35 * MS)},
            Limit.STRAGGLER,
            id="reads explain little of a late rank",
        ),
        pytest.param(
            {"stop": stop("garbage collection")}, Limit.COLLECTION, id="collections in some steps"
        ),
        pytest.param({"trust": without_cores(0.25)}, Limit.CORES, id="cores at their threshold"),
        pytest.param({"trust": without_cores(0.24)}, Limit.COMPUTE, id="cores below"),
        pytest.param(
            {"trust": without_cores(0.3), "host_bound_ns": 60 * MS, "exposed_ns": 70 * MS},
            Limit.CORES,
            id="cores before what they cause",
        ),
        pytest.param(
            {"trust": without_cores(0.3), "straggler": straggler(60 * MS)},
            Limit.STRAGGLER,
            id="a straggler that cores do not explain",
        ),
        pytest.param(
            {"straggler": straggler(6 * MS), "exposed_ns": 40 * MS},
            Limit.STRAGGLER,
            id="a straggler before communication",
        ),
        pytest.param(
            {"straggler": straggler(4 * MS), "exposed_ns": 40 * MS},
            Limit.COMMUNICATION,
            id="a straggler below its threshold",
        ),
        pytest.param({"growth": growth()}, Limit.MEMORY_CREEP, id="full in 500 steps"),
        pytest.param({"growth": growth(1, 20_000)}, Limit.COMPUTE, id="full in 20,000 steps"),
        pytest.param(
            {"growth": growth(MIB, None), "peak_allocated_bytes": 1000 * MIB},
            Limit.MEMORY_CREEP,
            id="0.1% of the peak a step, without a device",
        ),
        pytest.param(
            {"growth": growth(MIB, None), "peak_allocated_bytes": 2000 * MIB},
            Limit.COMPUTE,
            id="less than that",
        ),
    ],
)
def test_the_limit_is_the_largest_share_above_its_threshold(changes, limit):
    assert give_verdict(facts(**changes)).limit is limit


def test_a_host_that_comes_first_does_not_hide_longer_waits():
    verdict = give_verdict(facts(host_bound_ns=12 * MS, exposed_ns=40 * MS))
    assert "Communication is exposed for 40.0 ms, which is more." in verdict.why
    assert "exposed" not in give_verdict(facts(host_bound_ns=12 * MS, exposed_ns=5 * MS)).why


def test_latency_is_not_told_from_waits_for_ranks_that_are_not_recorded():
    known = {"exposed_ns": 40 * MS, "latency_ns": 35 * MS, "num_units": 4}
    assert give_verdict(facts(**known)).limit is Limit.LATENCY
    partly = facts(**known, trust=Trust(missing_ranks=(1, 2)))
    assert give_verdict(partly).limit is Limit.COMMUNICATION


def test_the_floor_is_never_offered_as_a_gain():
    verdict = give_verdict(facts(exposed_ns=20 * MS, floor_ns=17 * MS))
    assert verdict.limit is Limit.COMPUTE
    assert verdict.next_steps[-1] == "Change nothing in the sharding plan."
    assert "20.0 ms, of which 17.0 ms is the floor, which can only be shortened." in verdict.why


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"exposed_ns": 30 * MS, "backward_gathers_ns": 20 * MS}, id="communication"),
        pytest.param({"exposed_ns": 30 * MS, "num_units": 1}, id="one unit"),
        pytest.param({"exposed_ns": 30 * MS, "top": waiting()}, id="late all-gather"),
        pytest.param({"exposed_ns": 30 * MS, "causes_ns": {"serialized": 9 * MS}}, id="queue"),
        pytest.param({"host_bound_ns": 20 * MS}, id="host"),
        pytest.param({"device_ratio": 0.97, "device_bytes": 80 * GIB}, id="memory"),
        pytest.param({}, id="compute"),
    ],
)
def test_a_verdict_leaves_changes_of_the_plan_to_the_simulation(changes):
    steps = " ".join(give_verdict(facts(has_plan=True, **changes)).next_steps)
    named = ("reshard", "Reshard", "Prefetch", "fully_shard", "set_separate", "units", "nothing")
    assert not any(name in steps for name in named)
    without_plan = give_verdict(facts(**changes)).next_steps
    assert any(name in " ".join(without_plan) for name in named)


@pytest.mark.parametrize(
    ("dimension", "phase", "name"),
    [
        ("tp", "forward", "tensor parallelism in forward"),
        ("ep", "backward", "expert parallelism in backward"),
        ("mine", "forward", "the mesh dimension 'mine' in forward"),
        ("other", "optimizer", "the optimizer phase"),
        ("shard", "optimizer", "the optimizer phase"),
        ("other", "data", "data loading"),
        ("world", "outside", "the training loop"),
    ],
)
def test_communication_outside_fsdp_is_named_before_any_plan(dimension, phase, name):
    part = OtherPart(
        kind="all_reduce", phase=phase, dimension=dimension, exposed_ns=12 * MS, total_ns=18 * MS
    )
    verdict = give_verdict(facts(exposed_ns=30 * MS, other_part=part, has_plan=True))
    assert verdict.sentence == "Communication outside FSDP is exposed for 18% of the step."
    assert f"is the all-reduce of {name}: 12.0 ms. No sharding plan changes it." in verdict.why
    assert verdict.next_steps[0] != COMPARE_PLANS
    assert verdict.next_steps[1:] == (COMPARE_PLANS,)


@pytest.mark.parametrize(("total", "is_named"), [(14 * MS, True), (4 * MS, False)])
def test_less_communication_outside_fsdp_is_named_beside_the_plan(total, is_named):
    part = OtherPart(
        kind="all_gather", phase="outside", dimension="shard", exposed_ns=total, total_ns=total
    )
    verdict = give_verdict(facts(exposed_ns=30 * MS, other_part=part, has_plan=True))
    assert verdict.sentence == "Communication is exposed for 30% of the step."
    assert verdict.next_steps[0] == COMPARE_PLANS
    named = "Communication outside FSDP is exposed for 14% of the step, most of all the all-gather"
    assert any(named in step for step in verdict.next_steps) == is_named
    assert bool(verdict.outside) == is_named


def test_gathers_of_an_optimizer_are_not_taken_for_clipping():
    part = OtherPart(
        kind="all_gather",
        phase="optimizer",
        dimension="other",
        exposed_ns=12 * MS,
        total_ns=18 * MS,
    )
    verdict = give_verdict(facts(exposed_ns=30 * MS, other_part=part, has_plan=True))
    assert "is the all-gather of the optimizer: 12.0 ms" in verdict.why
    assert "Muon" in verdict.next_steps[0]
    assert "clipping" not in verdict.next_steps[0]


@pytest.mark.parametrize(
    ("changes", "headline", "remedy"),
    [
        (
            {"collection_ns": 20 * MS},
            "Python's garbage collection takes 20% of the step.",
            "gc.freeze()",
        ),
        (
            {"between_ns": 100 * MS},
            "Checkpoints, evaluation or generation take 50% of the loop's time.",
            "show RUN lifetime",
        ),
        (
            {"recompute_ns": 20 * MS},
            "Activation checkpointing repeats forwards for 20% of the step.",
            "Checkpoint fewer blocks",
        ),
        (
            {"first_gather": FIRST},
            "The large root unit is exposed for 20% of the step.",
            "bfloat16",
        ),
        (
            {"exposed_ns": 40 * MS, "backward_order_ns": 20 * MS, "latency_ns": 30 * MS},
            "The order of backward prefetch exposes 20% of the step.",
            "Remove the calls of set_modules_to_backward_prefetch",
        ),
        (
            {"exposed_ns": 40 * MS, "root_gather_ns": 20 * MS},
            "Gathering the root again in backward exposes 20% of the step.",
            "Keep the root unsharded",
        ),
        (
            {"exposed_ns": 40 * MS, "latency_ns": 20 * MS},
            "The latency of collectives is exposed for 20% of the step.",
            "fewer and larger messages",
        ),
    ],
)
def test_costs_that_no_part_shows_are_named_with_size_and_remedy(changes, headline, remedy):
    verdict = give_verdict(facts(**changes))
    assert verdict.sentence == headline
    assert remedy in verdict.next_steps[0]
    assert len(headline.split()) <= 12


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"backward_order_ns": 9 * MS, "root_gather_ns": 9 * MS}, id="small parts"),
        pytest.param({"latency_ns": 40 * MS, "num_units": 1}, id="latency of a single unit"),
        pytest.param({"latency_ns": 40 * MS, "blocks_host": True}, id="a blocking backend"),
        pytest.param({"latency_ns": 40 * MS, "causes_ns": {"straggler": 30 * MS}}, id="late ranks"),
    ],
)
def test_a_part_of_communication_is_no_headline_without_enough_evidence(changes):
    assert give_verdict(facts(exposed_ns=40 * MS, **changes)).limit is Limit.COMMUNICATION


def test_the_order_of_backward_prefetch_explains_why_the_plan_check_fails():
    changes = {"exposed_ns": 40 * MS, "contradiction": "The run does not follow its plan."}
    order = give_verdict(facts(**changes, backward_order_ns=20 * MS))
    assert not any("plan check" in step for step in order.next_steps)
    assert "plan check" in give_verdict(facts(**changes)).next_steps[0]


def test_waiting_for_late_ranks_comes_before_any_plan():
    causes = {"straggler": 16 * MS, "bandwidth": 14 * MS}
    verdict = give_verdict(facts(exposed_ns=30 * MS, causes_ns=causes, has_plan=True))
    assert "16.0 ms of the exposed time are waits for ranks" in verdict.next_steps[0]


def test_a_model_in_one_unit_is_told_to_wrap_its_blocks_though_all_is_floor():
    one_unit = {"num_units": 1, "largest_unit_ratio": 1.0}
    verdict = give_verdict(facts(exposed_ns=20 * MS, floor_ns=20 * MS, **one_unit))
    assert verdict.limit is Limit.COMMUNICATION
    assert "fully_shard on every transformer block" in verdict.next_steps[0]


def test_the_sentence_holds_the_number_and_the_why_the_owner():
    verdict = give_verdict(facts(exposed_ns=15 * MS, top=waiting()))
    assert verdict.sentence == "Communication is exposed for 15% of the step."
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed. The largest waits are for the "
        "all-gather of layers.7 in forward: 8.00 ms."
    )


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"floor_ns": 2 * MS}, " Hiding waits saves at most 6%."),
        (
            {"floor_ns": 2 * MS, "num_units": 1, "largest_unit_ratio": 1.0},
            " Hiding waits saves at most 8%.",
        ),
        (
            {"floor_ns": 2 * MS, "num_units": 1, "sharder": traits_of(DDP)},
            " Hiding waits saves at most 6%.",
        ),
        ({"knows_floor": False}, ""),
    ],
)
def test_compute_is_called_the_largest_part_beside_shorter_waits(changes, saved):
    verdict = give_verdict(facts(exposed_ns=8 * MS, compute_ns=84 * MS, **changes))
    assert verdict.largest_part == f"Compute takes 84%.{saved}"
    assert not give_verdict(facts(exposed_ns=60 * MS, compute_ns=40 * MS)).largest_part
    assert not give_verdict(facts(data_ns=20 * MS)).largest_part


def test_the_why_tells_the_kinds_of_communication_apart():
    kinds = {"all_gather": 4 * MS, "reduce_scatter": 9 * MS, "all_reduce": 0, "other": 2 * MS}
    verdict = give_verdict(facts(exposed_ns=15 * MS, exposed_by_kind_ns=kinds))
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed: reduce-scatter 9.00 ms, all-gather "
        "4.00 ms, other 2.00 ms."
    )


def test_the_longest_wait_is_the_one_beyond_the_floor():
    verdict = give_verdict(facts(exposed_ns=15 * MS, floor_ns=5 * MS, top=waiting()))
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed. Beyond the floor of 5.00 ms, the "
        "largest waits are for the all-gather of layers.7 in forward: 8.00 ms."
    )


def test_gathers_repeated_in_backward_suggest_keeping_parameters():
    verdict = give_verdict(facts(exposed_ns=15 * MS, backward_gathers_ns=9 * MS))
    assert "reshard_after_forward=False" in verdict.next_steps[0]
    assert "9.00 ms" in verdict.next_steps[0]


def test_backward_gathers_below_two_percent_are_not_worth_naming():
    verdict = give_verdict(facts(exposed_ns=15 * MS, backward_gathers_ns=MS))
    assert not any("reshard_after_forward" in step for step in verdict.next_steps)


def test_on_a_blocking_backend_exposure_is_called_a_property_of_the_backend():
    verdict = give_verdict(facts(exposed_ns=60 * MS, blocks_host=True, backend="gloo"))
    assert "block the host on gloo" in verdict.why
    assert any("on GPUs" in step for step in verdict.next_steps)


def test_where_it_is_not_known_what_fsdp_issued_nothing_is_said_of_it():
    top = Waiting(fqn=None, kind="all_reduce", phase="outside", exposed_ns=8 * MS)
    kinds = {"other": 8 * MS}
    known = {"top": top, "exposed_by_kind_ns": kinds, "knows_fsdp": False}
    verdict = give_verdict(facts(exposed_ns=15 * MS, **known))
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed: other collectives 8.00 ms. The "
        "largest waits are for the all-reduce: 8.00 ms."
    )


@pytest.mark.parametrize(("total_ms", "is_named"), [(20, True), (1, False)])
def test_the_loop_s_own_collectives_beside_ddp_come_before_a_smaller_gain(total_ms, is_named):
    part = OtherPart(
        kind="barrier", phase="outside", dimension="", exposed_ns=15 * MS, total_ns=total_ms * MS
    )
    steps = give_verdict(
        facts(
            exposed_ns=40 * MS,
            knows_fsdp=False,
            between_passes=part,
            top=waiting("all_reduce", "backward"),
            causes_ns={"bandwidth": 6 * MS},
        )
    ).next_steps
    assert steps[-1].startswith("Send fewer bytes")
    words = "optimizer are exposed for 20.0 ms, most of all the barrier: 15.0 ms."
    assert (words in steps[0]) is is_named


def test_a_wait_outside_fsdp_is_not_blamed_on_a_unit():
    top = Waiting(fqn=None, kind="all_reduce", phase="outside", exposed_ns=8 * MS)
    verdict = give_verdict(facts(exposed_ns=15 * MS, top=top))
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed. The largest waits are for the "
        "all-reduce that FSDP did not issue: 8.00 ms."
    )


def test_float32_reductions_are_offered_bfloat16_and_others_are_not():
    reduction = waiting("reduce_scatter", "backward")
    for in_float32, offered in ((True, True), (False, False)):
        verdict = give_verdict(
            facts(exposed_ns=15 * MS, top=reduction, reduces_in_float32=in_float32)
        )
        assert any("bfloat16" in step for step in verdict.next_steps) is offered


def test_memory_names_what_is_reserved_and_fragmentation():
    verdict = give_verdict(
        facts(
            device_ratio=0.97,
            device_bytes=80 * GIB,
            peak_reserved_bytes=77 * GIB,
            peak_allocated_bytes=60 * GIB,
        )
    )
    assert verdict.sentence == "Memory limits the run: 97% of the device is reserved."
    assert verdict.why == (
        "The allocator reserves 77.0 GiB of 80.0 GiB; tensors hold at most 60.0 GiB. A larger "
        "batch or a longer sequence can run out of memory."
    )
    assert "expandable_segments:True: 17.0 GiB of reserved memory" in verdict.next_steps[0]


def test_every_limit_says_why_and_what_next():
    cases = [{}, {"data_ns": 50 * MS}, {"host_bound_ns": 50 * MS}, {"other_ns": 50 * MS}]
    for changes in cases:
        verdict = give_verdict(facts(**changes))
        assert verdict.why
        assert verdict.next_steps
        assert verdict.numbers["step_time_ns"] == 100 * MS


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="compute"),
        pytest.param({"data_ns": 50 * MS}, id="input"),
        pytest.param({"host_bound_ns": 50 * MS}, id="host"),
        pytest.param({"exposed_ns": 50 * MS}, id="communication"),
        pytest.param({"other_ns": 50 * MS}, id="other"),
        pytest.param({"device_ratio": 0.99}, id="memory"),
        pytest.param({"growth": growth()}, id="memory growth"),
        pytest.param({"straggler": straggler()}, id="straggler"),
    ],
)
def test_a_headline_has_at_most_twelve_words(changes):
    verdict = give_verdict(facts(**changes))
    assert len(verdict.sentence.split()) <= 12
    assert 0 < len(verdict.because.split()) <= 30


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        pytest.param(
            {"exposed_ns": 50 * MS, "top": replace(waiting(), cause="late_issue"), "rank": 2},
            "The largest waits are for the all-gather of layers.7 in forward: 8.00 ms on rank 2, "
            "mostly late issue.",
            id="unit, cause and rank of a wait",
        ),
        pytest.param(
            {"exposed_ns": 50 * MS, "top": waiting(), "rank": 2},
            "The largest waits are for the all-gather of layers.7 in forward: 8.00 ms on rank 2.",
            id="a wait of several causes has no main cause",
        ),
        pytest.param(
            {"exposed_ns": 50 * MS, "causes_ns": {"straggler": 30 * MS}, "rank": 2},
            "Ranks that arrive late cause 30.0 ms of the waits on rank 2.",
            id="late ranks",
        ),
        pytest.param(
            {
                "exposed_ns": 50 * MS,
                "blocks_host": True,
                "backend": "gloo",
                "exposed_by_kind_ns": {"all_gather": 20 * MS, "reduce_scatter": 30 * MS},
                "rank": 2,
            },
            "Collectives block the host on gloo: reduce-scatter 30.0 ms, all-gather 20.0 ms.",
            id="a backend that blocks the host",
        ),
        pytest.param(
            {
                "device_ratio": 0.99,
                "highest": HighestMoment(
                    rank=1,
                    phase="backward",
                    fqn="layers.3",
                    category="activation",
                    category_bytes=GIB,
                ),
            },
            "The peak is in backward, in layers.3, on rank 1. Its largest part is activation: "
            "1.00 GiB.",
            id="what the peak holds",
        ),
        pytest.param(
            {"straggler": straggler()},
            "On rank 4 (host node-1) data takes 9.00 ms longer per step than on the other ranks.",
            id="what a straggler does",
        ),
    ],
)
def test_the_main_reason_names_unit_cause_and_rank(changes, because):
    assert give_verdict(facts(**changes)).because == because


def test_a_straggler_is_named_with_its_price_and_what_it_does_meanwhile():
    verdict = give_verdict(facts(straggler=straggler()))
    assert verdict.sentence == "Rank 4 is a straggler: it costs 10% of the step."
    assert verdict.why == (
        "Without its extra work the typical step of 100 ms is about 10.0 ms shorter. It arrives "
        "last at 86.1% of the collectives, then by 2.00 ms (median). On this rank data takes "
        "9.00 ms longer per step than on the other ranks."
    )
    assert (
        "how rank 4 (host node-1) differs from the other ranks in its input:"
        in (verdict.next_steps[0])
    )
    slow = give_verdict(facts(straggler=straggler(meanwhile="backward")))
    assert "then by 2.00 ms (median), most of all in backward." in slow.why
    assert "differs from the other ranks: clocks, heat" in slow.next_steps[0]
    assert verdict.numbers["straggler_cost_ns"] == 10 * MS


def test_memory_that_creeps_up_says_when_the_device_is_full():
    verdict = give_verdict(facts(growth=growth()))
    assert verdict.sentence == "Memory grows by 1.00 MiB per step."
    assert verdict.why == (
        "Rank 3 ends each step with more allocated memory than the step before. The device is full "
        "after at most 500 more steps. Steady growth means that the training loop keeps tensors "
        "from step to step."
    )
    assert ".detach()" in verdict.next_steps[0]


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (None, ""),
        (0, " The memory is full."),
        (1, " The device is full after at most 1 more step."),
        (2500, " The device is full after at most 2,500 more steps."),
    ],
)
def test_the_verdict_and_the_memory_report_say_alike_when_the_device_is_full(steps, sentence):
    found = growth(bytes_per_step=1 << 30, steps_until_full=steps)
    assert describe_growth(found).endswith(f"never freed.{sentence}")
    verdict = give_verdict(facts(growth=found, peak_allocated_bytes=1 << 33))
    assert f"than the step before.{sentence} Steady growth" in verdict.why


def test_the_causes_of_waits_are_part_of_the_why():
    causes = {"late_issue": 8 * MS, "floor": 4 * MS, "bandwidth": 3 * MS}
    verdict = give_verdict(facts(exposed_ns=15 * MS, floor_ns=4 * MS, causes_ns=causes))
    assert verdict.why == (
        "15.0 ms of the typical step of 100 ms are exposed. By cause: late issue 8.00 ms, floor "
        "4.00 ms, transfer 3.00 ms. The floor can only be shortened."
    )


def test_prefetch_is_advised_only_where_gathers_are_late():
    for cause, is_advised in (("late_issue", True), ("bandwidth", False)):
        verdict = give_verdict(facts(exposed_ns=15 * MS, top=waiting(), causes_ns={cause: 15 * MS}))
        assert any("Prefetch" in step for step in verdict.next_steps) is is_advised


def test_collectives_in_one_queue_are_advised_a_second_communicator():
    verdict = give_verdict(facts(exposed_ns=15 * MS, causes_ns={"serialized": 9 * MS}))
    assert "set_separate_reduce_scatter_group" in verdict.next_steps[0]


def test_a_run_that_contradicts_its_plan_is_told_so_first():
    verdict = give_verdict(facts(contradiction="layers.7: stayed unsharded."))
    assert verdict.next_steps[0] == (
        "First find out why the plan check fails. layers.7: stayed unsharded."
    )


def test_fragmentation_and_retries_are_taken_from_the_allocator_where_it_was_counted():
    verdict = give_verdict(
        facts(
            device_ratio=0.97,
            peak_reserved_bytes=80 * GIB,
            peak_allocated_bytes=79 * GIB,
            fragmentation_ratio=0.25,
            num_alloc_retries=3,
        )
    )
    assert "20.0 GiB of reserved memory is unused" in verdict.next_steps[0]
    assert "The allocator emptied its cache 3 times." in verdict.why


def test_an_imported_trace_says_what_idle_time_may_hold():
    verdict = give_verdict(facts(host_bound_ns=20 * MS, is_kernel_trace=True))
    assert "this time includes waits for the next batch" in verdict.why
    assert "Compute kernels run for 90.0 ms" in give_verdict(facts(is_kernel_trace=True)).why


def test_a_rank_that_something_else_limits_differs_from_the_run():
    run = give_verdict(facts())
    other = give_rank_verdict(2, "node", facts(data_ns=30 * MS), run)
    assert (other.limit, other.differs) == (Limit.INPUT, True)
    assert other.sentence.startswith("The step is input-bound")
    assert not give_rank_verdict(1, "node", facts(), run).differs


def test_under_a_straggler_the_other_ranks_wait_for_it():
    late = facts(straggler=straggler())
    run = give_verdict(late)
    waits = give_rank_verdict(0, "", facts(straggler=straggler(), exposed_ns=50 * MS), run)
    itself = give_rank_verdict(4, "node-1", late, run)
    assert (waits.sentence, waits.differs) == ("This rank waits for rank 4.", False)
    assert itself.sentence == "The other ranks wait for this rank: data takes 9.00 ms longer."
    assert itself.differs


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"host_bound_ns": 30 * MS}, id="host"),
        pytest.param({"exposed_ns": 30 * MS, "top": waiting("all_reduce")}, id="communication"),
        pytest.param({"device_ratio": 0.99}, id="memory"),
        pytest.param({"data_ns": 30 * MS}, id="input"),
        pytest.param({}, id="compute"),
    ],
)
def test_without_gathers_no_change_of_a_sharding_plan_is_advised(changes):
    verdict = give_verdict(facts(has_gathers=False, num_units=0, **changes))
    advice = " ".join(verdict.next_steps)
    assert advice
    for word in ("all-gather", "units", "reshard", "shard", "Prefetch"):
        assert word not in advice


# --- Lines, guards, batches and threads.


def words_of(**changes):
    return give_verdict(facts(**changes))


def test_reads_name_their_line_and_share():
    verdict = words_of(stop=stop())
    assert verdict.sentence == ".item() at train.py:42 takes 30% of the step."
    assert verdict.because == "2,000 calls a step in layers.7 take 30.0 ms."


def test_a_recompilation_names_the_guard():
    compiled = stop("compilation", reason="factor == 1", num_steps=2, is_alone=True)
    verdict = words_of(stop=compiled)
    assert verdict.sentence == "Recompilations take 30% of the step on rank 1."
    assert "The guard that failed: factor == 1." in verdict.why
    assert "2 of 10 steps have one." in verdict.why


def test_the_other_ranks_wait_for_collections_of_one_rank_only():
    for is_alone in (True, False):
        verdict = words_of(stop=stop("garbage collection", is_alone=is_alone), collection_ns=MS)
        assert ("and the other ranks wait for it" in verdict.why) is is_alone


def test_a_rank_that_works_longer_in_some_steps_is_named_beside_the_waits():
    rare = RareWork(1, (2, 5, 8), 9, 60 * MS, 20 * MS, 0.01, 4, "data")
    verdict = words_of(rare=rare, exposed_ns=40 * MS)
    assert verdict.limit is Limit.COMMUNICATION
    assert verdict.next_steps[-1].startswith("Rank 1 works 60.0 ms longer in 3 of 9 steps. Look at")
    assert "breakdown --rank 1 --step 2`" in verdict.next_steps[-1]
    alone = words_of(rare=rare)
    assert alone.limit is Limit.RARE_WORK
    assert "Most of it lies in the part data. Steps: 2, 5, 8." in alone.why
    late = words_of(rare=rare, straggler=straggler(21 * MS))
    assert late.limit is Limit.STRAGGLER
    assert not any("longer in 3 of 9" in each for each in late.next_steps)


def test_collections_on_one_rank_name_it():
    collected = stop("garbage collection", is_alone=True, num_steps=4)
    verdict = words_of(stop=collected, exposed_ns=40 * MS, collection_ns=MS // 10)
    assert verdict.sentence == ("Python's garbage collection takes 30% of the step on rank 1.")
    assert verdict.numbers["garbage_collection_ns"] == collected.duration_ns
    assert "4 of 10 steps have a collection" in verdict.why


def test_a_collection_for_which_the_script_asks_is_not_removed_by_disabling_others():
    asked = stop("garbage collection", reason="gc.collect()")
    verdict = words_of(stop=asked, collect_call=asked, collection_ns=30 * MS)
    assert verdict.limit is Limit.COLLECTION
    assert verdict.next_steps[0] == verdict.collect_less
    assert verdict.collect_less.startswith(
        "train.py:42 calls gc.collect() in 10 of 10 steps. Remove it, or call it on all ranks"
    )
    by_itself = words_of(stop=asked, collection_ns=30 * MS)
    assert by_itself.collect_less.startswith("Call gc.freeze() after the model is built")


def test_a_straggler_with_more_tokens_is_explained():
    verdict = words_of(straggler=straggler(21 * MS), uneven=uneven())
    assert verdict.because == (
        "Rank 4 processed 2.1 times the tokens of the others in 34 of 40 steps."
    )
    assert "Equal batches save about 16.0 ms" in verdict.next_steps[0]
    assert verdict.numbers["balanced_ns"] == pytest.approx(16 * MS, rel=0.01)


def test_a_straggler_with_more_tokens_in_few_steps_is_not_explained_by_them():
    verdict = words_of(straggler=straggler(21 * MS), uneven=uneven(num_more=3))
    assert "tokens" not in verdict.because


@pytest.mark.parametrize(
    ("shared", "step"),
    [
        ((8, 1, 1), "Set OMP_NUM_THREADS=1 or less: torch runs 8 threads on 1 core."),
        (
            (32, 8, 4),
            "Set OMP_NUM_THREADS=2 or less: 4 ranks with 32 threads of torch in all share 8 cores.",
        ),
        (
            (8, 2, 8),
            "Start fewer ranks on this host, or give the job more cores: 8 ranks share 2 cores.",
        ),
        ((1, 8, 1), "Give each rank cores of its own"),
    ],
)
def test_too_few_cores_name_the_setting(shared, step):
    verdict = words_of(trust=without_cores(0.5), shared_cores=SharedCores(*shared))
    assert verdict.next_steps[0].startswith(step)


def test_a_rank_far_from_its_gpu_is_named():
    far = FarDevice(rank=3, core_nodes=(0,), device_node=1, num_ranks=2)
    verdict = words_of(trust=without_cores(0.5), far_device=far)
    assert verdict.next_steps[0] == (
        "Run each process on the NUMA node of its GPU: numactl --cpunodebind=1 --membind=1 for "
        "rank 3, whose cores are on node 0, and 1 other rank. What it gains is unknown."
    )


def test_a_host_bound_step_names_the_lines_that_read():
    verdict = words_of(host_bound_ns=20 * MS, reads=(stop(is_cost=False),))
    assert any(".item() at train.py:42 (2,000 a step)" in step for step in verdict.next_steps)


def test_a_cost_beside_the_limit_is_named_with_its_remedy():
    verdict = give_verdict(facts(exposed_ns=40 * MS, between_ns=20 * MS))
    assert verdict.limit is Limit.COMMUNICATION
    assert verdict.next_steps[-1].startswith(
        "Checkpoints, evaluation or generation take 16.7% of the loop's time. "
    )
    alone = give_verdict(facts(exposed_ns=40 * MS, between_ns=5 * MS))
    assert not any("Checkpoints" in step for step in alone.next_steps)
    starved = facts(exposed_ns=40 * MS, between_ns=20 * MS, trust=without_cores(0.3))
    assert not any("Checkpoints" in step for step in give_verdict(starved).next_steps)


def test_time_between_steps_is_compared_with_the_parts_of_the_step():
    """37% of the whole time are more than 42% of a step, which are 26% of the whole time."""
    found = facts(exposed_ns=42 * MS, between_ns=59 * MS, has_plan=True)
    verdict = give_verdict(found)
    assert verdict.limit is Limit.BETWEEN
    assert "take 37.1% of the loop's time" in verdict.sentence
    assert verdict.next_steps[-1] == COMPARE_PLANS
    less = give_verdict(replace(found, between_ns=30 * MS))
    assert less.limit is Limit.COMMUNICATION


def test_a_rank_that_is_late_in_its_loop_is_looked_at_there():
    verdict = give_verdict(facts(straggler=straggler(meanwhile="other")))
    assert "other code takes 9.00 ms longer" in verdict.because
    assert "outside of forward, backward, optimizer and data loader" in verdict.next_steps[0]
    assert "heat" not in verdict.next_steps[0]
