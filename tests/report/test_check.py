"""A verdict has the same text in every format, with any names in it."""

from dataclasses import replace
from xml.etree import ElementTree

from fsdp_inspect.comparison.gate.check import CheckOutcome, CheckResult, MetricCheck
from fsdp_inspect.comparison.increases import AllocatingLine, Increase
from fsdp_inspect.comparison.settings import SettingDifference
from fsdp_inspect.report.check import (
    describe_outcome,
    render_annotations,
    render_check,
    render_junit,
    render_markdown,
)
from tests.report.terminal_text import text_of

MS = 1_000_000
HOSTILE = "<b>|a|</b> `x` [y](http://evil.example) &lt; $z$ 100%\n::error::no\x1b[31m\u202e"

MEMORY = CheckResult(
    outcome=CheckOutcome.REGRESSION,
    exit_code=1,
    name="Decoder",
    run_ids=("before", "after"),
    source="recorded",
    method="storage_tracker",
    metrics=(
        MetricCheck(
            "peak_allocated_bytes", CheckOutcome.REGRESSION, 1024, 3072, 1024, "to the byte", ""
        ),
        MetricCheck("resting_bytes", CheckOutcome.PASSES, 512, 512, 512, "to the byte", ""),
    ),
    growth=(Increase("activation", ("layers.3",), 0, 2048),),
    longer=(),
    phase="backward",
    unit="layers.4",
    causes=("activations of layers.3 stay allocated",),
    lines=(AllocatingLine("activation", ("layers.3",), "model.py:33", 2048, 2, True),),
    settings=(SettingDifference("config", "batch_size", "", (1, 2)),),
    reasons=(),
    improved=(),
    others=(),
)
TIMES = replace(
    MEMORY,
    metrics=(
        MetricCheck(
            "step_time_ns",
            CheckOutcome.REGRESSION,
            100 * MS,
            112 * MS,
            None,
            "within noise",
            "changed by +12.0%",
        ),
    ),
    growth=(),
    longer=(
        Increase("exposed_all_gather", (), 2 * MS, 13 * MS),
        Increase("all_gather in backward", ("layers.3",), 1 * MS, 11 * MS),
    ),
    causes=("`layers.3` has reshard_after_forward=True: backward gathers it again (2.0 KiB)",),
)


def test_a_longer_step_is_told_by_its_part_and_by_the_wait_in_it() -> None:
    sentence = describe_outcome(TIMES)

    assert sentence == (
        "Decoder: step_time_ns rose by 12.0 ms (+12.0%) to 112 ms. Longer: exposed all-gather "
        "+11.0 ms (2.00 ms to 13.0 ms); all-gather in backward of layers.3 +10.0 ms (1.00 ms to "
        "11.0 ms)."
    )
    assert "layers.3" in text_of(render_check(TIMES)).partition("Longer in a step")[2]
    assert "| all-gather in backward | layers.3 | 1.00 ms | 11.0 ms | +10.0 ms |" in (
        render_markdown([TIMES])
    )
    assert "takes longer: all-gather in backward of layers.3" in render_junit([TIMES])


def test_settings_that_differ_are_told_whether_it_holds_or_not() -> None:
    holds = replace(
        MEMORY, outcome=CheckOutcome.PASSES, metrics=MEMORY.metrics[1:], growth=(), causes=()
    )

    for result in (MEMORY, holds):
        assert "config.batch_size: 1 -> 2" in text_of(render_check(result))
        assert "Differs: config.batch\\_size: 1 -\\> 2" in render_markdown([result])


def test_the_lines_of_an_increase_without_a_cause_are_told_in_every_form() -> None:
    unknown = replace(MEMORY, causes=())

    for result, is_measured in ((unknown, True), (MEMORY, False)):
        forms = (text_of(render_check(result)), render_markdown([result]), render_junit([result]))
        assert [("model.py:33" in form.replace("\\", "")) for form in forms] == [is_measured] * 3
    assert "Lines that allocate more than in the baseline" in text_of(render_check(unknown))


def test_names_command_nothing_in_markdown() -> None:
    text = render_markdown([replace(MEMORY, name=HOSTILE, unit=HOSTILE)])

    assert "<b>" not in text.replace("\\<b\\>", "")
    assert "[y](http" not in text.replace("\\[y\\](http", "")
    assert "http://" not in text
    assert "&lt;" not in text.replace("\\&lt;", "")
    assert not any(line.startswith("::") for line in text.splitlines())
    assert not {"\x1b", "\u202e"} & {*text}
    assert all(line.count("|") - line.count("\\|") in (0, 6, 7) for line in text.splitlines())


def test_names_command_nothing_in_annotations() -> None:
    text = render_annotations([replace(MEMORY, name=HOSTILE)])

    assert len(text.splitlines()) == 1
    assert "100%25%0A::error::no␛[31m" in text
    assert "\u202e" not in text


def test_junit_is_xml_with_the_names_as_they_are() -> None:
    suite = ElementTree.fromstring(render_junit([replace(MEMORY, name=HOSTILE)]))[0]

    assert suite.get("name") == HOSTILE.replace("\n", " ").replace("\x1b", " ").replace(
        "\u202e", " "
    )
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")


def test_several_checks_in_one_job_keep_their_cases_apart() -> None:
    cases = ElementTree.fromstring(render_junit([MEMORY, replace(MEMORY, name="Encoder")])).iter(
        "testcase"
    )

    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(names)) == len(names) == 4


def test_what_is_above_its_limit_and_did_not_rise_is_not_said_to_have_risen() -> None:
    metric = replace(MEMORY.metrics[0], before=3072, allowed=2048, limit="2 KiB")

    sentence = describe_outcome(replace(MEMORY, metrics=(metric,), growth=()))

    assert sentence == "Decoder: peak_allocated_bytes is 3.00 KiB, above the limit 2 KiB."
