"""Format durations, bytes, rates, ratios and names as short text.

Text uses powers of 1024 for memory (GiB) and powers of 1000 for bandwidth (GB/s), as the field
does. Numbers have three significant digits, and thousands are separated with a comma. `None` is
formatted as an en dash: a missing number is never shown as 0.
"""

import unicodedata
from collections.abc import Iterable

MISSING = "–"
_LAYOUT = frozenset("\n\t")
_CONTROL_PICTURES = 0x2400
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what moves a cursor, turns text around or cannot be encoded."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_MEMORY_STEPS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_RATE_STEPS = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s"))
_COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_ROUNDS_UP = 0.9995
"""From this fraction of a unit on, three digits round to the unit: 999.6 µs is 1.00 ms."""


def format_ns(value: float | None) -> str:
    """Format a duration: `413 ms`, `18.0 µs`, `1.20 s`."""
    if value is None:
        return MISSING
    if abs(value) < 1:
        return "0 ns" if value == 0 else f"{value:.2f} ns"
    return _scale(value, _TIME_STEPS)


def format_ms(value: float | None) -> str:
    """Format a moment or duration always in milliseconds, to compare it with others: `0.018`."""
    return MISSING if value is None else f"{value / 1e6:,.3f}"


def format_bytes(value: float | None) -> str:
    """Format an amount of memory in powers of 1024: `38.2 GiB`."""
    return MISSING if value is None else _scale(value, _MEMORY_STEPS)


def format_bytes_per_s(value: float | None) -> str:
    """Format a bandwidth in powers of 1000: `26.5 GB/s`."""
    return MISSING if value is None else _scale(value, _RATE_STEPS)


def format_count(value: float | None) -> str:
    """Format a count in powers of 1000: `1.24B` parameters."""
    if value is None:
        return MISSING
    if abs(value) >= _COUNT_STEPS[-1][0] * _ROUNDS_UP:
        return _scale(value, _COUNT_STEPS, separator="")
    is_whole = abs(value - round(value)) < 0.005
    return f"{value:.0f}" if is_whole else f"{value:.2g}" if abs(value) < 10 else f"{value:.3g}"


def format_ratio(value: float | None) -> str:
    """Format a ratio from 0 to 1 as a percentage: `14.9%`, `10%`."""
    return MISSING if value is None else _percent(value)


def format_signed(ratio: float) -> str:
    """Format a relative change with its sign: `+14.9%`. A change that rounds to 0 has no sign."""
    text = _percent(abs(ratio))
    return text if text in ("0%", "0.0%") else f"{'-' if ratio < 0 else '+'}{text}"


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


def _scale(value: float, steps: Iterable[tuple[float, str]], separator: str = " ") -> str:
    """The value in the largest unit in which it is at least 1; below all units, in the last."""
    size, suffix = 1.0, ""
    for size, suffix in steps:
        if abs(value) >= size * _ROUNDS_UP:
            break
    is_whole = size == 1 and float(value).is_integer()
    digits = f"{value:,.0f}" if is_whole else _three_digits(value / size)
    return f"{digits}{separator}{suffix}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def _percent(ratio: float) -> str:
    percent = 100 * ratio
    is_whole = abs(percent) >= 99.95 or abs(percent - round(percent)) < 1e-9
    return f"{percent:,.0f}%" if is_whole else f"{percent:.1f}%"
