"""Does a stranger with a browser see what the library measured?"""

import dataclasses
import http.client
import re

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.digest.run import digest_run
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run, write_run
from tests.browser.conftest import serve

pytestmark = pytest.mark.browser

PAGES = ("overview", "timeline", "units")
HOSTILE = "<img src=x onerror=document.title='owned'>**b**:smile:"
NUM_SPANS = 60_000


@pytest.fixture(scope="session")
def entry(recorded_runs):
    """The run that the tests read and the pictures show."""
    return min(list_runs(recorded_runs), key=lambda entry: entry.id)


@pytest.fixture(scope="session")
def digest(entry):
    return digest_run(open_run(entry.path))


def canvas_of(dashboard):
    """The timeline's canvas, drawn."""
    canvas = dashboard.page.locator("canvas[data-draws]")
    canvas.wait_for()
    return canvas


def view_of(canvas):
    """Start, end, number of rectangles, and whether each of them is a span."""
    state = canvas.evaluate("canvas => ({...canvas.dataset})")
    return (
        int(state["startNs"]),
        int(state["endNs"]),
        int(state["rectangles"]),
        state["exact"] == "true",
    )


def wait_for_view(dashboard, condition):
    dashboard.page.wait_for_function(
        f"""() => {{
          const find = (root) => root.querySelector('canvas[data-draws]')
            || [...root.querySelectorAll('*')].filter((node) => node.shadowRoot)
              .map((node) => find(node.shadowRoot)).find(Boolean);
          const canvas = find(document);
          return canvas && ({condition})(canvas.dataset);
        }}"""
    )


def test_runs_lists_the_recorded_runs_and_a_click_opens_one(server, tab, recorded_runs):
    dashboard = tab(server)
    dashboard.open("")
    runs = list_runs(recorded_runs)
    assert re.match(rf"{len(runs)} runs?\b", dashboard.headline())
    table = dashboard.page.get_by_test_id("stDataFrame").first
    table.click(position={"x": 16, "y": 52})
    dashboard.page.wait_for_url("**/overview?**")
    dashboard.settle()
    assert runs[0].manifest.run_id in dashboard.page.get_by_test_id("stMain").inner_text()


def test_overview_shows_the_verdict_and_the_numbers_of_the_digest(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("overview", run=entry.id)
    assert dashboard.headline() == digest.verdict.sentence
    values = dashboard.page.get_by_test_id("stMetricValue").all_inner_texts()
    assert values == [
        format_ns(digest.step_time_ns.median),
        format_ns(digest.exposed_ns),
        format_ratio(digest.overlap_ratio),
        format_bytes(digest.peak_allocated_bytes),
    ]


def test_overviews_bar_names_every_part_of_the_step(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("overview", run=entry.id)
    shown = dashboard.page.locator(".st-key-card-breakdown").inner_text()
    for part in digest.breakdown.parts:
        assert format_ns(part.duration_ns) in shown or part.duration_ns == 0, part.name


def test_timeline_says_what_the_step_waited_and_describes_its_picture(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("timeline", run=entry.id)
    breakdown = digest.breakdown
    waited = f"of the {format_ns(breakdown.step_time_ns)} of step {breakdown.step}"
    assert waited in dashboard.headline()
    canvas = canvas_of(dashboard)
    assert canvas.get_attribute("role") == "img"
    assert f"step {breakdown.step}" in canvas.get_attribute("aria-label")


def test_timeline_zooms_pans_and_fits(server, tab, entry):
    dashboard = tab(server)
    dashboard.open("timeline", run=entry.id)
    canvas = canvas_of(dashboard)
    start, end, _, _ = view_of(canvas)
    canvas.hover(position={"x": 600, "y": 40})
    for _ in range(4):
        dashboard.page.mouse.wheel(0, -250)
    wait_for_view(dashboard, f"view => view.endNs - view.startNs < {(end - start) / 4}")
    zoomed = view_of(canvas)
    canvas.press("d")
    wait_for_view(dashboard, f"view => view.startNs > {zoomed[0]}")
    canvas.press("s")
    canvas.press("0")
    wait_for_view(dashboard, f"view => view.startNs == {start} && view.endNs == {end}")


def test_timeline_explains_what_is_pointed_at_and_what_is_chosen(server, tab, entry):
    dashboard = tab(server)
    dashboard.open("timeline", run=entry.id)
    canvas = canvas_of(dashboard)
    canvas.focus()
    for _ in range(6):
        canvas.press("ArrowRight")
    assert "duration" in dashboard.page.locator(".live").inner_text()
    canvas.press("Enter")
    dashboard.page.locator(".st-key-selected-span").wait_for()
    canvas.hover(position={"x": 500, "y": 40})
    tip = dashboard.page.locator(".tip .title")
    tip.wait_for()
    assert re.match("forward|backward|exposed", tip.inner_text())


def test_units_shows_a_bar_and_a_row_for_each_unit(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("units", run=entry.id)
    names = dashboard.page.locator(".st-key-card-units-bars .ytick").all_text_contents()
    assert names == [unit.fqn or "(root)" for unit in digest.units]
    top = max(unit.exposed_ns for unit in digest.units)
    assert format_ns(top) in dashboard.headline()


@pytest.mark.parametrize(
    ("width", "scheme", "suffix"), [(1280, "light", ""), (1920, "dark", "-dark-1920")]
)
def test_every_page_fits_the_window_and_is_pictured(
    server, tab, entry, screenshots, width, scheme, suffix
):
    dashboard = tab(server, width=width, scheme=scheme)
    for name in PAGES:
        dashboard.open(name, run=entry.id)
        main = dashboard.page.get_by_test_id("stMain")
        assert main.evaluate("main => main.scrollWidth <= main.clientWidth")
        dashboard.screenshot(screenshots / f"{name}{suffix}.png")
        assert (screenshots / f"{name}{suffix}.png").stat().st_size > 20_000


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 101), ("evil.example", 403)])
def test_data_is_served_only_to_pages_of_this_machine(server, host, status):
    port = int(server.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {
        "Host": f"{host}:{port}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    connection.request("GET", "/_stcore/stream", headers=headers)
    assert connection.getresponse().status == status
    connection.close()


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory, free_port):
    """Serves a run with hostile names and one with very many spans."""
    folder = tmp_path_factory.mktemp("odd")
    fqns = [UNIT_FQNS[0], HOSTILE, *UNIT_FQNS[2:]]
    manifest = make_manifest(run_id=HOSTILE, fqns=fqns, tags=[HOSTILE])
    write_run(folder / "runs" / "hostile", dataclasses.replace(make_run(), manifest=manifest))
    run = make_run(num_ranks=1, num_steps=3)
    crowded = dataclasses.replace(run, tables={0: crowd(run.tables[0])})
    write_run(folder / "runs" / "crowded", crowded)
    with serve(folder / "runs", free_port(), folder / "log") as address:
        yield address


@pytest.mark.parametrize("name", ["", *PAGES])
def test_names_from_a_run_are_shown_and_never_obeyed(odd_server, tab, name):
    dashboard = tab(odd_server)
    dashboard.open(name, run="hostile", **({"unit": HOSTILE} if name == "units" else {}))
    assert dashboard.page.title() != "owned"
    assert dashboard.page.locator("img[src='x']").count() == 0
    if name:
        shown = dashboard.page.get_by_test_id("stMain").inner_text()
        assert HOSTILE in shown.replace("\N{WORD JOINER}", "")


def test_many_spans_arrive_as_density_and_sharpen_when_zoomed(odd_server, tab):
    dashboard = tab(odd_server)
    dashboard.open("timeline", run="crowded", step="2")
    canvas = canvas_of(dashboard)
    _, _, rectangles, is_exact = view_of(canvas)
    assert not is_exact
    assert rectangles < NUM_SPANS
    canvas.hover(position={"x": 300, "y": 40})
    for _ in range(8):
        dashboard.page.mouse.wheel(0, -300)
    wait_for_view(dashboard, "view => view.exact === 'true' && view.rectangles > 10")


def crowd(events):
    """The last step with very many tiny forwards in it."""
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
