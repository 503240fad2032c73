"""Walk through the dashboard as a new user, and print clicks, seconds and answers as a table.

`python -m tests.browser.walkthrough` serves the samples, a damaged run and a killed run, asks the
questions of a new user in Chromium, and presses Back after each answer. docs/walkthrough.md has the
table. A step fails if its answer is missing, if Back does not restore the page before it, or if the
page does not fit the window.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from fsdp_inspect.store.folder import list_runs
from tests.browser.conftest import (
    CHROMIUM_ARGUMENTS,
    SAMPLES,
    Dashboard,
    fits_the_window,
    serve,
)
from tests.browser.gallery import CHROMIUM, free_port
from tests.browser.settling import prepare
from tests.browser.states import write_crashed

WIDTHS = (1280, 1024)
_NAME = {"x": 70, "y": 52}
"""The name in the first row of the list of runs."""
_BOX_X, _ROW_PX = 16, 35
_ANSWER = ".st-key-headline"


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, and what it took to see its answer."""

    question: str
    width: int
    clicks: int
    seconds: float
    answer: str
    back: str


@dataclass
class Walk:
    """A user in one window."""

    dashboard: Dashboard
    width: int
    answers: list[Answer] = field(default_factory=list)

    @property
    def page(self) -> Page:
        """The browser's page."""
        return self.dashboard.page

    def ask(
        self, question: str, *clicks: Callable[[], None], expected: str, leaves: bool = True
    ) -> None:
        """Click until the answer is shown, then press Back.

        Args:
            question: What the user wants to know.
            clicks: The clicks, in order.
            expected: A text that the page shows with the answer.
            leaves: Whether the last click opens another page.
        """
        before = self.dashboard.headline()
        began = time.monotonic()
        for click in clicks[:-1]:
            click()
            self.dashboard.settle()
        last = self.page.url
        clicks[-1]()
        if leaves:
            self.page.wait_for_url(lambda url: url.partition("?")[0] != last.partition("?")[0])
        self.dashboard.settle()
        seconds = time.monotonic() - began
        shown = self.page.get_by_test_id("stMain").inner_text()
        if expected not in shown:
            raise AssertionError(f"{question} {expected!r} is not in: {shown[:500]}")
        if not fits_the_window(self.page):
            raise AssertionError(f"{question} The page is wider than {self.width} px.")
        answer = self.dashboard.headline()
        back = self._go_back(before, leaves=leaves)
        self.answers.append(Answer(question, self.width, len(clicks), seconds, answer, back))

    def _go_back(self, before: str, *, leaves: bool) -> str:
        """Press Back once, and report whether the page before is shown again."""
        if not leaves:
            return "not needed"
        self.page.go_back()
        self.page.locator(_ANSWER, has_text=before).wait_for()
        self.dashboard.settle()
        return "restored"


def walk(dashboard: Dashboard, width: int) -> list[Answer]:
    """Ask all questions in a window of that width."""
    dashboard.look(width, "light")
    own = Walk(dashboard, width)
    page = dashboard.page

    def open_page(title: str) -> Callable[[], None]:
        return lambda: page.get_by_test_id("stSidebarNav").get_by_role("link", name=title).click()

    def click_name() -> None:
        page.get_by_test_id("stDataFrame").first.click(position=_NAME)

    def tick(row: int) -> Callable[[], None]:
        place = {"x": _BOX_X, "y": _NAME["y"] + row * _ROW_PX}
        return lambda: page.get_by_test_id("stDataFrame").first.click(position=place)

    dashboard.load("", search="tiny")
    own.ask("What limits the step, and why?", click_name, expected="Because")
    dashboard.load("", search="async")
    click_name()
    page.wait_for_url("**/overview**")
    dashboard.settle()
    own.ask("Which unit makes the GPUs wait?", open_page("Units"), expected="Largest waits")
    own.ask(
        "When does it wait?",
        lambda: page.get_by_role("link", name="Show evidence").first.click(),
        expected="Longest waits",
    )
    own.ask("What fills the memory at the peak?", open_page("Memory"), expected="by unit")
    own.ask("What should I change?", open_page("Advice"), expected="self-check")
    own.ask("What if another plan is used?", open_page("What-if"), expected="Predicted step")
    dashboard.load("", search="2-ranks")
    own.ask(
        "Did the change help?",
        tick(0),
        tick(1),
        lambda: page.get_by_role("link", name="Compare 2 runs").click(),
        expected="What changed from",
    )
    dashboard.load("", search="killed")
    own.ask("Why did the run die?", click_name, expected="Next")
    dashboard.load("", search="torn")
    own.ask("What remains of a damaged run?", click_name, expected="damaged")
    return own.answers


def write_runs(folder: Path) -> None:
    """The samples, a killed run, and a run whose table of events is torn."""
    for sample in list_runs(SAMPLES):
        shutil.copytree(sample.path, folder / sample.path.name)
    write_crashed(folder / "killed")
    torn = folder / "torn"
    shutil.copytree(SAMPLES / "tiny-2-ranks", torn)
    table = next(torn.glob("attempt-*/rank-00001/events.parquet"))
    os.truncate(table, table.stat().st_size // 2)


def render(answers: list[Answer]) -> str:
    """The table as Markdown."""
    lines = [
        "| question | window | clicks | seconds | headline | Back |",
        "|---|--:|--:|--:|---|---|",
    ]
    lines += [
        f"| {one.question} | {one.width} px | {one.clicks} | {one.seconds:.1f} | {one.answer} | "
        f"{one.back} |"
        for one in answers
    ]
    return "\n".join(lines)


def main() -> None:
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        sys.exit("There is no chromium on PATH. Install it: apt-get install chromium")
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        write_runs(Path(place) / "runs")
        browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGUMENTS))
        with serve(Path(place) / "runs", free_port(), Path(place) / "log") as address:
            for width in WIDTHS:
                page = prepare(browser.new_context()).new_page()
                answers += walk(Dashboard(page, address), width)
                page.context.close()
        browser.close()
    print(f"Load of the machine at the end: {os.getloadavg()[0]:.1f}\n")
    print(render(answers))


if __name__ == "__main__":
    main()
