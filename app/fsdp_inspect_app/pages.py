"""List the pages of the navigation, in order."""

from dataclasses import dataclass

FIRST = "runs"
LIVE = "live"

_ONE_RUN = "This run"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One page."""

    name: str
    title: str
    icon: str

    @property
    def path(self) -> str:
        """The path in Streamlit's form."""
        return f"app_pages/{self.name}/{self.name}.py"

    @property
    def address(self) -> str:
        """The address below the server's; the first page has the address of the server."""
        return "" if self.name == FIRST else self.name


SECTIONS: dict[str, tuple[PageFile, ...]] = {
    "": (
        PageFile("runs", "Runs", ":material/list:"),
        PageFile("trends", "Trends", ":material/trending_up:"),
        PageFile("sql", "SQL", ":material/database:"),
        PageFile("compare", "Compare", ":material/compare_arrows:"),
        PageFile("imports", "Import", ":material/input:"),
    ),
    _ONE_RUN: (
        PageFile("overview", "Overview", ":material/insights:"),
        PageFile("diagnosis", "Diagnosis", ":material/troubleshoot:"),
        PageFile("timeline", "Timeline", ":material/view_timeline:"),
        PageFile("units", "Units", ":material/stacks:"),
        PageFile("memory", "Memory", ":material/memory:"),
        PageFile("ranks", "Ranks", ":material/grid_on:"),
        PageFile("advice", "Advice", ":material/lightbulb:"),
        PageFile("what_if", "What-if", ":material/tune:"),
        PageFile("live", "Live", ":material/sensors:"),
    ),
}
"""The sections of the navigation with their pages."""
ALL_PAGES = tuple(page for section in SECTIONS.values() for page in section)


def is_about_one_run(page: PageFile) -> bool:
    """Whether the page shows the chosen run, not all runs."""
    return page in SECTIONS[_ONE_RUN]


def find_page(name: str) -> PageFile:
    """The page with that name.

    Raises:
        ValueError: No page has that name.
    """
    for page in ALL_PAGES:
        if page.name == name:
            return page
    raise ValueError(f"No page {name!r}. Pages: {', '.join(page.name for page in ALL_PAGES)}.")
