"""One number per quantity: every analysis and command shows the same typical step."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.analysis.live.monitor import monitor_run
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.run_list import measure_key_numbers
from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.analysis.step_times import measure_overlap, measure_step_times
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.cli import main
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.store.reader import open_run
from tests.builders import RunBuilder
from tests.cases import examples
from tests.laws.test_run_laws import STEP_NS, STEPS, UNITS, add

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))
FEW_EXAMPLES = settings(max_examples=examples(40), deadline=None)

# Steps of different lengths, enough that the middle half leaves some out.
RANKS = st.lists(
    st.lists(st.tuples(STEPS, st.integers(0, 40)), min_size=1, max_size=9), min_size=1, max_size=3
)


def build(ranks):
    builder = RunBuilder(UNITS, world_size=len(ranks))
    for number, steps in enumerate(ranks):
        rank, begin = builder.rank(number), 0
        for step, (drawn, longer) in enumerate(steps):
            rank.step(step, begin, begin + STEP_NS + longer)
            for event in drawn:
                add(rank, event, begin, 1)
            begin += STEP_NS + longer
    return builder.build()


def typical_by_hand(member, values):
    """The mean of DESIGN section 4, with the steps sorted by time in plain Python."""
    order = sorted(range(len(values)), key=lambda at: (int(member.step_time_ns[at]), at))
    quarter = len(order) // 4
    chosen = sorted(order[quarter : len(order) - quarter])
    if len(chosen) > 96:  # eight blocks of twelve, the first at the start and the last at the end
        starts = [round(block * (len(chosen) - 12) / 7) for block in range(8)]
        chosen = [at for start in starts for at in chosen[start : start + 12]]
    return round(sum(int(values[at]) for at in chosen) / len(chosen))


def check_one_number_per_quantity(run):
    """Assert that all analyses agree on the typical step of the median rank and of each rank."""
    member = timed_ranks(run).median
    summary, breakdown, units = measure_summary(run), measure_breakdown(run), measure_units(run)
    causes, waits, overlap = (
        measure_breakdown_causes(run),
        measure_rank_waits(run).exposed,
        measure_overlap(run),
    )
    headline, row = breakdown.headline, overlap.run
    exposed, ranks, listed = measure_exposed(run), measure_ranks(run), measure_key_numbers(run)
    of_rank = next(one for one in ranks.ranks if one.rank == member.rank)
    assert {one.rank for one in (member, headline, row, exposed, waits, causes.shown, units)} == {
        summary.median_rank
    }

    step_time = typical_by_hand(member, member.step_time_ns)
    step_times = {
        "summary": summary.step_time_ns.typical,
        "summary's breakdown": summary.breakdown.step_time_ns,
        "summary's waits": summary.exposed.step_time_ns,
        "step times": measure_step_times(run).step_time_ns.typical,
        "breakdown": headline.step_time_ns,
        "breakdown with causes": causes.shown.step_time_ns,
        "overlap": row.step_time_ns,
        "exposed": exposed.step_time_ns,
        "waits": waits.step_time_ns,
        "ranks": of_rank.step_time_ns,
        "runs": listed.step_time_ns,
    }
    assert step_times == dict.fromkeys(step_times, step_time)

    exposed_ns = typical_by_hand(member, member.exposed_ns)
    exposed_times = {
        "summary": summary.exposed_ns,
        "summary's breakdown": summary.breakdown.exposed_ns,
        "summary's waits": summary.exposed.exposed_ns,
        "breakdown": headline.exposed_ns,
        "breakdown with causes": causes.shown.exposed_ns,
        "overlap": row.exposed_ns,
        "exposed": exposed.exposed_ns,
        "waits": waits.exposed_ns,
        "ranks": of_rank.exposed_ns,
        "runs": listed.exposed_ns,
    }
    assert exposed_times == dict.fromkeys(exposed_times, exposed_ns)

    communication_ns = typical_by_hand(member, member.communication_ns)
    communication_times = {
        "summary": summary.communication_ns,
        "breakdown": headline.communication_ns,
        "overlap": row.communication_ns,
        "exposed": exposed.communication_ns,
        "waits": waits.communication_ns,
        "ranks": of_rank.communication_ns,
    }
    assert communication_times == dict.fromkeys(communication_times, communication_ns)

    kinds = {
        part.name.removeprefix("exposed_"): part.duration_ns
        for part in headline.parts
        if part.name.startswith("exposed")
    }
    assert kinds == exposed.by_kind_ns == waits.by_kind_ns == summary.exposed.by_kind_ns
    assert causes.causes_ns == waits.causes_ns == summary.exposed.causes_ns
    assert waits.floor_ns == summary.exposed.floor_ns == summary.floor_ns
    assert units.units == summary.units
    assert waits.owners == summary.exposed.owners
    for told in (exposed, waits, summary.exposed):
        assert sum(told.causes_ns.values()) == sum(told.by_kind_ns.values()) == exposed_ns
    check_units(units, waits)

    for split, of_all, of_ranks in zip(breakdown.ranks, overlap.ranks, ranks.ranks, strict=True):
        assert sum(part.duration_ns for part in split.parts) == split.step_time_ns
        assert split.exposed_ns == sum(
            part.duration_ns for part in split.parts if part.name.startswith("exposed")
        )
        for name in ("rank", "step_time_ns", "exposed_ns", "communication_ns"):
            assert getattr(split, name) == getattr(of_all, name) == getattr(of_ranks, name)
    for rank in monitor_run(run, [member.rank]).ranks:
        assert (rank.numbers.step_time_ns, rank.numbers.exposed_ns) == (step_time, exposed_ns)
        assert rank.numbers.communication_ns == communication_ns


def check_units(units, waits):
    """A unit's exposed time is that of its owners' rows; each number is rounded separately."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    for unit in units.units:
        own = [owner for owner in waits.owners if owner.unit == unit.index and owner.kind in kinds]
        assert abs(unit.exposed_ns - sum(owner.exposed_ns for owner in own)) <= (len(own) + 1) / 2
        for kind in kinds:
            rows = [owner for owner in own if owner.kind == kind]
            count = sum(owner.count_per_step for owner in rows)
            assert getattr(unit, kind).count_per_step == pytest.approx(count)


@FEW_EXAMPLES
@given(RANKS)
def test_every_analysis_shows_the_same_typical_step(ranks):
    check_one_number_per_quantity(build(ranks))


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_every_analysis_shows_the_same_typical_step_of_a_sample(folder):
    check_one_number_per_quantity(open_run(folder))


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_a_simulation_shows_the_typical_step_as_the_recorded_one(folder):
    run = open_run(folder)
    assert measure_work(run).step_time_ns == measure_summary(run).step_time_ns.typical


@FEW_EXAMPLES
@given(RANKS)
def test_the_typical_steps_are_the_middle_half_by_step_time(ranks):
    for member in timed_ranks(build(ranks)).members:
        times = np.sort(member.step_time_ns)
        quarter = len(times) // 4
        chosen = np.sort(member.step_time_ns[member.is_typical])
        assert chosen.tolist() == times[quarter : len(times) - quarter].tolist()
        assert member.closest_step in member.typical_steps


@pytest.fixture
def answer(capsys, monkeypatch):
    """The JSON output of a command."""

    def ask(*arguments):
        monkeypatch.setattr("sys.argv", ["fsdp-inspect", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit):
            main()
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.mark.parametrize("folder", SAMPLES, ids=[folder.name for folder in SAMPLES])
def test_every_command_shows_the_same_typical_step_of_a_sample(answer, folder):
    summary, breakdown, exposed, units, ranks = (
        answer(command, folder) for command in ("summary", "breakdown", "exposed", "units", "ranks")
    )
    member = timed_ranks(open_run(folder)).median
    shown, waits = breakdown["shown"], exposed["exposed"]
    row = next(one for one in ranks["ranks"] if one["rank"] == member.rank)
    for name in ("step_time_ns", "exposed_ns", "communication_ns"):
        expected = typical_by_hand(member, getattr(member, name))
        of_summary = summary[name]["typical"] if name == "step_time_ns" else summary[name]
        told = [of_summary, *(one[name] for one in (summary["breakdown"], shown, waits, row))]
        assert told == [expected] * 5
    parts = {part["name"]: part["duration_ns"] for part in shown["parts"]}
    kinds = {name: ns for name, ns in parts.items() if name.startswith("exposed")}
    assert kinds == {f"exposed_{kind}": ns for kind, ns in waits["by_kind_ns"].items()}
    assert sum(parts.values()) == shown["step_time_ns"]
    assert sum(kinds.values()) == shown["exposed_ns"] == sum(waits["causes_ns"].values())
    assert breakdown["causes_ns"] == waits["causes_ns"] == summary["exposed"]["causes_ns"]
    assert units["units"] == summary["units"]
