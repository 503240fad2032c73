"""Predictions of steps with other buckets of DDP, against backwards that are computed by hand."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run, find_findings
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.report.advice import recommended
from fsdp_inspect.report.simulation import describe_buckets, describe_period, render_buckets
from fsdp_inspect.simulation.buckets import (
    BucketChanges,
    BucketWork,
    change_buckets,
    measure_buckets,
    predict_buckets,
)
from fsdp_inspect.trace.codes import EventKind, Phase, Stream
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import MISSING_INT
from tests.builders import MIB, InMemoryRun, RunBuilder, write_run
from tests.conftest import Invoke
from tests.report.terminal_text import text_of

FORWARD_NS, OPTIMIZER_NS, NS_PER_BYTE = 5_000_000, 1_000_000, 0.5
"""Each byte of gradients takes this time of backward."""
BANDWIDTH, LATENCY_NS = 4e9, 20_000
BUS_FACTOR = {2: 1.0, 4: 1.5}


def run_of(
    buckets: list[list[int]],
    *,
    num_ranks: int = 2,
    per_byte: float = NS_PER_BYTE,
    lanes: int = 1,
    slowdowns: Sequence[int] = (1,) * 6,
    late_ns: int = 0,
    **manifest: object,
) -> InMemoryRun:
    """Six equal steps; `buckets` has the elements of each parameter, in the order of backward.

    With `late_ns`, rank 1 begins each backward later.
    """
    builder = RunBuilder(
        [f"bucket {place}" for place in range(len(buckets))],
        world_size=num_ranks,
        warmup_steps=1,
        **{"sharder": "ddp", "observed": {"bucket_cap_mb": "25"}, **manifest},
        process_groups=[
            ProcessGroup(index=0, name="all", ranks=list(range(num_ranks)), role="replicate")
        ],
    )
    names = iter(range(10_000))
    for place, sizes in enumerate(buckets):
        parameters = {f"p{next(names)}": [size] for size in sizes}
        builder.unit(f"bucket {place}", parameters=parameters, replicate_group=0, shard_group=-1)
    start = 0
    for step, slowdown in enumerate(slowdowns):
        begin = start
        for rank in range(2 if late_ns else 1):
            start = add_step(
                builder, step, begin, buckets, per_byte, lanes, slowdown, rank=rank, late_ns=late_ns
            )
    return builder.build()


def add_step(
    builder: RunBuilder,
    step: int,
    start: int,
    buckets: list[list[int]],
    per_byte: float,
    lanes: int,
    slowdown: int,
    *,
    rank: int = 0,
    late_ns: int = 0,
) -> int:
    own_late_ns, rank = rank * late_ns, builder.rank(rank)
    begin = now = start + FORWARD_NS + own_late_ns
    free, rows = [begin] * lanes, []
    for place, sizes in enumerate(buckets):
        message = 4 * sum(sizes)
        now += round(message * per_byte)
        begins = max(now, min(free))
        arrived = max(now + late_ns - own_late_ns, min(free))  # of the last rank
        done = arrived + slowdown * duration_of(message, builder.world_size)
        free[free.index(min(free))] = done
        rows.append((f"bucket {place}", place, message, now, begins, done))
    end = max(now, *free) + 1000
    rank.step(step, start, end + OPTIMIZER_NS)
    rank.add(EventKind.FORWARD, start, begin, phase=Phase.FORWARD)
    rank.add(EventKind.BACKWARD, begin, end, phase=Phase.BACKWARD)
    waits_from = now
    for unit, place, message, ready, begins, done in rows:
        rank.all_reduce(
            unit, begins, done,
            need=waits_from if late_ns else MISSING_INT, issue_ns=ready, bytes=message,
            group=0, collective=step * 100 + place,
            sequence=step * len(rows) + place,
        )  # fmt: skip
        until = max(waits_from, done)
        rank.add(
            EventKind.ALL_REDUCE_WAIT, waits_from, until,
            unit=unit, phase=Phase.BACKWARD, collective=step * 100 + place,
        )  # fmt: skip
        waits_from = until
    rank.optimizer(end, end + OPTIMIZER_NS)
    return end + OPTIMIZER_NS


def duration_of(message: int, num_ranks: int) -> int:
    return round(LATENCY_NS + message * BUS_FACTOR[num_ranks] / BANDWIDTH * 1e9)


def assign(sizes: list[int], cap_mb: float) -> list[list[int]]:
    """The buckets of torch, for parameters of float32."""
    found: list[list[int]] = [[]]
    for size in sizes:
        found[-1].append(size)
        if 4 * sum(found[-1]) >= cap_mb * MIB:
            found.append([])
    return [each for each in found if each]


ROUNDING_NS = 20
SIZES = st.lists(st.integers(20_000, 1_500_000), min_size=4, max_size=20)


@settings(max_examples=20)
@given(SIZES, st.sampled_from([1.0, 3.0, 10.0, 100.0]), st.sampled_from([2, 4]))
def test_the_prediction_of_a_size_is_the_step_with_that_size(
    sizes: list[int], cap_mb: float, num_ranks: int
) -> None:
    recorded, wanted = assign(sizes, 2.0), assign(sizes, cap_mb)
    run = run_of(recorded, num_ranks=num_ranks)
    if len({sum(each) for each in recorded}) < 3:
        return  # the line of the network is not known
    true = run_of(wanted, num_ranks=num_ranks)

    work = measure_buckets(run)
    found = predict_buckets(work, cap_mb)
    truth = measure_buckets(true)

    assert abs(found.replay_error) < 1e-3
    assert [each.num_tensors for each in found.rows()] == [len(each) for each in wanted]
    assert found.predicted.step_time_ns == pytest.approx(truth.step_time_ns, rel=2e-3)
    waited_ns = sum(end - start for start, end in found.predicted.waits)
    assert waited_ns == pytest.approx(found.predicted.exposed_ns, abs=ROUNDING_NS)
    assert found.low_ns <= truth.step_time_ns <= found.high_ns
    gain_ns = work.step_time_ns - truth.step_time_ns
    assert found.gain_low_ns - ROUNDING_NS <= gain_ns <= found.gain_high_ns + ROUNDING_NS


MIB_ELEMENTS = MIB // 4
BLOCKS = [MIB_ELEMENTS, *[2 * MIB_ELEMENTS, MIB_ELEMENTS // 2] * 6]


def test_without_overlap_all_reduces_begin_after_the_last_gradient() -> None:
    work = measure_buckets(run_of(assign(BLOCKS, 2.0)))
    found = predict_buckets(work, None, overlaps=False)
    exposed = sum(duration_of(4 * sum(each), 2) for each in assign(BLOCKS, 2.0))
    assert found.predicted.exposed_ns == pytest.approx(exposed, rel=1e-3)
    assert found.change > 0
    assert "longer than with the recorded buckets" in text_of(render_buckets(found))


def test_advice_names_the_size_whose_gain_is_certain() -> None:
    (finding,) = [
        each for each in find_findings(run_of(assign(BLOCKS, 12.0))) if each.rule == "R38"
    ]
    assert re.fullmatch(
        r"Buckets of [125] MiB leave less of DDP's all-reduces exposed\.", finding.sentence
    )
    assert finding.effect.saved_low_ns > 0
    best = measure_buckets(run_of(assign(BLOCKS, float(finding.do[0].split("=")[1][:-1]))))
    recorded = measure_buckets(run_of(assign(BLOCKS, 12.0)))
    gain_ns = recorded.step_time_ns - best.step_time_ns
    assert finding.effect.saved_low_ns - ROUNDING_NS <= gain_ns
    assert gain_ns <= finding.effect.saved_high_ns + ROUNDING_NS
    small = run_of(assign(BLOCKS, 2.0), per_byte=8.0)  # all is hidden
    assert not [each for each in find_findings(small) if each.rule == "R38"]


def test_advice_recommends_the_simulated_size_or_says_why_there_is_none() -> None:
    advice = advise_run(run_of(assign(BLOCKS, 12.0)), AdviceRequest())
    finding, _ = recommended(advice)
    assert finding is not None
    assert finding.rule == "R38"
    assert advice.refusal == f"{finding.sentence} {finding.do[0]}"
    texts = [each.effect.sentence for each in advice.findings]
    assert not any("not simulated" in text for text in texts)

    request = AdviceRequest(run_name="runs/one")
    hidden = advise_run(run_of(assign(BLOCKS, 2.0), per_byte=8.0), request)
    assert hidden.refusal is not None
    assert hidden.refusal.startswith("None of 10 simulated sizes of the buckets saves time")
    assert not any("RUN" in each.effect.sentence for each in hidden.findings)


def test_other_runs_are_refused_with_the_reason() -> None:
    with pytest.raises(MissingDataError, match=r"it uses FSDP2\. Expected a run of Distributed"):
        measure_buckets(run_of(assign(BLOCKS, 2.0), sharder="fsdp2"))
    run = run_of(assign(BLOCKS, 2.0))
    run.event_tables[0].unit[run.event_tables[0].stream == Stream.ALL_REDUCE] = -1
    with pytest.raises(MissingDataError, match="do not reduce every bucket once"):
        measure_buckets(run)


def test_a_size_that_is_no_size_is_refused() -> None:
    work = measure_buckets(run_of(assign(BLOCKS, 2.0)))
    with pytest.raises(ValueError, match=r"Invalid bucket_cap_mb: 0\. Expected a number above 0"):
        predict_buckets(work, 0)
    assert all(
        one <= other
        for one, other in pairwise(each.start_ns for each in predict_buckets(work, 5).rows())
    )


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_the_command_refuses_a_size_that_is_no_size(
    invoke: Invoke, tmp_path: Path, size: str
) -> None:
    run = write_run(run_of(assign(BLOCKS, 2.0)), tmp_path / "run")
    ended = invoke("simulate", run, "--bucket-cap", size)
    assert ended.code == 2
    words = " ".join(ended.err.replace("│", " ").split())
    assert f"invalid size '{size}'. Expected MiB above 0, for example 25." in words
    assert "internal error" not in ended.err
    assert invoke("simulate", run, "--bucket-cap", "5").code == 0


def test_a_size_that_torch_did_not_log_is_said_to_be_unknown(
    invoke: Invoke, tmp_path: Path
) -> None:
    observed = {"bucket_cap_mb": "unknown"}
    run = write_run(run_of(assign(BLOCKS, 2.0), observed=observed), tmp_path / "run")
    text = " ".join(invoke("simulate", run, "--no-overlap").out.split())
    assert "of a size torch did not log, without overlap." in text
    assert "nan" not in text
    found = json.loads(invoke("simulate", run, "--no-overlap", "--json").out)
    assert found["settings"]["size"] is None


def test_no_other_network_is_predicted_from_waits_for_a_late_rank() -> None:
    work = measure_buckets(run_of(assign(BLOCKS, 2.0)))
    assert work.network.late_ratio == 0
    late = replace(work, network=replace(work.network, late_ratio=0.9))
    assert change_buckets(late, BucketChanges(bucket_cap_mb=1.0)).predicted.step_time_ns > 0
    with pytest.raises(MissingDataError, match=r"90% of the time .* is waiting for ranks"):
        change_buckets(late, BucketChanges(), bus_bytes_per_s=1e9)


@given(
    sizes=st.lists(st.integers(50_000, 3_000_000), min_size=2, max_size=8),
    cap_mb=st.floats(0.5, 30),
    late_ns=st.integers(2_000_000, 50_000_000),
)
@settings(max_examples=20)
def test_no_size_gains_the_waits_for_a_rank_that_works_longer(
    sizes: list[int], cap_mb: float, late_ns: int
) -> None:
    buckets = assign(sizes, 4.0)
    equal = measure_buckets(run_of(buckets))
    late = measure_buckets(run_of(buckets, late_ns=late_ns))
    assert late.rank == 0
    assert late.step_time_ns == pytest.approx(equal.step_time_ns + late_ns, rel=0.001)
    steps = [predict_buckets(work, cap_mb).predicted.step_time_ns for work in (equal, late)]
    assert steps[1] == pytest.approx(steps[0] + late_ns, rel=0.01)


def test_all_reduces_that_overlapped_are_simulated_at_a_time() -> None:
    """gloo has two threads: a small bucket ends before the large one that was issued earlier."""
    buckets = [[6 * MIB_ELEMENTS], [MIB_ELEMENTS], [MIB_ELEMENTS // 2], [2 * MIB_ELEMENTS]]
    run = run_of(buckets, lanes=2)
    work = measure_buckets(run)
    assert isinstance(work, BucketWork)
    assert work.lanes == 2
    assert measure_buckets(run_of(buckets)).worst_cases([[0]]) == ()
    replayed = work.simulate(work.recorded)
    assert replayed.exposed_ns == pytest.approx(work.exposed_ns, rel=1e-3)
    assert replayed.step_time_ns == pytest.approx(work.step_time_ns, rel=1e-4)
    first, second, *_ = replayed.buckets
    assert second.start_ns < first.start_ns + first.duration_ns

    text = " ".join(describe_buckets(predict_buckets(work, None)))
    assert "Self-check of the waits:" in text
    one_by_one = replace(work, lanes=1).simulate(work.assign(replace(work.settings, size=1.0)))
    assert predict_buckets(work, 1.0).high_ns >= one_by_one.step_time_ns


def test_the_mean_of_unequal_backwards_is_simulated() -> None:
    """Every second all-reduce takes five times as long, so the mean backward would hide them."""
    run = run_of(assign(BLOCKS, 2.0), per_byte=4.0, slowdowns=[1, 25, 1, 25, 1, 25])
    work = measure_buckets(run)
    assert work.exposed_ns > 0
    assert work.simulate(work.recorded).exposed_ns == pytest.approx(work.exposed_ns, rel=0.02)


def test_the_times_of_one_backward_are_told_from_those_of_the_step() -> None:
    found = predict_buckets(measure_buckets(run_of(assign(BLOCKS, 2.0))), None)
    assert found.backwards_per_step == 1
    assert "microbatches" not in describe_period(found)
    assert "A step has 8 microbatches" in describe_period(replace(found, backwards_per_step=8.0))
