from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.formatting import (
    format_bytes,
    format_cause,
    format_ns,
    format_ratio,
    format_unit,
)
from fsdp_inspect.report.exposed import describe_transfers
from fsdp_inspect.report.html import (
    read_comparison,
    read_contents,
    render_comparison_page,
    render_run,
)
from fsdp_inspect.report.html.page import MOST_OWNERS
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.run import RunStatus
from tests.builders import MIB, RunBuilder, add_steady_step, steady_run
from tests.report.html.page_text import Page

SAMPLES = Path(__file__).parents[3] / "samples"
NAMES = ("tiny-2-ranks", "async-prefetch-2-ranks", "hsdp-4-ranks")
HOSTILE = "<script>document.title='owned'</script>\"'&amp;{{7*7}}\u202e\x00"


@pytest.fixture(scope="module", params=NAMES)
def contents(request):
    return read_contents(open_run(SAMPLES / request.param))


@pytest.fixture(scope="module")
def compared():
    return read_comparison([open_run(SAMPLES / name) for name in NAMES])


def test_a_report_says_the_verdict_before_any_number(contents):
    text = Page(render_run(contents)).text
    verdict = text.index(contents.summary.verdict.sentence)
    assert verdict < text.index("step time")
    assert contents.summary.verdict.why in text


def test_a_report_holds_the_numbers_of_the_digest(contents):
    text, digest = Page(render_run(contents)).text, contents.summary
    assert f"step time {format_ns(digest.step_time_ns.typical)}" in text
    for part in digest.breakdown.parts:
        assert part.duration_ns == 0 or format_ns(part.duration_ns) in text
    for owner in digest.exposed.owners[:MOST_OWNERS]:
        assert owner.exposed_ns == 0 or format_ns(owner.exposed_ns) in text
    for unit in digest.units:
        assert format_unit(unit.fqn) in text
    for category in digest.memory.peak.categories:
        assert format_bytes(category.bytes) in text


def test_causes_have_their_time_and_their_fraction_of_the_exposed_time(contents):
    text, exposed = Page(render_run(contents)).text, contents.waits.exposed
    plain = text.replace("\N{NO-BREAK SPACE}", " ")
    assert exposed.causes_ns
    for cause, duration in exposed.causes_ns.items():
        share = format_ratio(duration / exposed.exposed_ns)
        assert f"{format_cause(cause)} {format_ns(duration)} {share}" in plain


def test_a_wait_for_the_last_rank_calls_no_rank_a_straggler(contents):
    waits = contents.waits.exposed.evidence
    last = [ns for wait in waits for cause, ns in wait.causes_ns.items() if cause == "straggler"]
    text = Page(render_run(contents)).text.replace("\N{NO-BREAK SPACE}", " ")
    assert last
    assert all(f"waiting for the last rank {format_ns(ns)}" in text for ns in last)
    assert not any(f"straggler {format_ns(ns)}" in text for ns in last)


def test_a_transfer_is_the_mean_of_the_shortest_durations(contents):
    text = Page(render_run(contents)).text
    assert "median transfer" not in text
    assert describe_transfers(contents.waits.bandwidth) in text


def test_a_report_says_how_its_numbers_were_obtained(contents):
    text, provenance = Page(render_run(contents)).text, contents.summary.provenance
    assert "Sources and methods" in text
    assert contents.summary.left_out.sentence in text
    assert "host-blocking" in text
    assert provenance.memory.replace("_", " ") in text


def test_a_report_asks_nobody_for_anything_and_runs_nothing(contents, compared):
    for text in (render_run(contents), render_comparison_page(compared)):
        page = Page(text)
        assert page.asked == []
        assert {"script", "link", "iframe", "img", "object"} & set(page.tags) == set()
        assert "url(http" not in text
        assert "default-src 'none'" in text
        assert len(text) < 150_000


def test_an_imported_run_is_explained_by_the_definitions_of_kernel_traces():
    recorded, imported = (
        Page(render_run(read_contents(steady_run(source=source, device_type="cuda")))).text
        for source in ("recorded", "imported")
    )
    assert "communication that runs while no compute kernel of its rank runs" in imported
    assert "an all-gather runs while no compute kernel of its rank runs" in imported
    assert "begins to wait for a collective" in recorded
    for words in ("begins to wait for a collective", "CUDA events", "the rank waits."):
        assert words not in imported


def test_a_table_of_units_with_all_reduce_gives_up_its_bars_where_there_is_no_room():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    add_steady_step(rank, 0, start=0)
    assert 'class="crowded"' not in render_run(read_contents(builder.build()))
    rank.all_reduce("layers.0", 990, 1000)
    assert 'class="crowded"' in render_run(read_contents(builder.build()))


def test_every_chart_has_words_for_those_who_cannot_see_it(contents):
    text = render_run(contents)
    assert text.count("<figure") == text.count('<figure role="img" aria-label="')
    assert 'aria-label=""' not in text


def test_hostile_names_are_shown_as_they_are(tmp_path):
    builder = RunBuilder(
        units=(HOSTILE, ""),
        run_id=HOSTILE,
        name=HOSTILE,
        device_name=HOSTILE,
        versions={HOSTILE: HOSTILE},
        environment={"NCCL_X": HOSTILE},
        config={HOSTILE: HOSTILE},
        command=["train.py", HOSTILE],
        tags=[HOSTILE],
    )
    for number in range(2):
        rank = builder.rank(number)
        rank.record["host"] = HOSTILE
        rank.step(0, 0, 100)
        rank.all_gather(HOSTILE, 0, 50, need=0)
        rank.memory(MemoryPoint.PEAK, 5 * MIB, unit=HOSTILE, activation=MIB)
        rank.memory(MemoryPoint.PEAK_BY_OWNER, 5 * MIB, unit=HOSTILE, activation=MIB)
    run = builder.build(notes=[HOSTILE], status=RunStatus.FAILED)
    other = steady_run(run_id="other")
    for text in (
        render_run(read_contents(run)),
        render_comparison_page(read_comparison([run, other])),
    ):
        page = Page(text)
        assert "script" not in page.tags
        assert "{{7*7}}" in page.text
        assert "49" not in page.text.split("{{7*7}}")[0][-40:]
        assert "\u202e" not in text
        assert "\x00" not in text


@pytest.mark.parametrize("name", ["empty", "unfinished", "one rank", "no units"])
def test_a_run_that_lacks_much_still_has_a_report(name):
    builder = RunBuilder(units=() if name == "no units" else ("", "layers.0"), world_size=2)
    rank = builder.rank(0)
    if name == "unfinished":
        rank.forward("layers.0", 0, 50)
    if name == "one rank":
        add_steady_step_of(builder)
    if name == "no units":
        rank.step(0, 0, 100)
        rank.all_reduce(None, 10, 20, need=15)
    text = Page(render_run(read_contents(builder.build(notes=["something is missing"])))).text
    assert "something is missing" in text
    assert "None" not in text


def add_steady_step_of(builder):
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 10, 30, need=15)
    rank.forward("layers.0", 30, 60)


def test_long_lists_say_what_they_leave_out():
    units = tuple(f"layers.{number}" for number in range(MOST_OWNERS + 3))
    builder = RunBuilder(units=units)
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    for number, unit in enumerate(units):
        rank.all_gather(unit, 10 * number, 10 * number + 5, need=10 * number)
    text = Page(render_run(read_contents(builder.build()))).text
    assert f"The first {MOST_OWNERS} of {MOST_OWNERS + 3}." in text


def test_a_comparison_names_settings_before_what_they_changed(compared):
    text = Page(render_comparison_page(compared)).text
    settings = text.index("Settings ")
    assert settings < text.index(compared.comparison.conclusions[0].sentence)
    for setting in compared.comparison.settings:
        assert setting.name in text
    for caveat in compared.comparison.caveats:
        assert text.index(caveat) < settings


def test_a_comparison_holds_every_unit_of_every_side(compared):
    text = Page(render_comparison_page(compared)).text
    for row in compared.comparison.units:
        assert format_unit(row.fqns[0]) in text
        for side in row.sides:
            assert side is None or format_ns(side.exposed_ns) in text


def test_equal_runs_say_that_nothing_differs():
    runs = [steady_run(run_id=name) for name in ("one", "two")]
    text = Page(render_comparison_page(read_comparison(runs))).text
    assert "The settings are the same." in text
    assert "step time 1.00 µs 1.00 µs = " in text


def test_noise_is_called_noise():
    builders = [RunBuilder(run_id=name) for name in ("one", "two")]
    for builder, end in zip(builders, (1000, 1020), strict=True):
        for number in range(2):
            rank = builder.rank(number)
            add_steady_step(rank, 0, start=0)
            rank.events[0] |= {"end_ns": end}
    text = Page(render_comparison_page(read_comparison([one.build() for one in builders]))).text
    assert "within noise" in text


def test_a_run_without_a_timed_step_can_be_compared():
    empty = RunBuilder(run_id="empty")
    empty.rank(0)
    contents = read_comparison([steady_run(), empty.build()])
    assert "empty" in Page(render_comparison_page(contents)).text


def test_scalars_of_a_damaged_run_do_not_stop_the_report():
    contents = replace(read_contents(steady_run()), scalars=())
    assert "Loss" not in Page(render_run(contents)).text
