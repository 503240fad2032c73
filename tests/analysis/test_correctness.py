"""A mistake of the training comes first, and changes nothing else that is said about the run."""

import math
from dataclasses import replace

import pytest

from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.analysis.correctness import check_training
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.trace.correctness import (
    BatchSeen,
    CoverageSeen,
    LateSeen,
    LossSeen,
    OptimizerSeen,
    ParameterSeen,
    StreakSeen,
    TrainingSeen,
    UpdateSeen,
)
from tests.builders import InMemoryRun, RunBuilder

STALE = TrainingSeen(
    num_trainable=4,
    num_with_gradient=4,
    optimizers=[
        OptimizerSeen(num_steps=3, num_tensors=4, num_of_model=0, num_with_gradient=0, num_alike=4)
    ],
)


def input_bound() -> InMemoryRun:
    """Two ranks that wait for data in half of each step."""
    builder = RunBuilder(("layers.0",), world_size=2)
    for number in range(2):
        rank = builder.rank(number)
        for step in range(4):
            start = 1000 * step
            rank.step(step, start, start + 1000)
            rank.data(start, start + 500)
            rank.forward("layers.0", start + 500, start + 900)
    return builder.build()


def observed(run: InMemoryRun, *seen: TrainingSeen) -> InMemoryRun:
    ranks = [
        record.model_copy(update={"training": each})
        for record, each in zip(run.ranks, seen, strict=True)
    ]
    return replace(run, ranks=ranks)


def test_the_speed_is_judged_as_without_the_mistake() -> None:
    run = input_bound()
    plain, wrong = (
        measure_summary(run).verdict,
        measure_summary(observed(run, STALE, STALE)).verdict,
    )

    assert plain.limit is Limit.INPUT
    assert wrong.limit is Limit.TRAINING
    assert wrong.of_speed == plain.of_speed == plain
    assert wrong.next_steps[1:] == plain.next_steps


def test_advice_on_the_speed_is_that_without_the_mistake() -> None:
    run = input_bound()
    found = find_findings(run)

    assert any(plain.sentence == measure_summary(run).verdict.sentence for plain in found)
    mistake, *rest = find_findings(observed(run, STALE, STALE))
    assert tuple(rest) == found
    assert mistake.limits
    assert mistake.sentence == "The optimizer updates no parameter of the model."
    assert mistake.do == (
        "Create the optimizer from the parameters of the model that trains, after it is sharded.",
    )


@pytest.mark.parametrize("number", range(3))
def test_few_different_batches_are_not_judged(number: int) -> None:
    """Fewer than three different batches on the ranks: chance, padding or a benchmark."""
    seen = TrainingSeen(
        batches=[BatchSeen(step=step, digest=step % max(number, 1)) for step in range(8)]
    )
    assert measure_summary(observed(input_bound(), seen, seen)).verdict.limit is Limit.INPUT


def test_without_sampled_updates_gradients_are_not_checked() -> None:
    found = observed(input_bound(), TrainingSeen(), TrainingSeen())

    unknown = check_training(found).not_checked

    assert unknown.keys() >= {"values", "optimizer", "gradients", "replicas", "clipping", "loss"}
    assert unknown["gradients"].startswith("No update of a parameter")


def test_each_optimizer_that_changes_nothing_has_its_note() -> None:
    def beside(*numbers: int) -> TrainingSeen:
        fits = OptimizerSeen(
            num_steps=8, num_tensors=4, num_of_model=4, num_with_gradient=4, num_alike=4
        )
        idle = [
            OptimizerSeen(
                place=f"gan.py:{number}",
                num_steps=8,
                num_tensors=number,
                num_of_model=0,
                num_with_gradient=0,
                num_alike=0,
                has_moved=False,
            )
            for number in numbers
        ]
        return TrainingSeen(num_trainable=4, num_with_gradient=4, optimizers=[*idle, fits])

    def places(*seen: TrainingSeen) -> list[str | None]:
        return [each.place for each in check_training(observed(input_bound(), *seen)).notes]

    assert places(beside(5, 7), beside(5, 7)) == ["gan.py:5", "gan.py:7"]
    assert places(beside(5), beside(5)) == ["gan.py:5"]
    assert not places(beside(5), beside())
    assert places(beside(5, 7), beside(7)) == ["gan.py:7"]


def resumed(before: list[float], after: list[float]) -> InMemoryRun:
    """Two attempts that log losses; the second one continues with other parameters."""
    attempts: list[InMemoryRun] = []
    for number, losses in enumerate((before, after)):
        builder = RunBuilder(("layers.0",), world_size=1)
        for step, loss in enumerate(losses):
            builder.rank(0).step(step, 1000 * step, 1000 * step + 900)
            builder.rank(0).loss(loss)
        update = UpdateSeen(
            step=0, rate=1.0, factor=None, gradients=[1.0], values=[1.0], digests=[number],
            num_meant=64, num_lost=0,
        )  # fmt: skip
        parameter = ParameterSeen(name="w", unit=0, part=[], is_replica=False, dtype="float32")
        seen = TrainingSeen(parameters=[parameter], updates=[update])
        attempts.append(observed(builder.build(earlier_attempts=attempts[:1]), seen))
    return attempts[1]


def test_a_loss_that_rises_with_a_resume_is_a_note() -> None:
    falls = [3.0 - step / 50 for step in range(60)]

    [note] = check_training(resumed(falls, [2.9, 2.8, 2.7])).notes
    assert note.sentence == "The loss is higher after the resume than before it."
    assert (
        "are 2.9, 2.8, 2.7, and the last 30 of the attempt before are between 1.82 and" in note.why
    )
    for after in ([2.9, 2.8], [2.9, 2.8, 2.3], [1.9, 1.8, 1.8], [2.9, 2.8, math.nan]):
        assert not check_training(resumed(falls, after)).notes
    assert not check_training(resumed(falls[:38], [2.9, 2.8, 2.7])).notes


def test_with_deepspeed_the_reason_is_its_own_optimizer() -> None:
    found = observed(input_bound(), TrainingSeen(), TrainingSeen())
    manifest = found.manifest.model_copy(update={"sharder": "zero2"})

    unknown = check_training(replace(found, manifest=manifest)).not_checked

    assert all("in its own optimizer" in unknown[name] for name in ("optimizer", "gradients"))
    assert "DeepSpeed" not in unknown["loss"] + unknown["batches"]


def test_shards_of_one_recorded_rank_are_not_compared() -> None:
    update = UpdateSeen(
        step=0, rate=1.0, factor=1.0, gradients=[1.0, 2.0], values=[1.0, 1.0], digests=[1, 2],
        num_meant=64, num_lost=0,
    )  # fmt: skip
    shards = [
        ParameterSeen(name=name, unit=0, part=[0], is_replica=False, dtype="float32")
        for name in ("weight", "bias")
    ]
    seen = TrainingSeen(parameters=shards, updates=[update] * 4)
    run = observed(input_bound(), seen, TrainingSeen())

    assert not check_training(replace(run, ranks=run.ranks[:1])).faults


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "is_noted"),
    [(64, "bfloat16", True), (32, "bfloat16", False), (64, "float32", False)],
)
def test_a_reduction_in_bfloat16_over_many_ranks_is_a_note(
    num_ranks: int, dtype: str, is_noted: bool
) -> None:
    run = observed(input_bound(), TrainingSeen(), TrainingSeen())
    [group] = run.manifest.process_groups
    manifest = run.manifest.model_copy(
        update={
            "process_groups": [group.model_copy(update={"ranks": list(range(num_ranks))})],
            "units": [
                each.model_copy(update={"reduce_dtype": dtype}) for each in run.manifest.units
            ],
        }
    )

    found = check_training(replace(run, manifest=manifest))

    expected = [f"Gradients are reduced in bfloat16 over {num_ranks} ranks."] if is_noted else []
    assert [note.sentence for note in found.notes] == expected
    assert not found.faults


def updates_of(*lost_at: tuple[int, float, int]) -> TrainingSeen:
    """Sampled updates: step, learning rate, and how many of 64 values did not change."""
    updates = [
        UpdateSeen(
            step=step, rate=rate, factor=None, gradients=[1.0], values=[1.0],
            digests=[0], num_meant=64, num_lost=lost,
        )
        for step, rate, lost in lost_at
    ]  # fmt: skip
    parameter = ParameterSeen(
        name="weight", unit=0, part=[0], is_replica=False, dtype="float32", divide_factor=1.0
    )
    return TrainingSeen(parameters=[parameter], updates=updates)


STARTS = tuple((step, 0.1, 0) for step in range(4))


@pytest.mark.parametrize(
    ("streak", "is_named"),
    [
        pytest.param(StreakSeen(since=60, number=50, num_before=8), True, id="rate is 0 for long"),
        pytest.param(StreakSeen(since=60, number=49, num_before=8), False, id="ends soon"),
        pytest.param(StreakSeen(since=0, number=90), False, id="always 0: not a rate"),
        pytest.param(StreakSeen(num_before=8), False, id="pause"),
    ],
)
def test_a_rate_that_stays_0_is_named(streak: StreakSeen, is_named: bool) -> None:
    known = {"late": LateSeen(idle=streak), "coverage": CoverageSeen()}
    seen = updates_of(*STARTS).model_copy(update=known)
    faults = check_training(observed(input_bound(), seen, seen)).faults
    assert [each.sentence for each in faults] == (
        ["The learning rate is 0 while the training goes on."] if is_named else []
    )


def test_a_rate_that_is_0_from_the_start_is_noted_unless_values_change() -> None:
    for number, digest, is_noted in ((50, 0, True), (49, 0, False), (50, 1, False)):
        idle = StreakSeen(since=0, number=number)
        known = {"late": LateSeen(idle=idle, digests=[digest]), "coverage": CoverageSeen()}
        seen = updates_of(*STARTS)
        same = [each.model_copy(update={"digests": [0]}) for each in seen.updates]
        seen = seen.model_copy(update={**known, "updates": same})
        notes = check_training(observed(input_bound(), seen, seen)).notes
        said = [each.sentence for each in notes]
        assert ("The learning rate is 0 in all updates." in said) is is_noted


def test_a_restart_of_the_warm_up_at_each_sampled_update_is_no_mistake() -> None:
    seen = updates_of(*STARTS, (100, 0.0, 64), (200, 0.0, 64))
    seen.updates[-1] = seen.updates[-1].model_copy(update={"digests": [1]})
    assert not check_training(observed(input_bound(), seen, seen)).faults


def test_the_range_of_learning_rates_of_lost_updates_is_stated() -> None:
    seen = updates_of(*((step, 0.3, 40) for step in range(8)), (100, 3e-5, 64))
    low = [each.model_copy(update={"dtype": "bfloat16"}) for each in seen.parameters]
    seen = seen.model_copy(update={"parameters": low})
    [fault] = check_training(observed(input_bound(), seen, seen)).faults
    assert "may be smaller than the rounding of bfloat16" in fault.why
    assert "The learning rate was 3e-05 to 0.3 in them." in fault.why


@pytest.mark.parametrize(
    ("at_end", "expected"),
    [([0], ["100% of the updates change no stored parameter."]), ([1], [])],
)
def test_values_in_float32_that_stay_are_named_without_rounding(at_end, expected) -> None:
    seen = updates_of(*((step, 4e-3, 64) for step in range(8)))
    seen = seen.model_copy(update={"late": LateSeen(digests=at_end)})
    found = check_training(observed(input_bound(), seen, seen))
    assert [each.sentence for each in found.faults] == expected
    assert "smaller than the rounding" not in "".join(each.why for each in found.faults)
    assert ("precision" in found.not_checked) is (not expected)


def replica_of(*samples: tuple[int, float, int]) -> TrainingSeen:
    """Sampled updates of a replica: step, norm of the gradient, and digest of the values."""
    updates = [
        UpdateSeen(
            step=step, rate=0.1, factor=None, gradients=[norm], values=[float(digest)],
            digests=[digest], num_meant=64, num_lost=0,
        )
        for step, norm, digest in samples
    ]  # fmt: skip
    parameter = ParameterSeen(name="weight", unit=0, part=[], is_replica=True, dtype="float32")
    return TrainingSeen(parameters=[parameter], updates=updates)


@pytest.mark.parametrize(
    ("later", "is_named"),
    [
        pytest.param(((100, 2.0, 8), (200, 2.0, 9)), True, id="no_sync stays on"),
        pytest.param(((100, 1.0, 8), (200, 1.0, 9)), False, id="equal gradients"),
        pytest.param(((100, 2.0, 8), (200, 1.0, 6)), False, id="they meet again"),
        pytest.param(((100, 2.0, 8),), False, id="one sample"),
    ],
)
def test_replicas_that_train_alone_later_are_named(later, is_named) -> None:
    early = tuple((step, 1.0, step) for step in range(5))
    plain = replica_of(*early, (100, 1.0, 5), (200, 1.0, 6))
    other = replica_of(*early, *later)
    faults = check_training(observed(input_bound(), plain, other)).faults
    named = [each for each in faults if each.sentence.startswith("The ranks no longer combine")]
    assert bool(named) is is_named


def losses_of(*tokens: int) -> TrainingSeen:
    """Means over these numbers of tokens, one in each step."""
    seen = [
        LossSeen(step=step, microbatch=0, num_tokens=number, scale=1.0)
        for step, number in enumerate(tokens)
    ]
    return TrainingSeen(num_trainable=4, num_with_gradient=4, losses=seen)


@pytest.mark.parametrize(
    ("first", "second", "who", "ranks", "median"),
    [
        # The long batch alternates between the ranks, and every second pair is equal.
        ((20, 100, 20, 20), (20, 20, 20, 100), "of the shorter batch", (0, 1), 3.0),
        ((20, 100, 20), (20, 20, 100), "of the shorter batch", (0, 1), 5.0),
        ((100, 80, 90, 20), (20, 20, 20, 200), "on rank 1", (1,), 4.75),
        ((100, 20, 80, 20), (20, 20, 20, 20), "on rank 1", (1,), 2.5),
        ((100, 80, 0), (20, 20, 20), "on rank 1", (1,), 4.0),
    ],
)
def test_a_rank_is_named_only_if_its_tokens_weigh_most_in_most_microbatches(
    first, second, who, ranks, median
) -> None:
    (fault,) = check_training(observed(input_bound(), losses_of(*first), losses_of(*second))).faults
    assert fault.sentence == f"Tokens {who} weigh up to 5.0 times as much."
    assert fault.ranks == ranks
    assert f"{median:.1f} times as much in the median of {len(first)} microbatches" in fault.why
    assert "100 on rank 0 and 20 on rank 1" in fault.why


def logged(*losses: float) -> InMemoryRun:
    builder = RunBuilder(("layers.0",))
    rank = builder.rank(0)
    for step, loss in enumerate(losses):
        rank.step(step, 1000 * step, 1000 * step + 1000)
        rank.loss(loss)
    return observed(builder.build(), TrainingSeen())


@pytest.mark.parametrize(
    ("losses", "is_noted"),
    [
        pytest.param([2.3, 2.4, 5, 12, *[20 + at % 3 for at in range(40)]], True, id="diverged"),
        pytest.param([2.3, *[9 - at / 20 for at in range(40)]], True, id="from step 1, and falls"),
        pytest.param([2.3 + at / 10 for at in range(50)], True, id="rises"),
        pytest.param([2.3 * 0.97**at for at in range(50)], False, id="healthy"),
        pytest.param([2.3 + at % 3 / 10 for at in range(50)], False, id="flat"),
        pytest.param([2.3, 4, 3.5, *[2.2 for _ in range(40)]], False, id="rose and came back"),
        pytest.param([1e-6 + at / 100 for at in range(50)], False, id="near 0 at first"),
        pytest.param([2.3] * 20 + [9] * 40, False, id="a spike, which is named"),
        pytest.param([2.3, *[9] * 20], False, id="few"),
    ],
)
def test_a_loss_that_ends_above_its_first_value_is_noted(losses: list[float], is_noted: bool):
    notes = [each.sentence for each in check_training(logged(*losses)).notes]
    assert notes == ["loss ends above its first value."] * is_noted
