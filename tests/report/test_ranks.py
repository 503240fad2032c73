"""The straggler is stated as an answer, and all output fits 80 columns."""

from dataclasses import replace

import pytest

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.report.ranks_wording import describe_answer, render_ranks
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
        "Rank 4 is a straggler and costs 4.77 s a step. It arrives last at 86.1% of "
        "the collectives, "
    )
    assert "Its backward takes 3.86 s longer per step than on other ranks." in text
    assert "The cost is 35.3% of the step." in text
    assert "as long as rank 3, steps 0 to 3 would take 8.75 s a step instead of 13.5 s" in text
    assert "The replay differs from the recorded steps by 0" in text
    assert "The error of the replay with changed work is unknown." in text


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
    assert "Typical step of rank 4" in text
    assert "reduce-scatter" not in text


def test_no_straggler_is_said_with_what_lateness_costs():
    text = shown(build_run(*[(160, 100), (100, 160)] * 2))
    assert text.startswith("No rank is a straggler.")
    assert "Unequal work costs" in text


def test_the_cost_of_unequal_work_is_that_of_the_recorded_ranks():
    run = build_run(*[(160, 100), (100, 160)] * 2)
    run = replace(run, manifest=run.manifest.model_copy(update={"world_size": 3}))
    assert "Unequal work of the recorded ranks costs" in shown(run)


def test_what_cannot_be_told_is_said_and_never_called_a_straggler():
    text = shown(build_run((100, 160)))
    assert text.startswith("It is unknown whether there is a straggler: rank 1 works longest in 1")
    assert "is a straggler and" not in text


def test_a_refused_clock_is_noted_and_who_waits_least_is_told():
    text = shown(build_run(*[(100, 160)] * 3, hosts=["a", "b"]))
    assert "Rank 1 waits least: 100% of the collectives are shortest on this rank" in text
    assert "note: The clock of rank 1 cannot be aligned:" in text


def test_two_ranks_have_no_median_and_slow_data_is_no_late_backward():
    ranks = measure_ranks(build_run(*[(100, 160)] * 6))
    assert ranks.straggler is not None
    answer = " ".join(describe_answer(ranks))
    assert "60 ns after the other rank" in answer
    assert "median" not in answer
    waits = replace(
        ranks.straggler, phase="backward", meanwhile="data", meanwhile_ns=ranks.straggler.cost_ns
    )
    answer = " ".join(describe_answer(replace(ranks, straggler=waits)))
    assert "Its data takes" in answer
    assert "backward" not in answer


def test_of_many_ranks_the_extremes_are_listed():
    text = shown(build_run(*[tuple(range(100, 140))] * 2))
    assert "The 8 ranks with the most work and the 8 with the least, of 40" in text


def test_runs_without_anything_to_compare_say_so():
    assert shown(RunBuilder().build()).startswith("Ranks cannot be compared: the run has no timed")
    assert shown(steady_run(world_size=1)).startswith(
        "Ranks cannot be compared: the run folder has"
    )
    assert shown(steady_run()).startswith("It is unknown whether there is a straggler")


@pytest.mark.parametrize(
    ("every", "chance"),
    [
        (2, ""),
        (
            10,
            " Among 2 equal ranks, one rank has all of these steps by chance in 50% of runs.",
        ),
    ],
)
def test_work_that_always_the_same_rank_has_in_a_few_steps_is_said(every, chance):
    works = [(220, 100) if step % every == 0 else (100, 101 + step % 3) for step in range(20)]
    lines = describe_answer(measure_ranks(build_run(*works)))
    number = 20 // every
    shown = "0, 10" if number == 2 else "0, 2, 4, 6, 8, 10 and 4 more"
    assert lines[2] == (
        f"Rank 0 works much longer than the other rank in {number} of 20 timed steps, by 120 ns "
        f"each (median): {6 * number} ns in the mean step. Most of it lies in the part data. "
        f"Steps: {shown}.{chance}"
    )
    assert "although" not in lines[3]
    assert f"steps are among those {number}." in lines[3]


def test_the_verdict_and_the_advice_name_a_rank_that_works_longer_in_some_steps():
    run = build_run(*[(220, 100) if step % 3 == 0 else (100, 101 + step % 3) for step in range(21)])
    verdict = measure_summary(run).verdict
    said = (verdict.sentence, *verdict.next_steps)
    assert any("Rank 0 works 120 ns longer in 7 of 21 steps." in each for each in said)
    assert (verdict.numbers["rare_work_rank"], verdict.numbers["rare_work_ns"]) == (0, 40)
    found = [each for each in advise_run(run, AdviceRequest()).findings if each.rule == "R32"]
    assert [each.sentence.partition(" works")[0] for each in found] == ["Rank 0"]


def test_longer_work_for_which_nobody_waits_is_no_limit():
    """The ranks exchange something in two of 21 steps only, as in local SGD."""
    builder = RunBuilder(("layers.0",), world_size=2)
    for number in range(2):
        rank, at = builder.rank(number), 0
        for step in range(21):
            end = at + (200 if number == 0 and step % 3 == 0 else 100)
            rank.step(step, at, end)
            rank.forward("layers.0", at, end)
            if step in (10, 20):
                rank.all_gather("layers.0", at, at + 10, need=at)
            at = end
    run = builder.build()
    assert measure_ranks(run).rare_work.rank == 0
    assert measure_summary(run).verdict.numbers["rare_work_ns"] is None


def test_the_rank_with_the_longest_work_changes_only_where_it_does():
    stalls = [(220, 100) if step == 3 else (100, 101 + step % 3) for step in range(20)]
    stalls[12] = (100, 220)
    lines = describe_answer(measure_ranks(build_run(*[(160, 100), (100, 160)] * 4)))
    assert "a straggler: the rank with the longest work changes." in lines[2]
    lines = describe_answer(measure_ranks(build_run(*[(100, 101)] * 20)))
    assert "a straggler: no rank alone is known to cost 2% or more." in lines[2]
    assert "much longer" not in " ".join(describe_answer(measure_ranks(build_run(*stalls))))
