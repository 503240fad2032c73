from dataclasses import replace

import pytest

from fsdp_inspect.analysis.lifetime import measure_lifetime
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.errors import IncompleteRunError, MissingDataError
from fsdp_inspect.report.html.page import read_contents, render_run
from fsdp_inspect.report.wording import describe_run
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from fsdp_inspect.trace.correctness import ParameterSeen, TrainingSeen, UpdateSeen
from fsdp_inspect.trace.run import ClockPair, HostMemoryMark, ProcessLife, RunStatus, TimeSpan
from fsdp_inspect.trace.tables import DeviceTable
from tests.boxes import make_box
from tests.builders import InMemoryRun, RunBuilder

SAVE = int(EventFlag.CHECKPOINT)


def attempt(
    number: int = 0,
    *,
    starts_at: int = 0,
    status: RunStatus = RunStatus.COMPLETE,
    loads: bool = False,
    saves: int | None = None,
    ends: int = 130,
    flags: int = SAVE,
    **run: object,
) -> InMemoryRun:
    """An attempt of four steps; its clock reads 0 at the wall time `starts_at`.

    0      10     20    30       50          70   80   90  100  110     130
    start  build  shard build    first step  step step step ..  step    end
                    load 35-40                      evaluation 90-100
    """
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    life = ProcessLife(
        started_ns=0,
        imported_ns=10,
        shard=TimeSpan(start_ns=20, end_ns=30),
        loads=[TimeSpan(start_ns=35, end_ns=40)] if loads else [],
    )
    for step, (start, end) in enumerate([(50, 70), (70, 80), (80, 90), (90, 110)]):
        rank.step(step, start, end)
    rank.add(EventKind.DATA, 70, 73, phase=Phase.DATA, step=1)
    rank.add(EventKind.BETWEEN_STEPS, 90, 100, phase=Phase.EVALUATION)
    if saves is not None:
        rank.add(EventKind.BETWEEN_STEPS, saves, saves + 5, phase=Phase.EVALUATION, flags=flags)
    rank.record = {
        "attempt": number,
        "life": life,
        "status": status,
        "clock_start": ClockPair(monotonic_ns=45, unix_ns=starts_at + 45, uncertainty_ns=0),
        "clock_end": ClockPair(monotonic_ns=ends, unix_ns=starts_at + ends, uncertainty_ns=0),
    }
    return builder.build(**run)


def durations(run: InMemoryRun) -> dict[str, int]:
    lifetime = measure_lifetime(run)
    assert sum(phase.duration_ns for phase in lifetime.phases) == lifetime.wall_ns
    return {phase.phase: phase.duration_ns for phase in lifetime.phases}


def test_the_wall_time_of_one_attempt_is_split_into_phases():
    assert durations(attempt(loads=True)) == {
        "start": 10,
        "build": 25,
        "load": 5,
        "shard": 10,
        "first step": 20,
        "training": 30,
        "evaluation": 10,
        "end": 20,
    }


def test_goodput_is_the_training_over_the_wall_time():
    lifetime = measure_lifetime(attempt())
    assert lifetime.wall_ns == 130
    assert lifetime.goodput_ratio == 30 / 130
    assert (lifetime.num_steps, lifetime.num_lost_steps, lifetime.notes) == (4, 0, ())


def test_exposed_communication_and_data_are_parts_of_the_training():
    parts = {part.phase: part.duration_ns for part in measure_lifetime(attempt()).training_parts}
    assert parts == {"exposed": 0, "data": 3, "host-bound": 0}


def test_waits_of_detailed_steps_stand_for_plain_ones():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step in range(5):
        is_plain = step in (2, 3)
        rank.step(step, 100 * step, 100 * step + 100, is_plain=is_plain)
        if not is_plain:
            rank.all_gather("layers.0", 100 * step, 100 * step + 10, need=100 * step)
        rank.add(EventKind.DATA, 100 * step + 90, 100 * step + 95, phase=Phase.DATA, step=step)
    found = measure_lifetime(builder.build())
    parts = {part.phase: part.duration_ns for part in found.training_parts}
    assert parts == {"exposed": 40, "data": 20, "host-bound": 0}
    [note] = found.notes[-1:]
    assert "The waits of 2 of 4 steps are recorded" in note


def test_a_saved_checkpoint_is_no_training():
    found = durations(attempt(saves=80))
    assert (found["checkpoint"], found["training"]) == (5, 25)


def test_steps_before_the_checkpoint_that_the_next_attempt_loads_count():
    failed = attempt(status=RunStatus.FAILED, saves=80, ends=120)
    run = attempt(1, starts_at=1000, loads=True, earlier_attempts=[failed])
    found = durations(run)
    # Step 1 of attempt 0 counts; steps 2 and 3 and the next 10 ns are lost.
    assert found["restart"] == 1000 - 120
    assert found["lost"] == 5 + 10 + 10
    assert found["training"] == 10 + 30
    lifetime = measure_lifetime(run)
    assert (lifetime.num_attempts, lifetime.num_steps, lifetime.num_lost_steps) == (2, 8, 2)
    assert lifetime.restarts == "8 completed steps in 2 attempts, 2 lost at a restart"
    assert measure_lifetime(failed).restarts is None
    assert describe_run(measure_summary(run)).endswith(f" · {lifetime.restarts}")
    assert lifetime.restarts in render_run(read_contents(run))
    assert lifetime.notes == (
        "2 of 4 steps of attempt 0 are lost: attempt 1 loaded a checkpoint saved before them.",
    )


@pytest.mark.parametrize(
    ("loads", "saves", "flags", "why"),
    [
        pytest.param(True, None, SAVE, "the recorder saw no complete checkpoint of it", id="save"),
        pytest.param(
            True,
            80,
            SAVE | int(EventFlag.ASYNC),
            "the recorder saw no complete checkpoint of it",
            id="not written yet",
        ),
        pytest.param(
            False, 80, SAVE, "the recorder saw attempt 1 load no checkpoint", id="no load"
        ),
    ],
)
def test_without_a_checkpoint_all_steps_of_an_earlier_attempt_are_lost(loads, saves, flags, why):
    first = attempt(saves=saves, flags=flags)
    run = attempt(1, starts_at=1000, loads=loads, earlier_attempts=[first])
    lifetime = measure_lifetime(run)
    assert lifetime.notes == (f"4 of 4 steps of attempt 0 are lost: {why}.",)
    assert lifetime.duration_ns("training") == 30


@pytest.mark.parametrize(("digest", "num_lost"), [(7, 4), (8, 2)])
def test_an_attempt_with_other_first_parameters_may_have_loaded_a_checkpoint(digest, num_lost):
    first, second = (
        begun_with(value, attempt(number, starts_at=1000 * number, saves=None if number else 80))
        for number, value in enumerate((7, digest))
    )
    lifetime = measure_lifetime(replace(second, earlier_attempts=[first]))
    assert lifetime.num_lost_steps == num_lost
    why = (
        ": the recorder saw attempt 1 load no checkpoint."
        if digest == 7
        else ", if attempt 1 loaded the last checkpoint: its parameters are not the first ones, "
        "but the recorder saw it load none."
    )
    assert lifetime.notes == (f"{num_lost} of 4 steps of attempt 0 are lost{why}",)


def begun_with(digest: int, run: InMemoryRun) -> InMemoryRun:
    """The same attempt, whose first sampled parameter has a digest."""
    update = UpdateSeen(
        step=0, rate=1e-3, factor=None, gradients=[1.0], values=[1.0], digests=[digest],
        num_meant=1, num_lost=0,
    )  # fmt: skip
    part = ParameterSeen(name="w", unit=0, part=[], is_replica=False, dtype="float32")
    seen = TrainingSeen(parameters=[part], updates=[update])
    (record,) = run.ranks
    return replace(run, ranks=[record.model_copy(update={"training": seen})])


def test_a_checkpoint_written_in_the_background_counts_when_it_is_complete():
    first = attempt(saves=80, flags=SAVE | int(EventFlag.ASYNC))
    (record,) = first.ranks
    life = record.life.model_copy(update={"background_saves": [TimeSpan(start_ns=80, end_ns=105)]})
    first = attempt_with(first, life)
    run = attempt(1, starts_at=1000, loads=True, earlier_attempts=[first])
    lifetime = measure_lifetime(run)
    assert lifetime.num_lost_steps == 2
    assert lifetime.background_checkpoint_ns == 25 - 5


def attempt_with(run: InMemoryRun, life: ProcessLife) -> InMemoryRun:
    """The same attempt of another process."""
    (record,) = run.ranks
    events = {0: run.events(0)}
    return InMemoryRun(run.manifest, [record.model_copy(update={"life": life})], events)


def test_attempts_of_one_process_do_not_overlap():
    first = attempt(ends=130)
    second = attempt(1, starts_at=0, ends=150, earlier_attempts=[first])
    found = durations(second)
    assert sum(found.values()) == 150


def test_the_current_step_of_a_live_run_is_other():
    assert durations(attempt(status=RunStatus.RUNNING))["other"] == 20


def test_memory_belongs_to_the_phase_of_its_sample():
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [
        {**row, "time_ns": 75, "process_rss": 300, "host_memory_used": 900},
        {**row, "time_ns": 95, "process_rss": 400, "host_memory_used": 800},
    ]
    run = attempt(device_tables={0: DeviceTable.from_rows(samples)})
    peaks = {
        phase.phase: (phase.process_peak_bytes, phase.host_peak_bytes)
        for phase in measure_lifetime(run).phases
    }
    assert peaks["training"] == (300, 900)
    assert peaks["evaluation"] == (400, 800)
    assert peaks["end"] == (None, None)


def test_a_rise_of_the_high_water_mark_belongs_to_the_phase_in_which_it_rose():
    run = attempt()
    marks = [
        HostMemoryMark(time_ns=time, rss_bytes=rss, high_water_bytes=high)
        for time, rss, high in [(10, 50, 60), (20, 55, 60), (30, 70, 500), (45, 80, 500)]
    ]
    life = run.ranks[0].life.model_copy(update={"memory_marks": marks})
    lifetime = measure_lifetime(attempt_with(run, life))
    peaks = {phase.phase: phase.process_peak_bytes for phase in lifetime.phases}
    assert (peaks["start"], peaks["shard"], peaks["build"]) == (60, 500, 80)


def test_a_run_without_the_life_of_its_process_begins_with_the_recording():
    lifetime = measure_lifetime(attempt_with(attempt(), None))
    assert lifetime.wall_ns == 130 - 45
    assert "start of the process of attempt 0 is unknown" in lifetime.notes[0]


def test_an_import_has_no_lifetime():
    builder = RunBuilder(world_size=1, source="imported")
    builder.rank(0).step(0, 0, 1)
    with pytest.raises(MissingDataError, match="imported"):
        measure_lifetime(builder.build())


def test_a_missing_rank_is_refused_with_those_that_exist():
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        measure_lifetime(attempt(), rank=7)


def killed(number: int, other: InMemoryRun | None, **run: object) -> InMemoryRun:
    """An attempt whose rank 0 was killed in step 4, with the rows of step 0; `other` is rank 1."""
    whole = attempt(number, **run)
    (record,) = whole.ranks
    ranks = [record.model_copy(update={"status": RunStatus.CUT_OFF, "clock_end": None})]
    rows = whole.events(0)
    tables = {0: rows.where(rows.end_ns <= 70)}
    if other is not None:
        ranks.append(other.ranks[0].model_copy(update={"rank": 1, "num_steps": 4}))
        tables[1] = other.events(0)
    boxes = {0: make_box([], (0, 1), step=4, sign_unix_ns=run.get("starts_at", 0) + 112)}
    return replace(whole, ranks=ranks, event_tables=tables, black_boxes=boxes)


def test_steps_whose_rows_a_killed_rank_lost_are_those_of_another_rank():
    first = killed(0, attempt(status=RunStatus.FAILED, ends=120), saves=50)
    lifetime = measure_lifetime(attempt(1, starts_at=1000, loads=True, earlier_attempts=[first]))
    assert (lifetime.num_steps, lifetime.num_lost_steps, lifetime.is_whole) == (8, 4, True)
    assert lifetime.notes[0] == (
        "Attempt 0 is measured on rank 1. Rank 0 completed 4 steps of attempt 0, but has rows of "
        "1: a killed process loses its last ones."
    )


@pytest.mark.parametrize("rank", [None, 0])
def test_steps_whose_rows_are_lost_on_all_ranks_make_the_numbers_those_of_the_record(rank):
    other = None if rank is None else attempt(status=RunStatus.FAILED)
    lifetime = measure_lifetime(killed(0, other), rank=rank)
    assert (lifetime.num_steps, lifetime.is_whole) == (1, False)
    assert lifetime.goodput_basis == "of 112 ns, as far as recorded"
    assert lifetime.notes == (
        "Rank 0 completed 4 steps of attempt 0, but has rows of 1: a killed process loses its last "
        "ones. A checkpoint saved in the missing steps is unknown.",
    )


def test_checkpoints_that_the_lowest_rank_saved_count_for_the_others():
    first = attempt(saves=80)
    ranks = [first.ranks[0], first.ranks[0].model_copy(update={"rank": 1})]
    tables = {0: first.events(0), 1: attempt().events(0)}
    first = replace(first, ranks=ranks, event_tables=tables)
    second = attempt(1, starts_at=1000, loads=True)
    second = replace(
        second,
        ranks=[second.ranks[0].model_copy(update={"rank": 1})],
        event_tables={1: second.events(0)},
        earlier_attempts=[first],
    )
    assert measure_lifetime(second, rank=1).num_lost_steps == 2


def test_steps_lost_in_several_attempts_are_lost_at_restarts():
    earlier = [attempt(number, starts_at=1000 * number) for number in range(2)]
    found = measure_lifetime(attempt(2, starts_at=2000, earlier_attempts=earlier))
    assert found.restarts == "12 completed steps in 3 attempts, 8 lost at restarts"


def test_a_missing_attempt_is_named_and_counted():
    run = attempt(2, starts_at=1000, loads=True, earlier_attempts=[attempt(saves=80)])
    lifetime = measure_lifetime(run)
    assert (lifetime.num_attempts, lifetime.num_steps, lifetime.is_whole) == (3, 8, False)
    assert lifetime.restarts == (
        "at least 8 completed steps in 3 attempts, 2 known to be lost at restarts"
    )
    assert lifetime.notes[0] == (
        "The data of attempt 1 are missing: its steps are not counted, and its time is a restart."
    )


def test_the_wall_time_begins_after_attempts_that_are_missing_before_the_first_one():
    notes = measure_lifetime(attempt(2)).notes
    assert notes == (
        "The data of attempts 0-1 are missing: their steps are not counted, and the wall time "
        "begins with attempt 2.",
    )
    assert "restart" not in durations(attempt(2))
    both = measure_lifetime(attempt(4, starts_at=1000, earlier_attempts=[attempt(1)])).notes[:2]
    assert [note.partition(" are")[0] for note in both] == [
        "The data of attempt 0",
        "The data of attempts 2-3",
    ]
    assert both[1].endswith("their steps are not counted, and their time is a restart.")


def test_an_attempt_without_the_lowest_rank_is_that_of_another_one():
    first = attempt(status=RunStatus.FAILED, saves=80)
    (record,) = first.ranks
    first = replace(
        first,
        ranks=[record.model_copy(update={"rank": 1})],
        event_tables={1: first.events(0)},
    )
    lifetime = measure_lifetime(attempt(1, starts_at=1000, loads=True, earlier_attempts=[first]))
    assert (lifetime.num_attempts, lifetime.num_steps, lifetime.num_lost_steps) == (2, 8, 2)
    assert lifetime.notes[0] == (
        "Attempt 0 is measured on rank 1. The attempt has no data of rank 0."
    )
