"""Does the straggler read as an answer, and does everything fit 80 columns?"""

import pytest

from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.report.ranks import render_ranks
from tests.analysis.stragglers.test_ranks import build_run
from tests.builders import RunBuilder, steady_run
from tests.llama70b import llama_70b_run
from tests.report import terminal_text as rendering


def shown(run, **options):
    return " ".join(rendering.text_of(render_ranks(measure_ranks(run), **options)).split())


@pytest.fixture(scope="module")
def llama():
    return llama_70b_run(4)


def test_the_straggler_is_the_first_line(llama):
    text = shown(llama)
    assert text.startswith(
        "Rank 4 (mi300-node) is a straggler: it arrives last at 86.1% of the collectives, and "
        "costs 4.77 s of each step (35.3%)."
    )
    assert "Meanwhile: its backward takes 3.86 s longer per step than the others'." in text
    assert (
        "regularly works longer than rank 3, steps 0-3 take 8.75 s a step instead of 13.5 s" in text
    )
    assert "gives the steps that it was read from to within 0%" in text
    assert "error" not in text


def test_the_tables_show_skew_beside_the_transfer(llama):
    text = shown(llama)
    assert "reduce-scatter 3.19 GiB 8 320 60.2 ms 60.2 ms 11.7 ms 257 GB/s" in text
    assert "The ranks share one clock." in text


def test_no_line_is_wider_than_80_columns(llama):
    lines = rendering.text_of(render_ranks(measure_ranks(llama))).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert not any("…" in line for line in lines)


def test_one_rank_can_be_shown_alone(llama):
    text = shown(llama, rank=4)
    assert "Rank 4 (typical step)" in text
    assert "reduce-scatter" not in text


def test_no_straggler_is_said_with_what_lateness_costs():
    text = shown(build_run(*[(160, 100), (100, 160)] * 2))
    assert text.startswith("No straggler: no rank works longest in three quarters of the steps")
    assert "All lateness together costs" in text


def test_what_cannot_be_told_is_said_and_never_called_a_straggler():
    text = shown(build_run((100, 160)))
    assert text.startswith("Whether there is a straggler cannot be told: rank 1 works longest in 1")
    assert "is a straggler:" not in text


def test_a_refused_clock_is_noted_and_who_waits_least_is_told():
    text = shown(build_run(*[(100, 160)] * 3, hosts=["a", "b"]))
    assert "Rank 1 waits least: 100% of the collectives are shortest on it" in text
    assert "note: The clock of rank 1 cannot be aligned:" in text


def test_of_many_ranks_the_extremes_are_listed():
    text = shown(build_run(*[tuple(range(100, 140))] * 2))
    assert "The 8 of 40 ranks that work longest, and the 8 that work least" in text


def test_runs_without_anything_to_compare_say_so():
    assert shown(RunBuilder().build()).startswith("No step counts yet")
    assert shown(steady_run(world_size=1)).startswith("Only one rank is in this run folder")
    assert shown(steady_run()).startswith("Whether there is a straggler is not known")
