"""Predictions of steps with other buckets of ZeRO-1 and ZeRO-2, against hand-made backwards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.buckets import (
    BucketChanges,
    measure_buckets,
    predict_buckets,
    simulate_buckets,
)
from fsdp_inspect.trace.codes import EventKind, Phase, Stream
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import InMemoryRun, RankBuilder, RunBuilder, write_run
from tests.conftest import Invoke

FORWARD_NS, OPTIMIZER_NS, NS_PER_ELEMENT = 5_000_000, 1_000_000, 2
BANDWIDTH, LATENCY_NS = 4e9, 200_000
ROUNDING_NS = 30


def fill(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The buckets of DeepSpeed: a gradient that does not fit begins the next bucket."""
    found: list[list[int]] = [[]]
    for at, size in enumerate(sizes):
        if found[-1] and sum(sizes[each] for each in found[-1]) + size > most:
            found.append([])
        found[-1].append(at)
    return found


def duration_of(numel: int) -> int:
    """Two ranks: each byte crosses the bus once."""
    return round(LATENCY_NS + 4 * numel / BANDWIDTH * 1e9)


def zero_run(
    sizes: Sequence[int],
    most: int,
    *,
    stage: int = 2,
    overlaps: bool = False,
    microbatches: int = 1,
    buckets: Sequence[Sequence[int]] | None = None,
    **manifest: object,
) -> InMemoryRun:
    """Six equal steps; `sizes` has the elements of each parameter, in the order of backward."""
    order = sizes if stage == 2 or overlaps else sizes[::-1]
    buckets = fill(order, most) if buckets is None else buckets
    observed = {"reduce_bucket_size": str(most), "overlap_comm": str(overlaps)}
    builder = RunBuilder(
        ["parameter group 0", *(f"bucket {place}" for place in range(len(buckets)))],
        world_size=2,
        warmup_steps=1,
        process_groups=[ProcessGroup(index=0, name="all", ranks=[0, 1], role="shard")],
        **{
            "sharder": f"zero{stage}",
            "observed": {**observed, "contiguous_gradients": "True"},
            **manifest,
        },
    )
    builder.unit("parameter group 0", num_tensors=0, num_parameters=0, parameters={})
    for place, members in enumerate(buckets):
        parameters = {f"p{each}": [order[each]] for each in members}
        builder.unit(
            f"bucket {place}", parameters=parameters, num_tensors=len(members),
            replicate_group=0, shard_group=-1,
        )  # fmt: skip
    now = 0
    for step in range(6):
        start, in_step = now, HandMade(builder.rank(0), step, order, buckets)
        for microbatch in range(microbatches):
            reduces = microbatch == microbatches - 1 or stage == 2
            now = in_step.pass_of(now, microbatch, reduces, after=stage == 1 and not overlaps)
        in_step.rank.step(step, start, now + OPTIMIZER_NS)
        in_step.rank.optimizer(now, now + OPTIMIZER_NS)
        in_step.rank.all_gather("parameter group 0", now, now + 900, phase=Phase.OPTIMIZER)
        now += OPTIMIZER_NS
    return builder.build()


class HandMade(NamedTuple):
    """One step of a rank."""

    rank: RankBuilder
    step: int
    order: Sequence[int]
    """The elements of each gradient, in the order in which they enter the buckets."""
    buckets: Sequence[Sequence[int]]

    def pass_of(self, start: int, microbatch: int, reduces: bool, *, after: bool) -> int:
        """Add a forward and a backward that reduces in it or after it; returns the end."""
        row = {"microbatch": microbatch, "step": self.step}
        begin = now = start + FORWARD_NS
        self.rank.add(EventKind.FORWARD, start, begin, phase=Phase.FORWARD, **row)
        if after or not reduces:
            end = now = now + NS_PER_ELEMENT * sum(self.order)
            for place in range(len(self.buckets) if reduces else 0):
                now = self.reduce(place, microbatch, now)
        else:
            firsts = {members[0]: place for place, members in enumerate(self.buckets) if place}
            for at, numel in enumerate(self.order):
                now += NS_PER_ELEMENT * numel
                if at in firsts:  # it does not fit
                    now = self.reduce(firsts[at] - 1, microbatch, now)
            end = now = self.reduce(len(self.buckets) - 1, microbatch, now)
        self.rank.add(EventKind.BACKWARD, begin, end, phase=Phase.BACKWARD, **row)
        return now

    def reduce(self, place: int, microbatch: int, now: int) -> int:
        """Add the reduction of a bucket that blocks the host; returns its end."""
        numel = sum(self.order[each] for each in self.buckets[place])
        end, unit, number = now + duration_of(numel), f"bucket {place}", len(self.rank.events)
        row = {"microbatch": microbatch, "step": self.step, "collective": number}
        self.rank.all_reduce(
            unit, now, end,
            bytes=4 * numel, group=0, stream=Stream.HOST, sequence=number, **row,
        )  # fmt: skip
        wait = EventKind.ALL_REDUCE_WAIT
        self.rank.add(wait, now, end, unit=unit, phase=Phase.BACKWARD, **row)
        return end


SIZES = st.lists(st.integers(20_000, 1_500_000), min_size=4, max_size=20)


@settings(max_examples=20)
@given(SIZES, st.sampled_from([1, 2]), st.booleans(), st.sampled_from([100_000, 700_000, 10**9]))
def test_the_prediction_of_a_size_is_the_step_with_that_size(
    sizes: list[int], stage: int, overlaps: bool, most: int
) -> None:
    kind = {"stage": stage, "overlaps": overlaps, "microbatches": 2}
    run = zero_run(sizes, 400_000, **kind)
    work = measure_buckets(run)
    if len({sum(work.gradients[each].numel for each in one) for one in work.recorded}) < 3:
        return  # the line of the network is not known
    found = predict_buckets(work, most)
    truth = measure_buckets(zero_run(sizes, most, **kind))
    assert abs(found.replay_error) < 1e-4
    assert [each.num_tensors for each in found.rows()] == [len(each) for each in truth.recorded]
    assert found.predicted.step_time_ns == pytest.approx(truth.step_time_ns, rel=2e-3)
    assert found.low_ns <= truth.step_time_ns <= found.high_ns
    gain_ns = work.step_time_ns - truth.step_time_ns
    assert found.gain_low_ns - ROUNDING_NS <= gain_ns <= found.gain_high_ns + ROUNDING_NS


SMALL = [200_000, 300_000, 250_000] * 4
LAYERS = [500_000, 100_000, 900_000, 300_000, 200_000, 800_000, 400_000]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_the_prediction_of_another_stage_reduces_other_microbatches(
    before: int, after: int
) -> None:
    work = measure_buckets(zero_run(LAYERS, 1_000_000, stage=before, microbatches=3))
    truth = measure_buckets(zero_run(LAYERS, 1_000_000, stage=after, microbatches=3))
    found = predict_buckets(work, zero_stage=after)
    assert found.predicted.step_time_ns == pytest.approx(truth.step_time_ns, rel=2e-3)
    assert found.predicted.exposed_ns == pytest.approx(truth.exposed_ns, rel=2e-3)
    assert (found.change > 0) == (after == 2)
    assert "Gradients become ready in the reverse order of the parameters." in found.assumptions


def test_the_reduction_of_a_bucket_starts_when_the_next_gradient_does_not_fit() -> None:
    work = measure_buckets(zero_run(LAYERS, 1_000_000))
    found, waited = work.simulate(work.recorded).buckets, 0
    computed = [LAYERS[: each[0] + 1] for each in work.recorded[1:]]
    for bucket, numels in zip(found, [*computed, LAYERS], strict=True):
        expected = NS_PER_ELEMENT * sum(numels) + waited
        assert bucket.ready_ns == bucket.start_ns == pytest.approx(expected, abs=ROUNDING_NS)
        waited += bucket.duration_ns


def test_a_parameter_larger_than_the_bucket_is_one_message_with_an_assumption() -> None:
    work = measure_buckets(zero_run(LAYERS, 1_000_000))
    found = predict_buckets(work, 250_000)
    assert [each.num_tensors for each in found.rows()] == [1] * len(LAYERS)
    assert any("(900,000) is reduced in one message" in each for each in found.assumptions)
    assert found.added_bytes == 4 * (250_000 - 1_000_000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"buckets": [[0], [1], [2, 3, 4], [5, 6]]}, "are not those of reduce_bucket_size 900,000"),
        ({"sharder": "fsdp1"}, "it uses FSDP1. Expected a run of"),
    ],
)
def test_other_runs_are_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(MissingDataError, match=reason):
        measure_buckets(zero_run(LAYERS, 900_000, **changes))


def test_settings_of_another_sharder_and_other_stages_are_refused() -> None:
    run = zero_run(LAYERS, 1_000_000)
    with pytest.raises(PlanError, match=r"it uses DeepSpeed ZeRO-2\. Expected --red"):
        simulate_buckets(run, BucketChanges(bucket_cap_mb=25))
    with pytest.raises(PlanError, match=r"Invalid ZeRO stage: 3\. Expected 1 or 2"):
        simulate_buckets(run, BucketChanges(zero_stage=3))
    with pytest.raises(ValueError, match="Invalid reduce_bucket_size: 0"):
        simulate_buckets(run, BucketChanges(reduce_bucket_size=0))


def test_the_command_prints_the_configuration_of_deepspeed(invoke: Invoke, tmp_path: Path) -> None:
    run = write_run(zero_run(LAYERS, 1_000_000), tmp_path / "run")
    done = invoke("simulate", run, "--reduce-bucket-size", "5000000")
    text = " ".join(done.out.split())
    assert "of at most 5,000,000 elements." in text
    snippet = '{"stage": 2, "reduce_bucket_size": 5000000, "overlap_comm": false}'
    assert f'"zero_optimization": {snippet}' in text
    assert "DeepSpeed's buffers for gradients take 15.3 MiB more." in text
    assert json.loads("{" + text[text.index('"zero_optimization"') :].split("} ")[0] + "}}")
    refused = invoke("simulate", run, "--bucket-cap", "25")
    assert refused.code == 1
    assert "it uses DeepSpeed ZeRO-2" in " ".join(refused.err.replace("│", " ").split())
    assert invoke("simulate", run, "--wrap", "block").code == 2


def test_advice_names_a_size_that_needs_fewer_reductions() -> None:
    run = zero_run(SMALL, 300_000)
    (finding,) = [each for each in find_findings(run) if each.rule == "R38"]
    assert "elements leave less of DeepSpeed ZeRO-2's all-reduces exposed." in finding.sentence
    size = int(finding.do[0].removeprefix("Set reduce_bucket_size to ").rstrip("."))
    assert finding.snippet == (
        f'"zero_optimization": {{"stage": 2, "reduce_bucket_size": {size}, "overlap_comm": false}}'
    )
    assert finding.effect.added_low_bytes == 4 * (size - 300_000)
    truth = measure_buckets(zero_run(SMALL, size))
    gain_ns = measure_buckets(run).step_time_ns - truth.step_time_ns
    assert finding.effect.saved_low_ns is not None
    assert 0 < finding.effect.saved_low_ns <= gain_ns
