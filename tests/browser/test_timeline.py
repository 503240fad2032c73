"""The timeline shows the most expensive unit, zooms, and can be shared."""

import dataclasses
import re
from urllib.parse import parse_qs, urlparse

import pytest
from fsdp_inspect_app.app_pages.timeline.frames import describe_range
from fsdp_inspect_app.loading import name_runs
from fsdp_inspect_app.timeline.range_sums import sum_range
from fsdp_inspect_app.timeline.track_set import SummedRange, TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline
from playwright.sync_api import expect

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.step_waits import describe_event, measure_step_waits
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.store.folder import list_runs, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import RANK_FILE
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from fsdp_inspect.writing import replace_file
from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run, write_run
from tests.browser.conftest import fits_the_window, serve
from tests.browser.settling import settle
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.importing.snapshots import FakeAllocator, train

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=document.title='owned'>**b**:smile:"
NUM_SPANS = 60_000
GUTTER = 172
CLOCK_Y, GATHER_Y, MEMORY_Y = 56, 82, 140
"""The middles of the first rank's lanes on the canvas."""
FIND_CANVAS = """() => {
  const find = (root) => root.querySelector('canvas[data-draws]')
    || [...root.querySelectorAll('*')].filter((node) => node.shadowRoot)
      .map((node) => find(node.shadowRoot)).find(Boolean);
  return find(document);
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every kind that the page must support."""
    folder = tmp_path_factory.mktemp("timelines")
    whole = make_run(num_ranks=4)
    write_run(folder / "runs" / "whole", whole)
    emulated = whole.manifest.model_copy(update={"source": "emulated", "run_id": "emulated"})
    write_run(folder / "runs" / "emulated", dataclasses.replace(whole, manifest=emulated))
    fqns = [UNIT_FQNS[0], HOSTILE, *UNIT_FQNS[2:]]
    manifest = make_manifest(run_id=HOSTILE, fqns=fqns, tags=[HOSTILE])
    write_run(folder / "runs" / "hostile", dataclasses.replace(make_run(), manifest=manifest))
    crowded = make_run(num_ranks=1, num_steps=3)
    tables = {0: crowd(crowded.tables[0])}
    write_run(folder / "runs" / "crowded", dataclasses.replace(crowded, tables=tables))
    apart = make_run(num_ranks=4)
    for rank in (2, 3):  # both ranks of the second host
        apart.tables[rank].sequence[:] = -1
    write_run(folder / "runs" / "apart", apart)
    for record in open_run(folder / "runs" / "apart").ranks[2:]:
        moved = record.model_copy(update={"pid_scope": "another-boot 1"})
        target = rank_folder(folder / "runs" / "apart", 0, record.rank) / RANK_FILE
        replace_file(target, encode_record(moved))
    (folder / "traces").mkdir()
    trace = TraceWriter(rank=0)
    fsdp2_step(trace)
    trace.write(folder / "traces" / "rank0.json.gz")
    import_traces(folder / "traces", folder / "runs" / "imported")
    allocator = FakeAllocator()
    train(allocator)
    allocator.dump(folder / "snapshot.pickle")
    import_snapshot(folder / "snapshot.pickle", folder / "runs" / "memory")
    return folder / "runs"


def crowd(events):
    """The last step with very many short forwards in it."""
    step = events.where((events.kind == EventKind.STEP) & (events.step == 2))
    start, end = int(step.start_ns[0]), int(step.end_ns[0])
    length = (end - start) // NUM_SPANS
    row = {name: int(column[0]) for name, column in step.columns().items()}
    starts = range(start, start + NUM_SPANS * length, length)
    tiny = [
        {
            **row,
            "kind": EventKind.FORWARD,
            "unit": 1 + number % 8,
            "issue_ns": begin,
            "start_ns": begin,
            "end_ns": begin + length // 2,
        }
        for number, begin in enumerate(starts)
    ]
    return EventTable.concat([events, EventTable.from_rows(tiny)])


@pytest.fixture(scope="module")
def address(runs, free_port):
    with serve(runs, free_port(), runs.parent / "log") as address:
        yield address


class Timeline:
    """The canvas of a page, and its description."""

    def __init__(self, page):
        self.page = page
        self.canvas = page.locator("canvas[data-draws]")
        self.canvas.wait_for()

    @property
    def state(self):
        return self.canvas.evaluate("canvas => ({...canvas.dataset})")

    @property
    def view(self):
        state = self.state
        return int(state["startNs"]), int(state["endNs"])

    def wait(self, condition):
        self.page.wait_for_function(
            f"() => {{ const canvas = ({FIND_CANVAS})(); "
            f"return canvas && ({condition})(canvas.dataset); }}"
        )

    def x_of(self, time_ns):
        start, end = self.view
        width = self.canvas.evaluate("canvas => canvas.clientWidth")
        return GUTTER + (time_ns - start) / (end - start) * (width - GUTTER)

    def click(self, x, y, **options):
        self.canvas.click(position={"x": x, "y": y}, **options)

    def drag(self, x, y, by, *, key=None):
        box = self.canvas.bounding_box()
        mouse = self.page.mouse
        if key:
            self.page.keyboard.down(key)
        mouse.move(box["x"] + x, box["y"] + y)
        mouse.down()
        mouse.move(box["x"] + x + by, box["y"] + y, steps=4)
        mouse.up()
        if key:
            self.page.keyboard.up(key)

    def details(self):
        panel = self.page.locator(".st-key-selected-span")
        panel.get_by_text("after the step began").wait_for()
        settle(self.page)
        return panel.inner_text()


@pytest.fixture
def open_timeline(address, tab):
    def open_it(run="whole", *, width=1280, scheme="light", **parameters):
        dashboard = tab(address, width=width, scheme=scheme)
        dashboard.page.goto("about:blank")
        dashboard.shown = None
        dashboard.open("timeline", run=run, **parameters)
        return Timeline(dashboard.page)

    return open_it


@pytest.fixture(scope="module")
def run(runs):
    return open_run(runs / "whole")


@pytest.fixture(scope="module")
def longest(run):
    """The longest wait of rank 0 in step 3, and its position on the axis."""
    waits = measure_step_waits(run, rank=0, step=3)
    event = waits.longest()[0]
    return event, describe_event(
        run.manifest, run.events(0, steps=[3]), event, waits=waits, bandwidth=None
    )


@pytest.mark.slow
def test_it_says_what_the_step_waited_for_and_describes_its_picture(open_timeline, run):
    timeline = open_timeline()
    breakdown = measure_summary(run).breakdown
    split = measure_step_breakdown(run, rank=breakdown.rank, step=breakdown.closest_step)
    waited = f"of {format_ns(split.step_time_ns)} exposed."
    assert waited in timeline.page.locator(".st-key-headline").inner_text()
    assert timeline.canvas.get_attribute("role") == "img"
    words = timeline.canvas.get_attribute("aria-label")
    assert f"step {breakdown.closest_step} on ranks 3, 0, 1, 2" in words
    legend = timeline.page.locator(".legend").inner_text()
    assert "exposed all-gather" in legend
    assert "memory allocated\nreserved" in legend


def test_the_guilty_unit_is_one_click_away(open_timeline, longest):
    timeline = open_timeline(step="3", rank="0")
    button = timeline.page.locator(".st-key-waits button").first
    assert "norm, lm_head" in button.inner_text()
    button.click()
    event, facts = longest
    timeline.wait(f"state => state.selected === '{event}' && state.arrows === '2'")
    words = timeline.details()
    assert "all-gather norm, lm_head · backward · 160 MiB of bfloat16" in words
    assert format_ns(facts.duration_ns) in words
    assert re.search(r"[\d.]+ GB/s bus \(fit [\d.]+ GB/s\)", words)
    assert "issued when it was needed" in words
    assert f"exposed {format_ns(facts.exposed_ns)}: late issue" in words
    assert "recorded, measured" in words
    link = timeline.page.get_by_role("link", name="Open unit norm, lm_head")
    named = parse_qs(urlparse(link.get_attribute("href")).query)
    assert (named["unit"], named["run"]) == (["norm, lm_head"], ["whole"])


def test_wheel_keys_and_drag_move_the_window(open_timeline):
    timeline = open_timeline(step="3")
    start, end = timeline.view
    timeline.canvas.hover(position={"x": 600, "y": CLOCK_Y})
    for _ in range(4):
        before = timeline.view
        timeline.page.mouse.wheel(0, -250)
        timeline.wait(f"view => view.endNs - view.startNs < {before[1] - before[0]}")
    settle(timeline.page)
    zoomed = timeline.view
    assert zoomed[1] - zoomed[0] < (end - start) / 4
    timeline.canvas.press("d")
    timeline.wait(f"view => view.startNs > {zoomed[0]}")
    timeline.drag(500, CLOCK_Y, 200, key="Shift")
    timeline.wait(f"view => view.startNs < {zoomed[0]}")
    timeline.canvas.press("w")
    timeline.wait(f"view => view.endNs - view.startNs < {(zoomed[1] - zoomed[0]) * 0.9}")
    timeline.canvas.press("0")
    timeline.wait(f"view => view.startNs == {start} && view.endNs == {end}")
    timeline.canvas.press("w")
    timeline.click(700, MEMORY_Y, click_count=2)
    timeline.wait(f"view => view.startNs == {start} && view.endNs == {end}")


@pytest.mark.slow
def test_a_dragged_range_is_summed_and_a_link_keeps_it(open_timeline, runs):
    timeline = open_timeline(step="3", rank="0")
    start, end = timeline.view
    width = timeline.canvas.evaluate("canvas => canvas.clientWidth") - GUTTER
    timeline.drag(400, CLOCK_Y, 200)
    expected = 200 / width * (end - start)
    timeline.wait(f"state => Math.abs(state.ruler - {expected}) < {expected / 50}")
    length = int(timeline.state["ruler"])
    assert timeline.view == (start, end)
    card = timeline.page.locator(".st-key-card-range-timeline")
    card.wait_for()
    rank, low, high = map(int, parse_qs(urlparse(timeline.page.url).query)["range"][0].split("-"))
    assert high - low == pytest.approx(length, abs=2)
    run = open_run(runs / "whole")
    tracks = TrackSet(build_timeline(run, step=3, ranks=(0,)), run.manifest)
    sums = sum_range(tracks, SummedRange(0, rank, low, high))
    assert describe_range(sums) in card.inner_text()
    other = open_timeline(step="3", rank="0", range=f"{rank}-{low}-{high}")
    assert describe_range(sums) in other.page.locator(".st-key-card-range-timeline").inner_text()
    other.canvas.press("Escape")
    other.wait("state => state.ruler === ''")
    expect(other.page.locator(".st-key-card-range-timeline")).to_have_count(0)


@pytest.mark.slow
def test_fullscreen_has_a_button_and_a_key_and_keeps_the_details(open_timeline):
    timeline = open_timeline(step="3", rank="0")
    timeline.canvas.press("Shift+F")
    timeline.wait("state => state.fullscreen === 'true'")
    timeline.canvas.press("ArrowRight")
    timeline.canvas.press("Enter")
    assert "rank 0" in timeline.details().lower()
    timeline.page.get_by_role("button", name="Fullscreen").click()
    timeline.wait("state => state.fullscreen === 'false'")


@pytest.mark.slow
def test_ranks_and_kinds_are_searched(open_timeline):
    timeline = open_timeline(step="3")
    box, matches = timeline.page.locator("input[type=search]"), timeline.page.locator(".matches")
    for words, expected in (
        ("rank 2 reduce-scatter", r"\d+ of \d+"),
        ("all-gather", r"\d+ of \d+"),
        ("rank 9", "rank 9 is not shown"),
    ):
        box.fill(words)
        box.press("Enter")
        expect(matches).to_have_text(re.compile(expected))
    box.fill("rank 2 reduce-scatter layers.3")
    box.press("Enter")
    expect(matches).to_have_text(re.compile(r"\d+ of \d+"))
    words = timeline.details()
    assert "reduce-scatter layers.3" in words
    assert "Rank 2" in words


@pytest.mark.slow
def test_a_strip_shows_the_difference_to_run_b(open_timeline, runs):
    timeline = open_timeline("whole", step="3", b="hostile")
    words = timeline.page.locator(".st-key-frame-timeline, [data-testid=stMain]").first.inner_text()
    name = name_runs(list_runs(runs))["hostile"]
    # `plain` puts a word joiner between a colon and a word, which Streamlit would show as an emoji.
    assert f"compared with B: {name}, rank" in words.replace("\u2060", "")
    assert "Units only here: layers.0" in words
    assert "slower than B" in timeline.page.locator(".legend").inner_text()


@pytest.mark.slow
def test_it_stays_inside_its_margin_on_a_phone(open_timeline, screenshots):
    timeline = open_timeline(step="3", width=400)
    assert fits_the_window(timeline.page)
    page, canvas = timeline.page.viewport_size["width"], timeline.canvas.bounding_box()
    assert canvas["x"] >= 8
    assert canvas["x"] + canvas["width"] <= page - 8
    timeline.page.screenshot(path=screenshots / "timeline-400.png")


@pytest.mark.slow
def test_a_unit_is_searched_forwards_and_backwards(open_timeline):
    timeline = open_timeline(step="3", rank="0")
    timeline.canvas.press("/")
    timeline.page.keyboard.type("layers.3")
    matches = timeline.page.locator(".matches")
    expect(matches).to_have_text("1 of 5")
    for key, expected in (("Enter", "2 of 5"), ("Enter", "3 of 5"), ("Shift+Enter", "2 of 5")):
        timeline.page.keyboard.press(key)
        expect(matches).to_have_text(expected)
    expect(timeline.canvas).not_to_have_attribute("data-selected", "-1")
    timeline.page.wait_for_url("**unit=layers.3**")
    assert "layers.3" in timeline.details()
    timeline.page.locator("input[type=search]").fill("no such layer")
    expect(matches).to_have_text("no such name")


@pytest.mark.slow
def test_tooltips_explain_spans_and_memory(open_timeline, longest):
    timeline = open_timeline(step="3", rank="0")
    _, facts = longest
    x = timeline.x_of(facts.start_ns + facts.duration_ns / 2)
    tip = timeline.page.locator(".tip")
    timeline.canvas.hover(position={"x": x, "y": CLOCK_Y})
    expect(tip).to_contain_text("exposed all-gather · norm, lm_head")
    timeline.canvas.hover(position={"x": x, "y": GATHER_Y})
    expect(tip).to_contain_text(f"message {format_bytes(facts.bytes)}", use_inner_text=True)
    expect(tip).to_contain_text(f"exposed {format_ns(facts.exposed_ns)}", use_inner_text=True)
    timeline.canvas.hover(position={"x": timeline.x_of(timeline.view[1] * 0.6), "y": MEMORY_Y})
    words = "allocated 12.0 GiB reserved 14.0 GiB read in forward"
    expect(tip).to_contain_text(words, use_inner_text=True)


@pytest.mark.slow
def test_the_keyboard_alone_selects_and_explains(open_timeline):
    timeline = open_timeline(step="3", rank="0")
    timeline.canvas.focus()
    for _ in range(3):
        timeline.page.keyboard.press("ArrowRight")
    expect(timeline.page.locator(".live")).to_contain_text("duration")
    timeline.page.keyboard.press("ArrowDown")
    expect(timeline.page.locator(".live")).to_contain_text("all-gather")
    timeline.page.keyboard.press("Enter")
    assert "all-gather" in timeline.details()
    timeline.page.keyboard.press("f")
    timeline.wait("view => view.endNs - view.startNs < 60e6")
    timeline.page.keyboard.press("?")
    expect(timeline.page.locator(".help")).to_contain_text("zoom to the selection")
    timeline.page.keyboard.press("p")
    timeline.wait("state => state.pinned === '0'")
    timeline.page.keyboard.press("Escape")
    timeline.page.get_by_text("Click a span to see its details").wait_for()


@pytest.mark.slow
def test_a_link_shows_a_colleague_the_same(open_timeline, open_context):
    timeline = open_timeline(step="3", unit="layers.5")
    timeline.click(20, 200)  # the name of rank 0, below the median rank
    timeline.wait("state => state.pinned === '1'")
    timeline.page.locator(".st-key-waits button").first.click()
    timeline.wait("state => state.arrows === '2'")
    for _ in range(3):
        timeline.canvas.press("w")
    timeline.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    timeline.page.get_by_role("button", name="Copy link").click()
    timeline.page.get_by_text("link copied").wait_for()
    link = timeline.page.evaluate("() => navigator.clipboard.readText()")
    named = parse_qs(urlparse(link).query)
    assert (named["run"], named["step"], named["top"]) == (["whole"], ["3"], ["0"])
    assert (named["unit"], named["rank"]) == (["layers.5"], ["0", "1", "2", "3"])
    details, seen = timeline.details(), timeline.state
    page = open_context().new_page()
    page.goto(link)
    settle(page)
    other = Timeline(page)
    shown = {key: other.state[key] for key in ("startNs", "endNs", "selected", "pinned")}
    assert other.details() == details
    assert page.locator("input[type=search]").input_value() == "layers.5"
    assert shown["selected"] == seen["selected"]
    assert shown["pinned"] == "1"
    assert abs(int(shown["startNs"]) - int(seen["startNs"])) <= 1
    assert abs(int(shown["endNs"]) - int(seen["endNs"])) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({"window": "9-1", "span": "0-99999", "top": "77"}, id="out of range"),
        pytest.param({"window": "<b>", "span": "../..", "unit": HOSTILE}, id="nonsense"),
    ],
)
def test_a_link_that_makes_no_sense_shows_the_whole_step(open_timeline, parameters):
    timeline = open_timeline(step="3", **parameters)
    state = timeline.state
    assert (state["startNs"], state["selected"], state["pinned"]) == ("0", "-1", "")


@pytest.mark.slow
def test_the_picture_is_saved_as_png(open_timeline):
    timeline = open_timeline(step="3")
    with timeline.page.expect_download() as download:
        timeline.page.get_by_role("button", name="PNG").click()
    assert download.value.suggested_filename == "timeline-step-3.png"
    content = download.value.path().read_bytes()
    assert content.startswith(b"\x89PNG")
    height = int.from_bytes(content[20:24], "big")
    assert height > 2 * 4 * 150  # all four ranks, at twice the resolution of the screen


@pytest.mark.slow
def test_many_spans_arrive_as_density_and_sharpen_when_zoomed(open_timeline):
    timeline = open_timeline("crowded", step="2")
    state = timeline.state
    assert state["exact"] == "false"
    assert int(state["rectangles"]) < NUM_SPANS
    timeline.click(600, CLOCK_Y)
    timeline.wait("view => view.exact === 'true' && view.rectangles > 10")
    assert timeline.view[0] > 0


def test_names_from_a_run_are_shown_and_never_obeyed(open_timeline):
    timeline = open_timeline("hostile", step="3", unit=HOSTILE)
    page = timeline.page
    page.locator("input[type=search]").press("Enter")
    assert HOSTILE in timeline.details()
    timeline.canvas.press("f")
    timeline.wait("view => view.endNs - view.startNs < 100e6")
    box = timeline.canvas.bounding_box()
    timeline.canvas.hover(position={"x": GUTTER + (box["width"] - GUTTER) / 2, "y": GATHER_Y})
    expect(page.locator(".tip .title")).to_contain_text(HOSTILE)
    page.get_by_text("Table: ").click()
    page.get_by_test_id("stDataFrame").wait_for()
    assert page.title() != "owned"
    assert page.locator("img[src='x']").count() == 0


@pytest.mark.slow
def test_ranks_without_a_common_clock_are_told_apart(open_timeline):
    timeline = open_timeline("apart", step="3")
    words = timeline.page.get_by_test_id("stMain").inner_text()
    assert "The clocks of ranks 2, 3 are not aligned" in words, words
    assert "Do not compare their" in words


@pytest.mark.slow
def test_an_emulated_step_says_so_in_the_picture(open_timeline):
    timeline = open_timeline("emulated", step="3")
    assert timeline.canvas.get_attribute("aria-label").startswith("Emulated: compute is measured")


@pytest.mark.slow
def test_an_imported_trace_is_one_window_and_says_what_it_cannot_know(open_timeline):
    timeline = open_timeline("imported")
    words = timeline.page.get_by_test_id("stMain").inner_text()
    assert "An imported trace shows the profiled window" in words
    assert "This run has no memory readings" in words
    timeline.page.locator(".st-key-waits button").first.click()
    assert "imported, " in timeline.details()


@pytest.mark.slow
def test_a_run_of_memory_alone_says_what_to_do(address, tab):
    dashboard = tab(address)
    dashboard.open("timeline", run="memory")
    assert "this run has memory only" in dashboard.headline()
    assert dashboard.page.get_by_role("link", name="Open Memory").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (1280, "dark")])
def test_it_fits_the_window_with_a_wait_selected(open_timeline, screenshots, width, scheme):
    timeline = open_timeline(step="3", width=width, scheme=scheme)
    assert fits_the_window(timeline.page)
    timeline.page.locator(".st-key-waits button").first.click()
    timeline.details()
    timeline.page.mouse.move(1, 1)
    picture = screenshots / f"timeline-selected-{scheme}-{width}.png"
    timeline.page.screenshot(path=picture)
    assert picture.stat().st_size > 20_000
