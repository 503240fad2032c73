"""Test the terminal form of advice: one screen, intervals of gains and of memory."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_inspect.advice.advise import Advice, PlanAdvice
from fsdp_inspect.advice.evidence import Effect, Finding
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.advice.suggestions import Suggestion
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.report.advice import (
    describe_all_changes,
    describe_effect,
    describe_plan_peak,
    describe_recommendation,
    describe_saving,
    describe_searched_plans,
    recommended,
    render_advice,
)
from fsdp_inspect.store.reader import open_run
from tests.builders import MIB

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"
US = 1_000
LONG_NAMES = tuple(
    f"language_model.decoder.transformer.encoder_stack.layers.{at:05d}" for at in range(4)
)
LONG_CODE = "\n".join(
    f"fully_shard([model.get_submodule(name) for name in ['{name}', '{name}']], mesh=mesh)"
    for name in LONG_NAMES
)
STRAGGLER = Finding(
    rule="R32",
    units=(),
    sentence="Rank 1 is a straggler and costs 40.0 ms a step.",
    evidence="Rank 1 arrives last in 90% of the collectives.",
    do=("Find the straggler: fsdp-inspect show RUN ranks.",),
    limits=True,
    effect=Effect(sentence="Saves at most 40.0 ms a step, the whole cost."),
)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise_run(open_run(SAMPLE), AdviceRequest())


@pytest.fixture(scope="module")
def plan(advice: Advice) -> PlanAdvice:
    assert advice.plan is not None
    return replace(advice.plan, replayed_step_ns=128_000 * US)


def read(advice: Advice, *, details: bool = False) -> list[str]:
    """The lines that a terminal of 80 columns shows."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_advice(advice, details=details))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def with_first(advice: Advice, **changes: object) -> Advice:
    """The advice with other fields of its first suggestion."""
    assert advice.plan is not None
    first, *rest = advice.plan.suggestions
    suggestions = (replace(first, **changes), *rest)  # type: ignore[arg-type]
    return replace(advice, plan=replace(advice.plan, suggestions=suggestions))


def test_one_screen_shows_the_change_its_gain_memory_risk_and_code(advice: Advice) -> None:
    lines = read(advice)
    assert len(lines) <= 23
    assert advice.plan is not None
    change, *others = advice.plan.suggestions
    first = lines.index(f"Recommended change (first of {1 + len(others)}) [R6]")
    assert lines[first + 1] == (
        "  Keep parameters unsharded after forward (reshard_after_forward=False)"
    )
    assert [line[:10] for line in lines[first + 2 : first + 6]] == [
        "  Gain    ", "  Memory  ", "  Risk    ", "  Code    ",
    ]  # fmt: skip
    added = format_bytes(change.added_bytes)
    assert f"Saves {format_ns(change.saved_ns)} a step" in lines[first + 2]
    assert f"Peak {format_bytes(change.peak_bytes)} (+{added}; +" in lines[first + 3]
    assert f"The peak rises by {added}." in lines[first + 4]
    assert lines[first + 7] == ("      fully_shard(module, mesh=mesh, reshard_after_forward=False)")
    assert describe_all_changes(advice.plan) in " ".join(lines)
    assert "--details" in lines[-1]


def test_the_interval_of_the_plan_adds_up_those_of_its_changes(plan: PlanAdvice) -> None:
    """The time without a core makes every gain uncertain, and counts once in the sum."""
    busy_ns = measure_trust(open_run(SAMPLE)).busy_ns(plan.replayed_step_ns)
    number = len(plan.suggestions)
    for bound, twice_ns in (
        ("saved_ns", 0),
        ("saved_low_ns", -busy_ns * (number - 1)),
    ):
        parts = sum(getattr(each, bound) for each in plan.suggestions) - twice_ns
        assert getattr(plan.fastest, bound) == pytest.approx(parts, rel=0.05)
    # Together they cannot save more than the exposed time.
    highest = sum(each.saved_high_ns for each in plan.suggestions) - busy_ns * (number - 1)
    assert 0.9 * highest < plan.fastest.saved_high_ns <= 1.01 * highest
    full = " ".join(" ".join(read(Advice("run", "", (), plan, None), details=True)).split())
    low, high = format_ns(plan.fastest.step_low_ns), format_ns(plan.fastest.step_high_ns)
    assert f"a new run takes {low} to {high}, because two runs differ, too." in full
    assert "the time without a core counts once" in full


def test_evidence_and_further_changes_are_details(advice: Advice) -> None:
    assert advice.plan is not None
    short, full = (" ".join(" ".join(read(advice, details=one)).split()) for one in (False, True))
    for suggestion in advice.plan.suggestions[1:]:
        assert suggestion.what not in short
        assert suggestion.what in full
    for line in (*advice.plan.suggestions[0].evidence, *advice.plan.notes):
        assert line not in short
        assert line in full


def test_long_names_and_texts_fit_on_one_screen(advice: Advice) -> None:
    assert advice.plan is not None
    long = with_first(
        advice,
        what=f"Merge {' with '.join(LONG_NAMES)}",
        risks=("The peak rises by 2.94 MiB.", "A risk in many words. " * 20),
        snippet=LONG_CODE,
    )
    lines = read(replace(long, answer="An answer in many words. " * 20))
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert f"Merge {LONG_NAMES[0]}" in text
    assert text.count("…") == 3
    assert "fully_shard([" not in text
    assert "      # advise ... --take 1 --write FILE writes the plan file" in lines
    assert "      fsdp_inspect.apply_plan(model, plan)  # instead of fully_shard" in lines
    assert LONG_NAMES[-1] in "\n".join(read(long, details=True))


def test_code_that_fits_is_shown_with_long_names(advice: Advice) -> None:
    call = LONG_CODE.splitlines()[0]
    lines = read(with_first(advice, snippet=call))
    assert len(lines) <= 23
    at = next(at for at, line in enumerate(lines) if line.startswith("      fully_shard(["))
    shown = "".join(line.strip() for line in lines[at : at + 5]).replace(" ", "")
    assert shown.startswith(call.replace(" ", ""))


def test_a_finding_that_limits_the_step_comes_before_the_plan(advice: Advice) -> None:
    limited = replace(advice, findings=(STRAGGLER,), answer=STRAGGLER.sentence)
    lines = read(limited)
    assert len(lines) <= 23
    assert lines[:5] == [
        "Rank 1 is a straggler and costs 40.0 ms a step.",
        "",
        "Recommended fix [R32]",
        "  Find the straggler: fsdp-inspect show RUN ranks.",
        "  Gain  Saves at most 40.0 ms a step, the whole cost.",
    ]
    assert not any(line.startswith(("  Memory", "  Risk", "  Code")) for line in lines)
    text = "\n".join(lines)
    assert "Recommended change" not in text
    assert "All changes" not in text
    assert "--write" not in text


def test_no_text_is_cut_while_the_screen_has_room(advice: Advice) -> None:
    long = replace(STRAGGLER, do=("Find the straggler, and compare its input. " * 10,))
    found = replace(advice, findings=(long,), answer=long.sentence, plan=None, refusal="No. " * 90)
    lines = read(found)
    assert len(lines) <= 23
    assert "…" not in "".join(lines)
    assert " ".join(" ".join(lines).split()).count("compare its input") == 10


def test_a_limit_of_memory_has_its_plan_beside_a_finding(advice: Advice) -> None:
    assert advice.plan is not None
    plan = replace(advice.plan, memory_limit_bytes=20 * MIB)
    limited = replace(advice, findings=(STRAGGLER,), answer=STRAGGLER.sentence, plan=plan)
    text = " ".join(read(limited))
    effect = describe_effect(plan.fastest, plan)
    assert f"Plan that fits into 20.0 MiB: {effect}. {plan.fastest.what}." in text
    assert "--write FILE saves the plan." in text


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize(
    ("fits", "limit", "above"),
    [
        (False, 20 * MIB, "No simulated plan fits into 20.0 MiB."),
        (True, 20 * MIB, "The recorded plan exceeds 20.0 MiB."),
        (True, None, ""),
    ],
)
def test_a_limit_of_memory_is_answered_below_a_finding(
    advice: Advice, fits: bool, limit: int | None, above: str, details: bool
) -> None:
    assert advice.plan is not None
    plan = replace(advice.plan, memory_limit_bytes=limit, fits=fits)
    limited = replace(advice, findings=(STRAGGLER,), answer=STRAGGLER.sentence, plan=plan)
    lines = read(limited, details=details)
    assert lines[1] == above


def test_the_only_change_that_fits_the_limit_is_shown(advice: Advice) -> None:
    """It costs time, so no gain recommends it."""
    assert advice.plan is not None
    only = replace(advice.plan.suggestions[0], saved_low_ns=-1, peak_bytes=20 * MIB)
    plan = replace(
        advice.plan,
        suggestions=(only,),
        replayed_peak_bytes=22 * MIB,
        memory_limit_bytes=21 * MIB,
    )
    lines = read(replace(advice, plan=plan))
    assert "Recommended plan" in lines
    assert f"  {plan.fastest.what[:40]}" in "\n".join(lines)


def test_other_findings_are_counted_on_one_screen(advice: Advice) -> None:
    minor = replace(STRAGGLER, limits=False)
    for findings, words in (
        ((minor,), "1 further finding."),
        ((STRAGGLER, minor), "1 further finding."),
        ((minor, minor), "2 further findings."),
    ):
        assert words in "\n".join(read(replace(advice, findings=findings))[-2:])
    assert "further" not in "\n".join(read(replace(advice, findings=(STRAGGLER,))))


def test_a_finding_that_costs_more_than_the_recommended_change_saves_is_told(
    advice: Advice,
) -> None:
    assert advice.plan is not None
    saved_ns = advice.plan.suggestions[0].saved_ns
    for cost_ns, is_told in ((2 * saved_ns, True), (saved_ns // 2, False)):
        effect = Effect(sentence="Saves at most this.", saved_low_ns=0, saved_high_ns=cost_ns)
        minor = replace(STRAGGLER, limits=False, effect=effect)
        text = "\n".join(read(replace(advice, findings=(minor,))))
        assert (f"Also: {minor.sentence}"[:60] in text) == is_told
        assert ("1 further finding." in text) != is_told


def test_a_run_without_a_simulation_shows_its_reason(advice: Advice) -> None:
    reason = "The run has no observed plan."
    lines = read(replace(advice, plan=None, refusal=reason))
    assert f"No plan is offered. {reason}" in lines
    assert "--write" not in "\n".join(lines)


def test_a_change_that_exceeds_the_limit_alone_is_shown_as_a_whole_plan(advice: Advice) -> None:
    assert advice.plan is not None
    plan = replace(advice.plan, memory_limit_bytes=20 * MIB)
    lines = read(replace(advice, plan=plan))
    assert "Recommended plan" in lines
    assert "      # advise ... --write FILE writes the plan file" in lines
    assert "Plan with the lowest peak" in read(replace(advice, plan=replace(plan, fits=False)))


@pytest.fixture(scope="module")
def suggestion(plan: PlanAdvice) -> Suggestion:
    return plan.suggestions[0]


@pytest.mark.parametrize(
    ("saved", "low", "high", "words"),
    [
        pytest.param(
            4_100,
            2_000,
            5_000,
            "saves 4.10 ms a step (3.2%; interval 2.00 ms to 5.00 ms)",
            id="saves",
        ),
        pytest.param(
            -4_100,
            -5_000,
            -2_000,
            "costs 4.10 ms a step (3.2%; interval 2.00 ms to 5.00 ms)",
            id="costs",
        ),
        pytest.param(
            4_100,
            -100,
            5_000,
            "may save up to 5.00 ms a step or cost up to 100 µs (simulated gain: 4.10 ms, 3.2%)",
            id="may cost",
        ),
    ],
)
def test_a_saving_and_a_cost_have_their_interval(
    plan: PlanAdvice, suggestion: Suggestion, saved: int, low: int, high: int, words: str
) -> None:
    changed = replace(
        suggestion, saved_ns=saved * US, saved_low_ns=low * US, saved_high_ns=high * US
    )
    assert describe_saving(changed, plan) == words


@pytest.mark.parametrize(
    ("peak", "added", "low", "high", "words"),
    [
        pytest.param(28, 2, 1, 3, "28.0 MiB (+2.00 MiB; +1.00 MiB to +3.00 MiB)", id="more"),
        pytest.param(28, -2, -3, 1, "28.0 MiB (-2.00 MiB; -3.00 MiB to +1.00 MiB)", id="less"),
        pytest.param(28, 2, 2, 2, "28.0 MiB (+2.00 MiB)", id="exact"),
        pytest.param(28, 0, -1, 1, "28.0 MiB as before", id="nothing"),
    ],
)
def test_the_memory_of_a_change_has_its_interval(
    suggestion: Suggestion, peak: int, added: int, low: int, high: int, words: str
) -> None:
    changed = replace(
        suggestion,
        peak_bytes=peak * MIB,
        added_bytes=added * MIB,
        added_low_bytes=low * MIB,
        added_high_bytes=high * MIB,
    )
    assert describe_plan_peak(changed) == words


def test_memory_that_nobody_measured_is_not_known(suggestion: Suggestion) -> None:
    assert describe_plan_peak(replace(suggestion, peak_bytes=None, added_bytes=None)) == "unknown"


@pytest.mark.parametrize(
    ("saved", "change"),
    [
        pytest.param(12_800, "(simulated gain: 12.8 ms, 10%)", id="faster"),
        pytest.param(-1, "(simulated gain: -1.00 µs, 0.0%)", id="hardly slower"),
    ],
)
def test_an_alternative_says_its_memory_and_its_step(
    plan: PlanAdvice, saved: int, change: str
) -> None:
    smallest = replace(
        plan.fastest,
        saved_ns=saved * US,
        saved_low_ns=-5_000 * US,
        saved_high_ns=20_000 * US,
        step_ns=115_200 * US,
        peak_bytes=26 * MIB,
        added_bytes=-2 * MIB,
        peak_low_bytes=25 * MIB,
        peak_high_bytes=27 * MIB,
    )
    words = describe_effect(smallest, plan)
    assert words.startswith("may save up to 20.0 ms a step or cost up to 5.00 ms")
    assert change in words
    assert words.endswith(": 115 ms; peak 26.0 MiB (-2.00 MiB; 25.0 MiB to 27.0 MiB)")


def test_a_replay_that_is_all_but_right_has_no_sign(plan: PlanAdvice) -> None:
    assert "its simulation has an error of 0.0%" in describe_searched_plans(
        replace(plan, replay_error=-0.00001)
    )


def test_a_finding_about_something_else_is_called_another_finding(advice):
    other = replace(STRAGGLER, limits=False)
    refused = replace(advice, plan=None, refusal="No size helps. See What-if.", findings=(other,))
    line = describe_recommendation(refused)
    assert line == f"No size helps. Another finding: {other.do[0]} {other.effect.sentence}"
    urgent = describe_recommendation(replace(refused, findings=(STRAGGLER,)))
    assert urgent == f"{STRAGGLER.do[0]} {STRAGGLER.effect.sentence}"


def test_changes_that_may_cost_time_are_listed_although_none_is_recommended(advice: Advice) -> None:
    assert advice.plan is not None
    doubtful = tuple(replace(each, saved_low_ns=-1000) for each in advice.plan.suggestions)
    found = replace(advice, plan=replace(advice.plan, suggestions=doubtful), findings=())
    assert recommended(found) == (None, None)
    text = " ".join(read(found))
    for place, each in enumerate(doubtful, 1):
        assert f"{place}. {each.what}: may save up to" in text


def test_of_several_findings_the_one_that_may_save_most_is_recommended(advice: Advice) -> None:
    less, more = (
        Finding(
            "", (), f"{saved}.", "", ("Do it.",), effect=Effect(sentence="", saved_high_ns=saved)
        )
        for saved in (5, 9)
    )
    assert recommended(replace(advice, plan=None, findings=(less, more))) == (more, None)
