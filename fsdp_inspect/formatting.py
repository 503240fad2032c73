"""Format durations, bytes, rates, ratios and names as short text.

Text uses powers of 1024 for memory (GiB) and powers of 1000 for bandwidth (GB/s), as the field
does. Numbers have three significant digits, and thousands are separated with a comma. `None` is
formatted as an en dash: a missing number is never shown as 0.
"""

import math
import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MISSING = "–"
ELLIPSIS = "..."
LONGEST_NAME = 16
"""The longest name of a unit that a table shows whole."""
_MODULES = ", "
"""Joins the modules of a unit."""
_COMMAND_ON_RUN = re.compile(r"(\bfsdp-inspect [a-z]+(?: [a-z]+)?) RUN\b")
_LAYOUT = frozenset("\n\t")
_FORMULA_STARTS = frozenset("=+-@＝＋－＠")
_CELL_STARTS = frozenset("\t\r\n")
_CONTROL_PICTURES = 0x2400
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control, direction, surrogate and line-separator characters."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_MEMORY_STEPS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_RATE_STEPS = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s"))
_COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_ROUNDS_UP = 0.9995
"""From this fraction of a unit on, three digits round to the unit: 999.6 µs is 1.00 ms."""
_MANY_TIMES = 10
"""From this factor on, a change is shown as a factor instead of a percentage."""


def make_encodable(text: str) -> str:
    """Replace each half of a surrogate pair by a question mark, because UTF-8 cannot encode it."""
    return text.encode(errors="replace").decode()


def format_ns(value: float | None) -> str:
    """Format a duration: `413 ms`, `18.0 µs`, `1.20 s`."""
    if value is None:
        return MISSING
    if abs(value) < 1:
        return "0 ns" if value == 0 else f"{value:.2f} ns"
    return _scale(value, _TIME_STEPS)


def format_change_ns(before: float, after: float) -> str:
    """Format a change of a duration with its sign; empty if both durations have the same text."""
    if format_ns(before) == format_ns(after):
        return ""
    return f"{'-' if after < before else '+'}{format_ns(abs(after - before))}"


def format_ms(value: float | None) -> str:
    """Format a moment or duration always in milliseconds, to compare it with others: `0.018`."""
    return MISSING if value is None else f"{value / 1e6:,.3f}"


def format_bytes(value: float | None) -> str:
    """Format an amount of memory in powers of 1024: `38.2 GiB`."""
    return MISSING if value is None else _scale(value, _MEMORY_STEPS)


def format_bytes_per_s(value: float | None) -> str:
    """Format a bandwidth in powers of 1000: `26.5 GB/s`."""
    if value == math.inf:
        return "unlimited"
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


def format_times(factor: float, unit: str = "x") -> str:
    """Format a factor: `75.5x`, `2,000x`."""
    return f"{factor:,.{num_decimals(factor)}f}{unit}"


def num_decimals(value: float) -> int:
    """The decimals that give a value of at least 1 three digits: 0 from 100 on."""
    return max(0, 3 - len(f"{value:.0f}"))


def format_signed(ratio: float) -> str:
    """Format a relative change with its sign: `+14.9%`; from 10 times the value on as `75.5x`.

    A change that rounds to 0 has no sign.
    """
    if ratio >= _MANY_TIMES - 1:
        return format_times(1 + ratio)
    text = _percent(abs(ratio))
    return text if text in ("0%", "0.0%") else f"{'-' if ratio < 0 else '+'}{text}"


def find_spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group neighbouring numbers into the first and last of each group, ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def find_missing_numbers(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The first and last of each group of whole numbers missing between these, ascending."""
    pairs = pairwise(sorted(numbers))
    return tuple((low + 1, high - 1) for low, high in pairs if high - low > 1)


def format_numbers(numbers: Iterable[int]) -> str:
    """Format whole numbers, neighbouring ones as a range: `0-3, 7`; `none` for no number."""
    return _format_spans(find_spans(numbers)) or "none"


def _format_spans(spans: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def format_attempts(spans: Iterable[tuple[int, int]]) -> str:
    """Format the first and last attempts of groups: `attempt 2`, `attempts 0-2, 7`."""
    text = _format_spans(spans)
    return f"{'attempt' if text.isdecimal() else 'attempts'} {text}"


def format_ranks(numbers: Sequence[int]) -> str:
    """Format ranks: `rank 2`, `ranks 0-3, 7`."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_numbers(numbers)}"


def format_steps(numbers: Sequence[int]) -> str:
    """Format steps: `step 4`, `steps 0-2, 7`."""
    return f"{'step' if len(numbers) == 1 else 'steps'} {format_numbers(numbers)}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Format a number of things: `1 rank`, `2 ranks`, `1,000 ranks`.

    Args:
        count: The number.
        noun: The thing, in the singular.
        nouns: Its plural; default: the singular with an `s`.
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def listed(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Format the first names of a list: `a, b, c`, or `a, b and 3 more`."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def format_setting(value: object) -> str:
    """Format a setting as configuration files do."""
    if value is None:
        return "(not set)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def capitalize(text: str) -> str:
    """The text with a large first letter; the rest stays, unlike with `str.capitalize`."""
    return text[:1].upper() + text[1:]


def format_cause(cause: str, *, in_list: bool = False) -> str:
    """A cause of a wait as text: `late issue`.

    The cause `straggler` is a wait for whichever rank is last, so it is no statement on one rank.

    Args:
        cause: The cause.
        in_list: Whether it is one of several in a cell, where it is as short as possible.
    """
    if cause == "straggler":
        return "last rank" if in_list else "waiting for the last rank"
    if cause == "bandwidth":  # of small messages, it is their latency
        return "transfer"
    return cause.replace("_", " ")


_CAUSES = {
    "serialized": "queued behind another collective",
    "straggler": "waiting for the last rank to arrive",
    "floor": "the floor, which can only be shortened",
    "blocking": "collectives block the host",
    "late_issue": "issued too late",
    "bandwidth": "limited by the transfer",
}


def phrase_cause(cause: str) -> str:
    """Format a cause for a sentence: `issued too late`."""
    return _CAUSES[cause]


def format_unit(fqn: str) -> str:
    """Format the name of a unit: the empty name of the root unit is shown as `(root)`."""
    return fqn or "(root)"


class WholeCategory(str):
    """A memory category of a run in which every rank has whole parameters: nothing is sharded."""

    __slots__ = ()


_OF_WHOLE = {
    "sharded_parameter": "parameter",
    "sharded_gradient": "gradient",
    "reduce_scatter_buffer": "bucket",
}


def format_category(category: str) -> str:
    """Format a memory category: `all-gather buffer`; of a run with DDP: `bucket`.

    Tensors from before a forward are batches, and what the script keeps from earlier steps.
    """
    if category == "input":
        return "input or kept"
    if isinstance(category, WholeCategory) and category in _OF_WHOLE:
        return _OF_WHOLE[category]
    hyphenated = category.replace("all_gather", "all-gather")
    return hyphenated.replace("reduce_scatter", "reduce-scatter").replace("_", " ")


_DIMENSIONS_OF_FSDP = frozenset({"shard", "replicate", "other"})
"""Mesh dimensions that do not describe a collective that FSDP did not issue."""


def format_owner(fqn: str | None, is_fsdp: bool | None = None, dimension: str = "other") -> str:
    """Format the owner of memory or a collective: the name of its unit, or a substitute.

    Args:
        fqn: The fqn of the unit; None if it belongs to no unit.
        is_fsdp: False if FSDP did not issue the collective; None if that is unknown.
        dimension: The dimension of the mesh, which names a collective without a unit: `(tp)`.
    """
    if fqn is not None:
        return format_unit(fqn)
    if dimension not in _DIMENSIONS_OF_FSDP:
        return f"({dimension})"
    return "(not FSDP)" if is_fsdp is False else "(no unit)"


@dataclass(frozen=True, slots=True)
class ShortNames:
    """Names of units without the prefix that they share."""

    prefix: str
    """Ends with a dot; empty if the names stay as they are."""

    def __call__(self, name: str) -> str:
        """Shorten a name: `model.decoder.layers.0` to `...layers.0`.

        A unit of several modules (`norm, lm_head`) has each module shortened.
        """
        if not self.prefix:
            return name
        return _MODULES.join(
            f"{ELLIPSIS}{module.removeprefix(self.prefix)}"
            if module.startswith(self.prefix)
            else module
            for module in name.split(_MODULES)
        )


def shorten_names(names: Iterable[str], longest: int = LONGEST_NAME) -> ShortNames:
    """Find the prefix to leave out of the names of units in a table.

    The prefix ends before the list that numbers the blocks, so `layers.0` stays whole. Two
    different names stay different, and each shortened name ends as its original.

    Args:
        names: All names of the table.
        longest: Names of at most this length stay as they are, if all are so short.
    """
    distinct = set(names)
    if all(len(name) <= longest for name in distinct):
        return ShortNames("")
    prefixes = {
        prefix
        for name in distinct
        for module in name.split(_MODULES)
        for prefix in _prefixes(module)
        if len(prefix) > len(ELLIPSIS) and " " not in prefix  # no module: `all_reduce 25.0 MiB`
    }
    best = ShortNames("")
    for prefix in sorted(prefixes):
        short = ShortNames(prefix)
        is_distinct = len(set(map(short, distinct))) == len(distinct)
        if is_distinct and _lengths(short, distinct) < _lengths(best, distinct):
            best = short
    return best


def _lengths(short: ShortNames, names: Collection[str]) -> tuple[int, int]:
    """The longest of the shortened names, which decides the width of a table, and their sum."""
    lengths = [len(short(name)) for name in names]
    return max(lengths), sum(lengths)


def _prefixes(module: str) -> Iterator[str]:
    """The prefixes of a module's fqn that end before its last part and before its first list."""
    parts = module.split(".")
    listed = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    for end in range(1, min(len(parts), listed)):
        yield ".".join(parts[:end]) + "."


def show_controls(text: str) -> str:
    """Replace each control character with a visible one (`␛[31m`), except line ends and tabs.

    A terminal executes control characters, and names in traces and run folders are not trusted.
    """
    if text.isprintable():
        return text
    return "".join(_show_control(character) for character in text)


def harmless_cell(text: str) -> str:
    """The text as a cell of a CSV file that neither a spreadsheet nor a terminal executes.

    A quote goes before a formula, as spreadsheets read one: after spaces too, and in full width.
    """
    shown = show_controls(text)
    is_formula = text.lstrip()[:1] in _FORMULA_STARTS or text[:1] in _CELL_STARTS
    return f"'{shown}" if text and is_formula else shown


def _show_control(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _UNSHOWN:
        return character
    code = ord(character)
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def _scale(value: float, steps: Iterable[tuple[float, str]], separator: str = " ") -> str:
    """The value in the largest unit in which it is at least 1; below all units, in the last."""
    ordered = tuple(steps)
    size, suffix = next(
        (step for step in ordered if abs(value) >= step[0] * _ROUNDS_UP), ordered[-1]
    )
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


def name_run(text: str, run: str) -> str:
    """Put a run in place of `RUN` into the commands of a text, so that they can be copied.

    Args:
        text: A sentence with commands such as `fsdp-inspect show RUN memory`.
        run: The run as the reader names it: a path or an address.
    """
    quoted = shlex.quote(run)
    return _COMMAND_ON_RUN.sub(lambda found: f"{found[1]} {quoted}", text)
