"""The palette's contrasts and hues, computed as WCAG 2.2 and CSS Color 4 (OKLCH) define them."""

import math
import re
from itertools import combinations, pairwise, product
from pathlib import Path

import fsdp_inspect_app
import pytest
from fsdp_inspect_app.tables import HELD_LOOKS
from fsdp_inspect_app.timeline.rank_layout import LOOKS

from fsdp_inspect.report import palette

KINDS = (*LOOKS, palette.OTHER, palette.EXPOSED)
MEMORY = (*palette.MEMORY_LOOKS.values(), *HELD_LOOKS.values())
PAGES = ("#ffffff", "#f7f8fa", "#f4f6f8", "#12161b", "#171c22", "#1c2229")
"""Backgrounds of the dashboard and the report."""
ROOT = Path(__file__).parents[2]
LEAST_HUES_APART = 20
GREY = 0.035
"""The highest chroma of a grey, which has no hue to tell apart."""


def linear(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour):
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def chroma_and_hue(colour):
    """Chroma, and hue in degrees."""
    red, green, blue = linear(colour)
    long = math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue)
    middle = math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue)
    short = math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue)
    a = 1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short
    b = 0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short
    return math.hypot(a, b), math.degrees(math.atan2(b, a)) % 360


def test_the_measures_give_the_published_values():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert chroma_and_hue("#ff0000") == pytest.approx((0.2577, 29.23), abs=0.01)


def test_a_wait_has_the_look_of_its_collective_and_without_a_unit_that_of_others():
    assert palette.look_of_wait("all_gather", "layers.0") is palette.EXPOSED_ALL_GATHER
    assert palette.look_of_wait("all_reduce", "") is palette.EXPOSED_ALL_REDUCE
    assert palette.look_of_wait("broadcast", "layers.0") is palette.EXPOSED_OTHER
    assert palette.look_of_wait("all_gather", None) is palette.EXPOSED_OTHER


def test_every_exposed_part_is_hatched():
    exposed = [look for look in palette.PART_LOOKS.values() if look.label.startswith("exposed")]
    assert len(exposed) == 4
    assert all(look.hatched for look in exposed)


def test_no_kind_of_time_shares_a_hue_with_a_category_of_memory():
    for kind, category in product(KINDS, MEMORY):
        (chroma, hue), (other_chroma, other) = map(chroma_and_hue, (kind.colour, category.colour))
        apart = abs((hue - other + 180) % 360 - 180)
        is_grey = min(chroma, other_chroma) <= GREY
        assert is_grey or apart >= LEAST_HUES_APART, (kind.label, category.label)


@pytest.mark.parametrize(
    "looks", [KINDS, (*palette.MEMORY_LOOKS.values(),)], ids=["time", "memory"]
)
def test_one_colour_has_one_meaning(looks):
    stops = [*palette.HOST_STOP_LOOKS.values()]  # one meaning, in a lane of their own
    plain = [look for look in dict.fromkeys(looks) if not look.hatched and look not in stops[1:]]
    for one, other in combinations(plain, 2):
        assert one.colour != other.colour, (one.label, other.label)


@pytest.mark.parametrize("look", [*dict.fromkeys((*KINDS, *MEMORY))], ids=lambda look: look.label)
def test_marks_and_their_text_have_enough_contrast(look):
    assert min(contrast(look.colour, page) for page in PAGES) >= 3
    assert contrast(look.colour, look.ink) >= 4.5


def test_the_pages_are_those_of_the_theme():
    theme = (Path(fsdp_inspect_app.__file__).parent / ".streamlit/config.toml").read_text()
    written = [line.split('"')[1] for line in theme.splitlines() if "ackgroundColor =" in line]
    assert set(written) <= {*PAGES}


DEFICIENCIES = {
    "normal vision": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Linear RGB as dichromats see it: Machado, Oliveira and Fernandes (2009), severity 1."""


def seen(colour, vision):
    """CIE L*a*b* (D65) of a colour, as this vision sees it."""
    given = linear(colour)
    rgb = [sum(a * b for a, b in zip(row, given, strict=True)) for row in DEFICIENCIES[vision]]
    red, green, blue = (min(max(value, 0), 1) for value in rgb)
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (
        math.cbrt(value) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116
        for value in (x, y, z)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lab_of_red_is_the_published_one():
    assert seen("#ff0000", "normal vision") == pytest.approx((53.24, 80.09, 67.20), abs=0.02)


@pytest.mark.parametrize("vision", DEFICIENCIES)
@pytest.mark.parametrize(
    "looks", [palette.PART_LOOKS, palette.MEMORY_LOOKS], ids=["time", "memory"]
)
def test_neighbours_in_a_bar_differ_for_every_vision(looks, vision):
    order = list(looks.values())
    pairs = [*pairwise(order), *zip(order, order[2:], strict=False)]
    least = 20 if vision == "normal vision" else 12
    for one, other in pairs:
        apart = math.dist(seen(one.colour, vision), seen(other.colour, vision))
        assert apart >= least, (one.label, other.label, apart)


def test_colours_stand_in_one_module():
    places = [*(ROOT / "fsdp_inspect").rglob("*.py"), *(ROOT / "app").rglob("*.py")]
    found = {path.name for path in places if re.search(r"\"#[0-9A-Fa-f]{6}\"", path.read_text())}
    assert found == {"palette.py"}
