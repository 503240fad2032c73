"""Every page of every sample opens with one heading of at most 12 words and one number."""

import re

import pytest
from fsdp_inspect_app.loading import name_runs
from fsdp_inspect_app.pages import SECTIONS

from fsdp_inspect.store.folder import list_runs
from tests.app.conftest import start_app
from tests.app.test_pages import SAMPLE_IDS, SAMPLES

PAGES = [page.name for section in SECTIONS.values() for page in section]
MOST_WORDS = 12
_UNIT = r"(?:ns|us|µs|ms|s|min|h|B|KiB|MiB|GiB|TiB|%|x)(?!\w)"
_NUMBER = rf"[\d.,]*\d ?{_UNIT}"
NAMES = re.compile(r"`[^`]*`")


def numbers_of(headline: str) -> list[str]:
    """The quantities of a headline; a part and its whole (`46 ms of 368 ms`) are one.

    So are an estimate and its range in parentheses.
    """
    estimates = re.sub(rf" \((?:predicted: )?-?{_NUMBER} to -?{_NUMBER}\)", "", headline)
    return re.findall(rf"{_NUMBER}(?: of {_NUMBER})?", estimates)


def without_names(headline: str, names) -> str:
    """The headline with one word in place of each name of a run or unit."""
    shown = headline.replace("\\", "")
    for name in names:
        shown = shown.replace(name, "NAME")
    return NAMES.sub("NAME", shown)


@pytest.mark.parametrize(
    ("headline", "expected"),
    [
        ("Step 5, rank 0: 46 ms of 368 ms exposed.", 1),
        ("Predicted: 110 ms a step, 5.2% less than with the recorded plan.", 2),
        ("7 runs. Fastest: tiny-2-ranks, 122 ms per step.", 1),
        ("Peak 26.4 MiB on rank 1.", 1),
        ("The recommended plan saves 29.1% of the step (predicted: -2.1% to 51.7%).", 1),
    ],
)
def test_numbers_are_counted(headline, expected):
    assert len(numbers_of(headline)) == expected


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "sample",
    [SAMPLE_IDS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SAMPLE_IDS[1:])],
)
def test_a_page_opens_with_a_short_headline(sample, page):
    app = start_app(SAMPLES, page, run=sample)
    assert not app.exception
    [title] = app.title
    headline = without_names(title.value, name_runs(list_runs(SAMPLES)).values())
    assert len(headline.split()) <= MOST_WORDS, headline
    assert len(numbers_of(headline)) <= 1, headline
