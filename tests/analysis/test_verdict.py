import pytest

from fsdp_inspect.analysis.verdict import Limit, StepFacts, Waiting, give_verdict

MS = 1_000_000
GIB = 1 << 30


def facts(**changes):
    """A step of 100 ms that is all compute, with some changes."""
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


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        pytest.param({}, Limit.COMPUTE, id="nothing stands out"),
        pytest.param({"data_ns": 10 * MS}, Limit.INPUT, id="data at its threshold"),
        pytest.param({"data_ns": 9 * MS}, Limit.COMPUTE, id="data below its threshold"),
        pytest.param({"host_bound_ns": 10 * MS}, Limit.HOST, id="host"),
        pytest.param({"exposed_ns": 5 * MS}, Limit.COMMUNICATION, id="communication"),
        pytest.param({"other_ns": 30 * MS}, Limit.OTHER, id="other"),
        pytest.param({"device_ratio": 0.95}, Limit.MEMORY, id="memory"),
        pytest.param({"device_ratio": 0.94}, Limit.COMPUTE, id="memory below its threshold"),
        pytest.param(
            {"data_ns": 20 * MS, "exposed_ns": 30 * MS}, Limit.COMMUNICATION, id="largest"
        ),
        pytest.param(
            {"host_bound_ns": 12 * MS, "exposed_ns": 40 * MS}, Limit.HOST, id="host first"
        ),
        pytest.param({"device_ratio": 0.99, "data_ns": 50 * MS}, Limit.MEMORY, id="memory first"),
    ],
)
def test_the_limit_is_the_largest_share_above_its_threshold(changes, limit):
    assert give_verdict(facts(**changes)).limit is limit


def test_the_floor_is_never_offered_as_a_gain():
    verdict = give_verdict(facts(exposed_ns=20 * MS, floor_ns=17 * MS))
    assert verdict.limit is Limit.COMPUTE
    assert verdict.next_steps[0] == "Change nothing in the sharding plan."
    assert "17.0 ms is the floor, which no setting hides" in verdict.why


def test_a_model_in_one_unit_is_told_to_wrap_its_blocks_though_all_is_floor():
    one_unit = {"num_units": 1, "largest_unit_ratio": 1.0}
    verdict = give_verdict(facts(exposed_ns=20 * MS, floor_ns=20 * MS, **one_unit))
    assert verdict.limit is Limit.COMMUNICATION
    assert "fully_shard on every transformer block" in verdict.next_steps[0]


def test_the_sentence_holds_the_number_and_the_why_the_owner():
    verdict = give_verdict(facts(exposed_ns=15 * MS, top=waiting()))
    assert (
        verdict.sentence
        == "Communication is exposed for 15.0 ms of the median 100.0 ms step (15.0 %)."
    )
    assert verdict.why == "The longest wait, 8.00 ms, is for the all-gather of layers.7 in forward."


def test_the_why_tells_the_kinds_of_communication_apart():
    kinds = {"all_gather": 4 * MS, "reduce_scatter": 9 * MS, "all_reduce": 0, "other": 2 * MS}
    verdict = give_verdict(facts(exposed_ns=15 * MS, exposed_by_kind_ns=kinds))
    assert verdict.why == "Reduce-scatter 9.00 ms, all-gather 4.00 ms, not FSDP 2.00 ms."


def test_the_longest_wait_is_the_one_beyond_the_floor():
    verdict = give_verdict(facts(exposed_ns=15 * MS, floor_ns=5 * MS, top=waiting()))
    assert verdict.why.startswith("Beyond the floor, the longest wait, 8.00 ms, is for")
    assert verdict.why.endswith("5.00 ms of the exposed time is the floor, which no setting hides.")


def test_gathers_repeated_in_backward_suggest_keeping_parameters():
    verdict = give_verdict(facts(exposed_ns=15 * MS, backward_gathers_ns=9 * MS))
    assert "reshard_after_forward=False" in verdict.next_steps[0]
    assert "9.00 ms" in verdict.next_steps[0]


def test_backward_gathers_below_two_percent_are_not_worth_naming():
    verdict = give_verdict(facts(exposed_ns=15 * MS, backward_gathers_ns=MS))
    assert not any("reshard_after_forward" in step for step in verdict.next_steps)


def test_on_a_blocking_backend_exposure_is_called_a_property_of_the_backend():
    verdict = give_verdict(facts(exposed_ns=60 * MS, blocks_host=True, backend="gloo"))
    assert "block the host by default on gloo" in verdict.why
    assert "a property of the backend" in verdict.why
    assert any("on GPUs" in step for step in verdict.next_steps)


def test_a_wait_outside_fsdp_is_not_blamed_on_a_unit():
    top = Waiting(fqn=None, kind="all_reduce", phase="outside", exposed_ns=8 * MS)
    verdict = give_verdict(facts(exposed_ns=15 * MS, top=top))
    assert (
        verdict.why == "The longest wait, 8.00 ms, is for the all-reduce that FSDP did not issue."
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
    assert (
        verdict.sentence == "Memory is close to the limit: 77.0 GiB reserved of 80.0 GiB (97.0 %)."
    )
    assert "expandable_segments:True: 17.0 GiB" in verdict.next_steps[0]


def test_every_limit_says_why_and_what_next():
    cases = [{}, {"data_ns": 50 * MS}, {"host_bound_ns": 50 * MS}, {"other_ns": 50 * MS}]
    for changes in cases:
        verdict = give_verdict(facts(**changes))
        assert verdict.why
        assert verdict.next_steps
        assert verdict.numbers["step_time_ns"] == 100 * MS
