"""Every page has headings without a skipped level, few words, and its run in its title."""

from itertools import pairwise

import pytest
from fsdp_inspect_app.loading import name_runs
from fsdp_inspect_app.pages import LIVE, SECTIONS, is_about_one_run

from fsdp_inspect.store.folder import list_runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = [page for section in SECTIONS.values() for page in section if page.name != LIVE]
MOST_WORDS = {"overview": 66, "advice": 75}
"""60 on other pages. Overview also names the largest part of the step and the contents of "other";
Advice has the reasons and all risks beside the change."""
LEVELS = """() => [...document.querySelectorAll('[data-testid=stMain] :is(h1,h2,h3,h4,h5,h6)')]
  .map((heading) => Number(heading.tagName[1]))"""
PROSE = """() => {
  const words = [];
  const places = '[data-testid=stMain] :is(h1, [data-testid=stMarkdownContainer] :is(p, li))';
  for (const place of document.querySelectorAll(places)) {
    const box = place.getBoundingClientRect();
    const named = 'button, label, a, [data-testid=stSlider], [data-testid=stMetric], '
      + '[data-testid=stExpander] summary';
    if (box.height && box.top < innerHeight && !place.closest(named))
      words.push(...place.innerText.split(/\\s+/).filter((word) => /\\w/.test(word)));
  }
  return words;
}"""
"""The words of the headline and of all sentences in the first window: not the titles of cards, the
labels of controls, tiles, charts and tables."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_an_outline_few_words_and_a_title(server, tab, recorded_runs, page):
    dashboard = tab(server)
    runs = list_runs(recorded_runs)
    names = name_runs(runs)
    found: list[str] = []
    for run in runs:
        dashboard.go(page.address, run=run.id)
        levels = dashboard.page.evaluate(LEVELS)
        if levels[:1] != [1] or levels.count(1) != 1:
            found.append(f"{run.id}: starts with {levels}")
        if any(after > before + 1 for before, after in pairwise(levels)):
            found.append(f"{run.id}: skips a level: {levels}")
        words = dashboard.page.evaluate(PROSE)
        if len(words) > MOST_WORDS.get(page.name, 60):
            found.append(f"{run.id}: {len(words)} words: {' '.join(words)}")
        if is_about_one_run(page):
            title = f"{page.title} - {names[run.id]} - FSDP Inspect"
            if dashboard.page.title() != title:
                found.append(f"{run.id}: the tab is {dashboard.page.title()!r}")
    assert not found, "\n".join(found)
