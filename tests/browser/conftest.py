"""Start a real server on a free port and a real Chromium."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.error import HTTPError
from urllib.parse import quote

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    TimeoutError as PlaywrightTimeout,
    expect,
    sync_playwright,
)

from fsdp_inspect.store.folder import list_runs
from tests.app.synthetic import make_run, write_run
from tests.browser.settling import PATIENCE_MS, go, prepare, settle
from tests.browser.states import write_states

SAMPLES = Path(__file__).parents[2] / "samples"
SCREENSHOTS = "FSDP_INSPECT_SCREENSHOTS"
CHROMIUM_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Scheme = Literal["light", "dark"]
OpenContext = Callable[..., BrowserContext]
START_S = 300
"""The time limit for the start of a server."""

expect.set_options(timeout=PATIENCE_MS)
_MOVES_BY_ITSELF = "live"
"""A page that refreshes itself: its next refresh may come between two pages."""


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=list(CHROMIUM_ARGUMENTS)
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def open_context(browser: Browser) -> Iterator[OpenContext]:
    """Opens a context of the browser, with cookies of its own, that is closed after the tests."""
    opened: list[BrowserContext] = []

    def open_it(**options: Any) -> BrowserContext:
        opened.append(prepare(browser.new_context(**options)))
        return opened[-1]

    yield open_it
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, or a synthetic run in a checkout without samples."""
    if list_runs(SAMPLES):
        return SAMPLES
    folder = tmp_path_factory.mktemp("recorded")
    write_run(folder / "synthetic", make_run(num_steps=8))
    return folder


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for pictures: the one in the environment, or a temporary one."""
    named = os.environ.get(SCREENSHOTS)
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def serve(folder: Path | str, port: int, log: Path, *options: str) -> Iterator[str]:
    """Serve the dashboard of a folder, and end the server afterwards in any case."""
    command = [sys.executable, "-m", "fsdp_inspect_app", str(folder), "--port", str(port)]
    command += options or ["--no-token"]
    with log.open("w") as output:
        variables = {**os.environ, "FSDP_INSPECT_DATA": str(log.with_name("data"))}
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_healthy(address, server, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_healthy(address: str, server: subprocess.Popen[Any], log: Path) -> None:
    """Wait until the dashboard answers, while the process that serves it runs."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=60) as answer:
                if answer.status == 200:
                    return
        except HTTPError as error:
            if error.code == HTTPStatus.FORBIDDEN:  # it runs and requires its token
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the dashboard did not come up:\n{log.read_text()[-3000:]}", pytrace=False)


_COVERED = """() => [...document.querySelectorAll("[data-testid=stMain] [data-testid=stHeading]")]
  .filter((heading) => {
    const below = heading.closest("[data-testid=stElementContainer]")?.nextElementSibling;
    if (!below || !below.getBoundingClientRect().height) return false;
    const title = heading.getBoundingClientRect(), next = below.getBoundingClientRect();
    return next.left < title.right && next.top >= title.top && next.top < title.bottom - 1;
  })
  .map((heading) => heading.textContent)"""


_BROKEN = """() => [...document.querySelectorAll("[data-testid=stMetric]")].flatMap((metric) => {
    const right = metric.getBoundingClientRect().right;
    const texts = document.createTreeWalker(metric, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) {
      const node = texts.currentNode;
      for (const word of node.data.matchAll(/[^\\s]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const boxes = [...range.getClientRects()];
        if (new Set(boxes.map((box) => Math.round(box.top))).size > 1
            || boxes.some((box) => box.right > right)) found.push(word[0]);
      }
    }
    return found;
  })"""


def broken_words(page: Page) -> list[str]:
    """The words of key numbers that break, or that reach out of their tile."""
    found: list[str] = page.evaluate(_BROKEN)
    return found


def covered_titles(page: Page) -> list[str]:
    """The titles that the next element of the page covers."""
    found: list[str] = page.evaluate(_COVERED)
    return found


def fits_the_window(page: Page) -> bool:
    """Whether no visible part of the page requires scrolling sideways, once tables have resized."""
    fits = """() => {
        const main = document.querySelector("[data-testid=stMain]");
        return main.scrollWidth <= main.clientWidth;
    }"""
    try:
        page.wait_for_function(fits)
    except PlaywrightTimeout:
        return False
    return True


class Dashboard:
    """The dashboard in one browser tab, with the errors of the browser."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.complaints: list[str] = []
        self.shown: tuple[str, str, str] | None = None
        """The requested page, and its address; a click may have left it."""
        self.appearance: tuple[int, Scheme] | None = None
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def look(self, width: int, scheme: Scheme) -> None:
        """Set the width of the window, light or dark; the page is then loaded again."""
        if (width, scheme) == self.appearance:
            return
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.appearance, self.shown = (width, scheme), None

    def widen(self, width: int) -> None:
        """Set the width of the window around the current page."""
        assert self.appearance is not None
        if width != self.appearance[0]:
            self.page.set_viewport_size({"width": width, "height": 900})
            self.appearance = width, self.appearance[1]
            self.settle()

    def open(self, name: str, **parameters: str) -> None:
        """Load a page at its address and wait for its answer, unless it is already shown."""
        if (name, _query(parameters), self.page.url) != self.shown:
            self.load(name, **parameters)

    def load(self, name: str, **parameters: str) -> None:
        """Load a page at its address, like a user who opens a link."""
        query = _query(parameters)
        self.page.goto(f"{self.address}/{name}?{query}")
        self.settle()
        self.shown = (name, query, self.page.url)

    def go(self, name: str, **parameters: str) -> None:
        """Go to a page without loading the application again, which takes a third of the time.

        For tests that read many pages. A chart of the previous page may remain visible if the next
        page has a chart at the same place, so tests read the values of charts after `open`. After a
        click, which may have opened another page, the page is loaded.
        """
        query = _query(parameters)
        before = self.shown
        can_go = before is not None and before[2] == self.page.url and before[0] != _MOVES_BY_ITSELF
        if can_go and go(self.page, f"{self.address}/{name}?{query}"):
            self.settle()
        else:
            self.load(name, **parameters)
        self.shown = (name, query, self.page.url)

    def settle(self) -> None:
        """Wait until no script runs, everything is drawn and nothing changes."""
        settle(self.page)

    def unfold(self) -> None:
        """Open every folded part of the page."""
        for fold in self.page.locator("[class*=st-key-fold-]").all():
            panel = fold.locator("details").first
            if panel.get_attribute("open") is None:
                panel.locator("summary").first.click()
        self.settle()

    def headline(self) -> str:
        return self.page.locator(".st-key-headline").inner_text()

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page, without a pointer hovering over it."""
        size = self.page.viewport_size
        assert size is not None
        self.page.mouse.move(size["width"] - 2, size["height"] - 2)
        height = self.page.get_by_test_id("stMain").evaluate("main => main.scrollHeight")
        self.page.set_viewport_size({"width": size["width"], "height": max(height, 500)})
        self.settle()
        self.page.screenshot(path=path)
        self.page.set_viewport_size(size)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


def _query(parameters: dict[str, str]) -> str:
    return "&".join(f"{key}={quote(value)}" for key, value in parameters.items())


class OpenTab(Protocol):
    """The type of the fixture `tab`."""

    def __call__(
        self, address: str, *, width: int = 1280, scheme: Scheme = "light"
    ) -> Dashboard: ...


@pytest.fixture(scope="session")
def server(
    recorded_runs: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(recorded_runs, free_port(), log) as address:
        yield address


@pytest.fixture(scope="session")
def states_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every state: see `tests.browser.states`."""
    return write_states(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="session")
def states_server(
    states_folder: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Serve the runs of every state."""
    log = tmp_path_factory.mktemp("states-server") / "log"
    with serve(states_folder, free_port(), log) as address:
        yield address


@pytest.fixture(scope="session")
def tabs(open_context: OpenContext) -> Callable[[str], Dashboard]:
    """The tab of a server, opened once and reused; one context, so one cache for all."""
    context = open_context()
    opened: dict[str, Dashboard] = {}

    def tab_of(address: str) -> Dashboard:
        if address not in opened:
            opened[address] = Dashboard(context.new_page(), address)
        return opened[address]

    return tab_of


@pytest.fixture
def tab(tabs: Callable[[str], Dashboard]) -> Iterator[OpenTab]:
    """The tab of a server with a width and a scheme; it fails the test on errors of the browser."""
    used: list[Dashboard] = []

    def tab_of(address: str, *, width: int = 1280, scheme: Scheme = "light") -> Dashboard:
        used.append(tabs(address))
        used[-1].look(width, scheme)
        return used[-1]

    yield tab_of
    complaints = [complaint for dashboard in used for complaint in dashboard.complaints]
    for dashboard in used:
        dashboard.complaints.clear()
    assert complaints == []
