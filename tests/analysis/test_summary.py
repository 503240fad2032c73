from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.analysis.verdict.words import FIND_CALL
from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.formatting import format_cause, format_ns, format_ratio
from fsdp_inspect.results import to_plain
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Method, Phase, Stream
from fsdp_inspect.trace.run import RunStatus
from tests.builders import InMemoryRun, RunBuilder, steady_run
from tests.llama70b import STRAGGLER, llama_70b_run

SAMPLES = Path(__file__).parents[2] / "samples"
DEMANDED = {
    "run_id", "world_size", "backend", "num_steps", "step_time_ns", "communication_ns",
    "exposed_ns", "overlap_ratio", "peak_allocated_bytes", "peak_reserved_bytes", "units", "ranks",
}  # fmt: skip
DEMANDED_OF_A_UNIT = {
    "fqn", "num_parameters", "unsharded_bytes", "all_gather", "reduce_scatter",
}  # fmt: skip
DEMANDED_OF_A_COLLECTIVE = {
    "count_per_step", "bytes", "duration_ns", "exposed_ns", "bus_bytes_per_s",
}  # fmt: skip
DEMANDED_OF_A_RANK = {"rank", "step_time_ns", "communication_ns", "exposed_ns", "overlap_ratio"}


def test_the_digest_has_the_keys_that_programs_rely_on():
    plain = to_plain(measure_summary(steady_run()))
    assert plain.keys() >= DEMANDED
    assert plain["step_time_ns"].keys() >= {"typical", "median", "p10", "p90"}
    assert plain["units"][0].keys() >= DEMANDED_OF_A_UNIT
    for kind in ("all_gather", "reduce_scatter"):
        assert plain["units"][0][kind].keys() >= DEMANDED_OF_A_COLLECTIVE
    assert plain["ranks"][0].keys() >= DEMANDED_OF_A_RANK


def test_the_numbers_of_a_drawn_run_are_those_of_the_drawing():
    digest = measure_summary(steady_run())
    assert (digest.step_time_ns.typical, digest.communication_ns, digest.exposed_ns) == (
        1000,
        500,
        250,
    )
    assert (digest.overlap_ratio, digest.floor_ns) == (0.5, 150)
    assert (digest.loss.first, digest.loss.last) == (4.0, 1.0)


def test_finished_steps_are_counted_with_those_left_out():
    digest = measure_summary(steady_run(num_steps=6, warmup_steps=2, memory_steps=[3]))
    assert (digest.num_steps, digest.num_timed_steps) == (6, 3)
    assert (digest.left_out.warmup, digest.left_out.memory) == ((0, 1), (3,))


def test_the_verdict_rests_on_the_typical_step():
    verdict = measure_summary(steady_run()).verdict
    assert verdict.limit is Limit.COMMUNICATION
    assert verdict.numbers["exposed_ns"] == 250
    assert "largest waits are for the all-gather of layers.1 in forward: 50 ns." in verdict.why
    assert verdict.why.startswith(
        "250 ns of the typical step of 1.00 µs are exposed: all-gather 130 ns, reduce-scatter "
        "100 ns, other 20 ns."
    )


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"method": Method.HOST_BLOCKING, "stream": Stream.HOST},
            "The largest waits are for the all-gather of layers.0 in forward: 30 ns.",
        ),
        ({}, "Beyond the floor of 30 ns, the largest waits are for the all-gather of layers.1"),
    ],
)
def test_the_largest_waits_include_the_floor_where_collectives_block_the_host(columns, words):
    builder = RunBuilder(world_size=2)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 0, 30, need=0, **columns)
    rank.forward("layers.0", 30, 50)
    rank.all_gather("layers.1", 50, 60, need=50, **columns)
    rank.forward("layers.1", 60, 100)

    summary = measure_summary(builder.build())

    assert words in summary.verdict.why
    assert max(owner.exposed_ns for owner in summary.exposed.owners) == 30


def test_a_run_that_never_waits_beyond_the_floor_names_no_owner():
    builder = RunBuilder(world_size=2)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 0, 30, need=0)
    rank.forward("layers.0", 30, 100)
    assert "largest waits" not in measure_summary(builder.build()).verdict.why


def test_on_a_blocking_backend_the_verdict_says_so():
    run = steady_run()
    blocking = {rank: table.where(table.kind >= 0) for rank, table in run.event_tables.items()}
    for table in blocking.values():
        collective = (table.kind == EventKind.ALL_GATHER) | (table.kind == EventKind.REDUCE_SCATTER)
        table.method[collective] = Method.HOST_BLOCKING
    digest = measure_summary(replace(run, event_tables=blocking))
    assert digest.provenance.blocks_host
    assert "By default, collectives block the host on" in digest.verdict.why


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(RunBuilder().build(), id="nothing recorded"),
        pytest.param(steady_run(num_steps=2, warmup_steps=5), id="only warm-up"),
        pytest.param(RunBuilder(units=()).build(), id="no units"),
    ],
)
def test_a_run_without_a_timed_step_is_digested_with_what_is_there(run):
    digest = measure_summary(run)
    assert digest.verdict.limit is Limit.UNKNOWN
    assert (digest.step_time_ns, digest.exposed_ns, digest.breakdown) == (None, None, None)
    assert len(digest.units) == len(run.manifest.units)


def test_one_rank_alone_communicates_nothing():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).forward("layers.0", 0, 90)
    digest = measure_summary(builder.build())
    assert (digest.communication_ns, digest.exposed_ns, digest.overlap_ratio) == (0, 0, None)
    assert digest.units[0].all_gather.bus_bytes_per_s is None


class DamagedRun(InMemoryRun):
    """A run with a readable summary whose events cannot be read."""

    def events(self, rank, **_):
        raise CorruptFileError(f"events.parquet of rank {rank} is damaged.")


def test_what_needs_a_damaged_file_is_absent_and_said_once():
    digest = measure_summary(DamagedRun(**constructor_arguments(steady_run())))
    assert digest.notes == ("events.parquet of rank 0 is damaged.",)
    assert (digest.exposed, digest.provenance, digest.units) == (None, None, ())
    assert digest.step_time_ns.typical == 1000
    assert digest.verdict.limit is Limit.COMMUNICATION


def constructor_arguments(run):
    return {name: getattr(run, name) for name in InMemoryRun.__dataclass_fields__}


def test_status_and_notes_of_the_run_are_passed_on():
    run = replace(steady_run(), status=RunStatus.CUT_OFF, notes=("Rank 1 stopped.",))
    digest = measure_summary(run)
    assert (digest.status, digest.notes) == ("cut off", ("Rank 1 stopped.",))


def test_the_straggler_of_llama_70b_comes_before_its_communication():
    run = llama_70b_run(4)
    digest, straggler = measure_summary(run), measure_ranks(run).straggler
    assert digest.verdict.limit is Limit.STRAGGLER
    assert digest.verdict.numbers["straggler_rank"] == STRAGGLER
    assert f"costs {format_ratio(straggler.cost_ratio)} of the step" in digest.verdict.sentence
    assert "86.1%" in digest.verdict.why
    assert [one.rank for one in digest.rank_verdicts if one.differs] == [STRAGGLER]


def test_what_contradicts_the_plan_is_in_the_digest_and_leads_the_advice():
    digest = measure_summary(llama_70b_run())
    assert digest.plan_check.is_consistent is False
    assert "layers.79" in digest.verdict.next_steps[0]
    assert measure_summary(steady_run()).plan_check.is_consistent is True


def test_ranks_that_something_else_limits_are_told_apart():
    builder = RunBuilder(world_size=3)
    for rank in range(3):
        builder.rank(rank).step(0, 0, 1000)
        builder.rank(rank).forward("layers.0", 0, 800 if rank == 2 else 1000)
    builder.rank(2).data(800, 1000)
    verdicts = measure_summary(builder.build()).rank_verdicts
    assert [(one.rank, one.limit, one.differs) for one in verdicts] == [
        (0, Limit.COMPUTE, False),
        (1, Limit.COMPUTE, False),
        (2, Limit.INPUT, True),
    ]


def test_an_imported_kernel_trace_is_judged_by_what_it_knows():
    builder = RunBuilder(units=(), source="imported", device_type="cuda")
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.add(EventKind.COMPUTE, 0, 700, stream=Stream.COMPUTE)
    rank.add(EventKind.ALL_GATHER, 600, 750, stream=Stream.OTHER, bytes=64)
    digest = measure_summary(builder.build())
    assert digest.verdict.limit is Limit.HOST
    assert "this time includes waits for the next batch" in digest.verdict.why
    assert digest.exposed_ns == 50
    assert digest.plan_check.is_consistent is None


def test_the_causes_of_the_verdict_are_those_of_its_step():
    run = open_run(SAMPLES / "async-prefetch-2-ranks")
    of_step = measure_breakdown_causes(run)
    causes = ", ".join(
        f"{format_cause(cause)} {format_ns(duration)}"
        for cause, duration in of_step.causes_ns.items()
    )
    verdict = measure_summary(run).verdict
    assert f"By cause: {causes}." in verdict.why
    assert measure_summary(run).exposed.causes_ns == of_step.causes_ns
    assert sum(of_step.causes_ns.values()) == verdict.numbers["exposed_ns"]


@pytest.mark.parametrize(
    ("phase", "advised"),
    [
        pytest.param(Phase.FORWARD, True, id="ZeRO-3"),
        pytest.param(Phase.OPTIMIZER, False, id="ZeRO-1"),
    ],
)
def test_a_trace_without_ranges_is_advised_on_gathers_only_where_a_pass_has_some(phase, advised):
    builder = RunBuilder(units=(), source="imported", device_type="cuda")
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.add(EventKind.COMPUTE, 0, 300, stream=Stream.COMPUTE)
    rank.add(EventKind.ALL_GATHER, 300, 400, phase=phase, stream=Stream.OTHER, bytes=64)
    verdict = measure_summary(builder.build()).verdict
    assert verdict.limit is Limit.HOST
    assert any("Prefetch one unit" in step for step in verdict.next_steps) is advised


def test_data_parallel_alone_is_advised_nothing_about_gathers():
    builder = RunBuilder(units=(), world_size=2)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_reduce(None, 10, 95, need=15)
    verdict = measure_summary(builder.build()).verdict
    assert verdict.limit is Limit.COMMUNICATION
    assert verdict.next_steps == (FIND_CALL.format(" (a norm, a metric)"),)
