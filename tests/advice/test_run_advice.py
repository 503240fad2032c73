"""Advice from the trace to the text: findings state the facts of the run."""

from pathlib import Path

import pytest

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run, find_findings
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase, Stream
from fsdp_inspect.trace.run import RunSource
from tests.builders import RunBuilder
from tests.importing.kineto_traces import TraceWriter


def finding_of(run: RunSource, rule: str):
    return next((each for each in find_findings(run) if each.rule == rule), None)


def fsdp1_run(folder: Path, *, issued_ahead: bool):
    """Five units of FSDP1; the host issues them together, or each at the end of the last one."""
    trace = TraceWriter()
    for unit in range(5):
        start = 100 + 20 * unit
        at = 10 * unit if issued_ahead else start - 8
        trace.annotate("FullyShardedDataParallel._root_pre_forward", at, at + 1)
        trace.annotate("FullyShardedDataParallel._pre_forward", at + 1, at + 5)
        elements = 512 * (unit + 1)
        trace.collective("_allgather_base", start, start + 20, issued=at + 2, elements=elements)
        trace.kernel("gemm", start + 20, start + 40, issued=at + 4)
    import_traces(trace.write(folder / "trace.json"), folder / "run")
    return open_run(folder / "run")


def test_fsdp1_without_its_limiter_is_seen_in_an_imported_trace(tmp_path):
    (tmp_path / "held").mkdir()
    ahead = finding_of(fsdp1_run(tmp_path, issued_ahead=True), "R12")
    assert ahead.units == tuple(f"unit {at}" for at in range(5))
    # 1 to 5 KiB in bfloat16 are in flight; the two largest stay.
    assert ahead.effect.added_low_bytes == -(1 + 2 + 3) * 1024
    assert finding_of(fsdp1_run(tmp_path / "held", issued_ahead=False), "R12") is None


def device_run(*, delay: int, receives: bool = False):
    """Steps of 10,000 whose first gather begins `delay` after the optimizer, and lasts 500."""
    builder = RunBuilder(("layers.0", "layers.1"), device_type="cuda")
    builder.unit("layers.0", reshard_after_forward=False)
    rank = builder.rank(0)
    for number in range(5):
        at = 10_000 * number
        rank.step(number, at, at + 10_000)
        start = at - 100 + delay
        rank.all_gather("layers.0", start, start + 500, issue_ns=at - 2000, need=start)
        rank.forward("layers.0", start + 500, at + 2000, stream=Stream.COMPUTE)
        rank.backward("layers.0", at + 2600, at + 9000, stream=Stream.COMPUTE)
        if receives:
            rank.add(EventKind.POINT_TO_POINT, at + 2500, at + 2600, phase=Phase.FORWARD)
        rank.add(
            EventKind.OPTIMIZER, at + 9000, at + 9900, phase=Phase.OPTIMIZER, stream=Stream.COMPUTE
        )
    return builder.build()


def test_work_behind_the_optimizer_is_seen_from_two_hundredths_of_the_step_on():
    wait = finding_of(device_run(delay=400), "R33")
    assert "waits 400 ns for work after the optimizer" in wait.sentence
    assert (wait.effect.saved_low_ns, wait.effect.saved_high_ns) == (400, 400)
    assert finding_of(device_run(delay=150), "R33") is None


def test_a_pipeline_limits_what_plans_are_worth_and_so_begins_the_answer():
    advice = advise_run(device_run(delay=0, receives=True), AdviceRequest())
    assert advice.answer.startswith("The run is a pipeline")
    assert finding_of(device_run(delay=0), "R31") is None


@pytest.mark.parametrize(("source", "is_named"), [("recorded", True), ("imported", False)])
def test_communication_outside_fsdp_is_a_finding_only_where_the_issuer_is_recorded(
    source: str, is_named: bool
):
    builder = RunBuilder(units=(), world_size=2, source=source)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_reduce(None, 10, 95, need=15)
    limits = [each.sentence for each in find_findings(builder.build()) if each.limits]
    assert limits == (
        ["Communication outside FSDP is exposed for 80% of the step."] if is_named else []
    )


def test_every_finding_says_its_effect_and_how_to_verify_it(tmp_path):
    runs = [device_run(delay=400, receives=True), fsdp1_run(tmp_path, issued_ahead=True)]
    for finding in (each for run in runs for each in find_findings(run)):
        assert finding.effect.sentence
        assert finding.verify
        assert finding.do


def test_ddp_s_map_of_unused_parameters_is_no_reduction_of_a_bucket():
    builder = RunBuilder(
        ["bucket 0"],
        world_size=2,
        sharder="ddp",
        observed={"find_unused_parameters": "True", "gradients_between_backwards": "kept"},
    )
    builder.unit("bucket 0", parameters={"p": [100]}, replicate_group=0, shard_group=-1)
    rank = builder.rank(0)
    for number in range(5):
        at = 10_000 * number
        rank.step(number, at, at + 10_000)
        for microbatch, begin in enumerate((at + 1000, at + 5000)):
            for unit, start in (("bucket 0", begin), (None, begin + 1500)):
                times = {"need": start, "issue_ns": start, "microbatch": microbatch}
                rank.all_reduce(unit, start, start + 1000, group=0, **times)
    assert (
        finding_of(builder.build(), "R16").sentence == "DDP reduces every bucket 2 times per step."
    )
