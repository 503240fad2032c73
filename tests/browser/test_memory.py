"""The Memory page shows the contents of memory; a link keeps its rank and step."""

import pytest

from fsdp_inspect.analysis.memory.overview import measure_memory_overview
from fsdp_inspect.report.memory_wording import headline_memory
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.app.synthetic import make_run, write_run
from tests.browser.conftest import broken_words, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLE = "tiny-2-ranks"


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory, free_port):
    """A run with CUDA's allocator whose rank 1 failed."""
    folder = tmp_path_factory.mktemp("memory")
    run = make_run(num_steps=8)
    write_run(folder / "runs" / "failed", run, failures={1: "out of memory in step 5"})
    with serve(folder / "runs", free_port(), folder / "log") as address:
        yield address


def test_memory_says_the_peak_first_and_names_it_in_the_chart(server, tab, recorded_runs):
    if not any(entry.id == SAMPLE for entry in list_runs(recorded_runs)):
        pytest.skip("this checkout has no samples")
    dashboard = tab(server)
    dashboard.open("memory", run=SAMPLE)
    digest = measure_memory_overview(open_run(recorded_runs / SAMPLE))
    assert dashboard.headline() == headline_memory(digest)
    card = dashboard.page.locator(".st-key-card-memory-step")
    assert "layers.5" in card.inner_text()
    assert "peak 25.1 MiB" in " ".join(card.locator(".chart-mark").all_text_contents())


def test_a_link_opens_rank_and_step_in_another_browser(odd_server, open_context, tab):
    tab(odd_server).open("memory", run="failed", rank="1", step="4")
    address = tab(odd_server).page.url
    assert "rank=1" in address
    page = open_context().new_page()
    page.goto(address)
    page.get_by_text("Memory over step 4, rank 1").wait_for()


def test_a_click_on_the_curve_chooses_an_instant_that_a_link_keeps(server, tab):
    dashboard = tab(server)
    dashboard.open("memory", run=SAMPLE)
    card = dashboard.page.locator(".st-key-card-memory-instant")
    before = card.inner_text()
    assert "25.1 MiB" in before
    plot = dashboard.page.locator(".st-key-card-memory-step .chart-plot")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] - 4, "y": box["height"] / 2})
    dashboard.page.wait_for_url("**at=*")
    dashboard.settle()
    after = card.inner_text()
    assert "25.1 MiB" not in after
    dashboard.page.reload()
    dashboard.settle()
    assert card.inner_text() == after
    assert card.locator(".chart-name").all_text_contents() == ["unit", "line", "category"]


@pytest.mark.parametrize("page", ["overview", "memory"])
def test_no_word_of_a_key_number_breaks_or_is_clipped_at_1024(odd_server, tab, page):
    dashboard = tab(odd_server, width=1024)
    dashboard.open(page, run="failed")
    assert broken_words(dashboard.page) == []


def test_labels_are_beside_their_line_and_inside_their_boxes(server, tab):
    dashboard = tab(server, width=900)
    dashboard.open("memory", run=SAMPLE)
    card = dashboard.page.locator(".st-key-card-memory-step")
    label, line = (
        card.locator(one).bounding_box() for one in (".chart-mark span", ".chart-chosen")
    )
    assert not label["x"] <= line["x"] <= label["x"] + label["width"]
    spilled = dashboard.page.evaluate(
        """() => [...document.querySelectorAll(".st-key-card-memory-instant .chart-fill > span")]
          .filter((label) => label.scrollWidth > label.clientWidth
                             && getComputedStyle(label).textOverflow !== "ellipsis")
          .map((label) => label.textContent)"""
    )
    assert spilled == []
