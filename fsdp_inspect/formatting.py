"""How do numbers read? Nanoseconds, bytes, rates and ratios as short text.

Text uses powers of 1024 for memory (GiB) and powers of 1000 for bandwidth (GB/s), as the field
does. `None` reads as an en dash: a missing number is never shown as 0.
"""

import unicodedata
from collections.abc import Iterable

MISSING = "–"
_LAYOUT = frozenset("\n\t")
_CONTROL_PICTURES = 0x2400
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what moves a cursor, turns text around or cannot be encoded."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_MEMORY_STEPS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_RATE_STEPS = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def format_ns(value: float | None) -> str:
    """A duration: `412.6 ms`, `18.0 µs`, `1.20 s`."""
    if value is None:
        return MISSING
    for size, suffix in _TIME_STEPS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {suffix}"
    return "0 ns" if value == 0 else f"{value:.2f} ns"


def format_ms(value: float | None) -> str:
    """A duration always in milliseconds, for columns that must compare by eye: `0.018`."""
    return MISSING if value is None else f"{value / 1e6:.3f}"


def format_bytes(value: float | None) -> str:
    """An amount of memory in powers of 1024: `38.2 GiB`."""
    if value is None:
        return MISSING
    for size, suffix in _MEMORY_STEPS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {suffix}"
    return f"{value:.0f} B"


def format_bytes_per_s(value: float | None) -> str:
    """A bandwidth in powers of 1000: `26.5 GB/s`."""
    if value is None:
        return MISSING
    for size, suffix in _RATE_STEPS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {suffix}"
    return f"{value:.0f} B/s"


def format_count(value: float | None) -> str:
    """A count in powers of 1000: `1.24B` parameters."""
    if value is None:
        return MISSING
    for size, suffix in _COUNT_STEPS:
        if abs(value) >= size:
            return f"{_three_digits(value / size)}{suffix}"
    is_whole = abs(value - round(value)) < 0.005
    return f"{value:.0f}" if is_whole else f"{value:.2g}" if abs(value) < 10 else f"{value:.1f}"


def format_ratio(value: float | None) -> str:
    """A ratio from 0 to 1 as a percentage: `14.9 %`."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def format_signed(ratio: float) -> str:
    """A relative change with its sign: `+14.9 %`; what rounds to nothing has none: `0.0 %`."""
    text = f"{100 * ratio:+.1f} %"
    return text[1:] if text[1:] == "0.0 %" else text


def find_spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring numbers as the first and last of each, ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def format_numbers(numbers: Iterable[int]) -> str:
    """Whole numbers as text, runs of them in short: `0-3, 7`; `none` if there are none."""
    spans = find_spans(numbers)
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans) or "none"


def format_unit(fqn: str) -> str:
    """The name of an FSDP unit; the root's empty name reads `(root)`."""
    return fqn or "(root)"


def format_owner(fqn: str | None, is_fsdp: bool | None) -> str:
    """Whose communication: a unit's, or nobody's that is known.

    Args:
        fqn: Of the unit; None: it belongs to none.
        is_fsdp: False: FSDP did not issue it. None: the source does not tell who did.
    """
    if fqn is not None:
        return format_unit(fqn)
    return "(not FSDP)" if is_fsdp is False else "(no unit)"


def show_controls(text: str) -> str:
    """The same text with control characters as pictures of themselves (`␛[31m`), one for one.

    For text that holds names from elsewhere and goes to a terminal, which would obey them; line
    ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_show_control(character) for character in text)


def _show_control(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _UNSHOWN:
        return character
    code = ord(character)
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.1f}" if magnitude < 1000 else f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"


def format_category(category: str) -> str:
    """A memory category in words: `all-gather buffer`."""
    hyphenated = category.replace("all_gather", "all-gather")
    return hyphenated.replace("reduce_scatter", "reduce-scatter").replace("_", " ")
