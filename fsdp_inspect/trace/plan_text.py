"""Read and write plan files: TOML, compact enough to read for a model of 100 blocks.

    version = 1
    world_size = 8
    mesh = { replicate = 2, shard = 4 }
    forward_prefetch = 1

    [every_unit]
    param_dtype = "bfloat16"

    [[units]]
    modules = ["tok_embeddings"]

    [[units]]
    modules = ["layers.{0..31}"]

    [[units]]
    modules = ["norm", "lm_head"]
    reshard_after_forward = false

`every_unit` holds the settings that most units share; a unit's own settings take precedence.
`{0..31}` expands to each of these numbers. Adjacent entries with the same range after the same
prefix expand together: `["layers.{0..1}.a"]`, `["layers.{0..1}.b"]` are the units `layers.0.a`,
`layers.0.b`, `layers.1.a`, `layers.1.b`. "auto" is None: torch decides.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import tomli_w
from pydantic import BaseModel

from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import capitalize
from fsdp_inspect.reading import InvalidTextError, parse_toml

AUTO = "auto"

_HEADER = """\
# How a model is sharded: each [[units]] entry is one fully_shard call, or one for each number in
# a range. Apply it with fsdp_inspect.apply_plan(model, Plan.load(FILE)).
"""
_HEADER_OF_FSDP1 = """\
# How FullyShardedDataParallel (FSDP1) shards a model: each [[units]] entry is one wrapper, or one
# for each number in a range.
"""
_TABLES = ("accumulation", "checkpointing", "fsdp1", "forward_prefetch", "backward_prefetch")
_RANGE = re.compile(
    r"(?P<prefix>[^{}]*)\{(?P<first>[0-9]{1,6})\.\.(?P<last>[0-9]{1,6})\}(?P<suffix>[^{}]*)"
)
MAX_UNITS = 32_768
"""Largest number of units of a plan, with ranges written out; recordings number units with 16
bits."""
_MAX_PERIOD = 8

Modules = tuple[str, ...]


def defaults_of(unit_type: type[BaseModel]) -> dict[str, Any]:
    """The default of each setting of a unit, used if a file does not contain the setting."""
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in unit_type.model_fields.items()
        if not field.is_required()
    }


def parse(text: str | bytes) -> dict[str, Any]:
    """Read the fields of a plan with ranges and shared settings expanded; values are not checked.

    Raises:
        PlanError: The text is not TOML, or it contains an invalid range.
    """
    try:
        fields = parse_toml(text)
    except InvalidTextError as error:
        problem = f"{error}. Correct the file at that place."
        raise PlanError(capitalize(problem)) from error
    shared = fields.pop("every_unit", {})
    entries = fields.get("units")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError(
            "The plan has no units. Expected at least one [[units]] entry with modules = [...]. "
            'For the model as one unit, add modules = [""].'
        )
    if not isinstance(shared, dict) or "modules" in shared:
        raise PlanError(
            f"[every_unit] is {shared!r}. Expected settings of units, without modules. Move the "
            "modules to [[units]]."
        )
    fields["units"] = _expanded([{**shared, **entry} for entry in entries])
    _expand_checkpointing(fields)
    return {key: _without_auto(value) for key, value in fields.items()}


def render(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The text of a plan file.

    Args:
        fields: The plan's fields as plain values.
        defaults: The default of each setting of a unit.
    """
    units: Sequence[Mapping[str, Any]] = fields["units"]
    shared = _shared_settings(units, defaults)
    parts = [(_HEADER_OF_FSDP1 if fields["fsdp1"] else _HEADER) + _render_top(fields)]
    for table in _TABLES:
        if isinstance(fields[table], dict):
            parts.append(_render_table(f"[{table}]", _table_values(table, fields[table])))
    parts.append(_render_table("[every_unit]", shared))
    base = {**defaults, **shared}
    entries = [
        (
            tuple(unit["modules"]),
            {key: unit[key] for key in defaults if _differs(unit[key], base[key])},
        )
        for unit in units
    ]
    parts += [
        _render_table("[[units]]", {"modules": list(modules), **settings})
        for modules, settings in _compact(entries)
    ]
    return "\n".join(part for part in parts if part)


def _render_top(fields: Mapping[str, Any]) -> str:
    shown = {"version": fields["version"]}
    for key in ("world_size", "mesh", "forward_prefetch", "backward_prefetch", "notes"):
        value = fields[key]
        is_depth = key.endswith("_prefetch")
        if value and (not is_depth or isinstance(value, int)):
            shown[key] = value
    return _render_lines(shown)


def _table_values(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if table == "accumulation":
        is_default = values == {"microbatches": 1, "sync": "every"}
        return {} if is_default else dict(values)
    if table == "fsdp1":
        return dict(values)
    if table == "checkpointing":
        return {mode: _compact_names(names) for mode, names in values.items() if names}
    return {name: list(targets) for name, targets in values.items()}


def _render_table(heading: str, values: Mapping[str, Any]) -> str:
    return f"{heading}\n{_render_lines(values)}" if values else ""


def _render_lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items())


def _key(key: str) -> str:
    return tomli_w.dumps({key: 0}).rpartition(" = ")[0]


def _value(value: Any) -> str:
    if value is None:
        return f'"{AUTO}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    return tomli_w.dumps({"key": value}).removeprefix("key = ").rstrip("\n")


def _without_auto(value: Any) -> Any:
    if value == AUTO:
        return None
    if isinstance(value, list):
        return [_without_auto(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items()}
    return value


def _shared_settings(
    units: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The most frequent value of each setting, if it is not the default."""
    shared = {}
    for key, default in defaults.items():
        values = {_value(unit[key]): unit[key] for unit in units}
        (text, count), *_ = Counter(_value(unit[key]) for unit in units).most_common()
        if text != _value(default) and count > 1:
            shared[key] = values[text]
    return shared


def _differs(value: Any, other: Any) -> bool:
    """Whether two settings are written differently: Python treats True and 1 as equal."""
    return _value(value) != _value(other)


# Ranges: one entry for many units ------------------------------------------------------------

Entry = tuple[Modules, dict[str, Any]]


def _compact(entries: Sequence[Entry]) -> list[Entry]:
    """Join entries to ranges; entries that no equivalent range can replace stay as they are."""
    compact: list[Entry] = []
    position = 0
    while position < len(entries):
        block, length = _longest_block(entries, position)
        compact += block
        position += length
    written = [{**settings, "modules": list(names)} for names, settings in compact]
    spelled_out = [
        (tuple(unit["modules"]), {key: value for key, value in unit.items() if key != "modules"})
        for unit in _expand_units(written)
    ]
    return compact if _same_entries(spelled_out, entries) else list(entries)


def _longest_block(entries: Sequence[Entry], start: int) -> tuple[list[Entry], int]:
    """The range entries that replace the most entries from `start`, and the number replaced."""
    best: tuple[list[Entry], int] = ([entries[start]], 1)
    for period in range(1, min(_MAX_PERIOD, (len(entries) - start) // 2) + 1):
        block = entries[start : start + period]
        number = _first_number(block[0][0][0], entries[start + period][0][0])
        if number is None:
            continue
        prefix, first = number
        repeats = _count_repeats(entries, start, period, prefix, first)
        if repeats > 1 and repeats * period > best[1]:
            span = f"{{{first}..{first + repeats - 1}}}"
            ranged = [(_renumber(modules, prefix, first, span), own) for modules, own in block]
            best = (ranged, repeats * period)
    return best


def _first_number(name: str, later: str) -> tuple[str, int] | None:
    """The prefix and the number of the only segment in which a later name is greater by 1."""
    segments, others = name.split("."), later.split(".")
    differing = [i for i, (a, b) in enumerate(zip(segments, others, strict=False)) if a != b]
    if len(segments) != len(others) or len(differing) != 1:
        return None
    (place,) = differing
    is_next = _is_number(segments[place]) and others[place] == str(int(segments[place]) + 1)
    if not is_next:
        return None
    return "".join(f"{segment}." for segment in segments[:place]), int(segments[place])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and str(int(text)) == text


def _count_repeats(
    entries: Sequence[Entry], start: int, period: int, prefix: str, first: int
) -> int:
    block = entries[start : start + period]
    if not all(_has_number(name, prefix, first) for modules, _ in block for name in modules):
        return 0
    repeats = 1
    while True:
        place = start + repeats * period
        number = str(first + repeats)
        expected = [(_renumber(modules, prefix, first, number), own) for modules, own in block]
        if not _same_entries(entries[place : place + period], expected):
            return repeats
        repeats += 1


def _same_entries(entries: Sequence[Entry], expected: Sequence[Entry]) -> bool:
    return [(names, _render_lines(own)) for names, own in entries] == [
        (names, _render_lines(own)) for names, own in expected
    ]


def _has_number(name: str, prefix: str, number: int) -> bool:
    return name == f"{prefix}{number}" or name.startswith(f"{prefix}{number}.")


def _renumber(modules: Modules, prefix: str, number: int, replacement: str) -> Modules:
    start = len(f"{prefix}{number}")
    return tuple(f"{prefix}{replacement}{name[start:]}" for name in modules)


def _expanded(units: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All units with ranges written out.

    Raises:
        PlanError: A range is invalid, or there are more than `MAX_UNITS`.
    """
    expanded = list(islice(_expand_units(units), MAX_UNITS + 1))
    if len(expanded) > MAX_UNITS:
        raise PlanError(
            f"The plan has more than {MAX_UNITS:,} units with its ranges written out. Expected at "
            "most that many. Shorten the ranges."
        )
    return expanded


def _expand_units(units: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    position = 0
    while position < len(units):
        key = _range_of(units[position])
        end = position + 1
        while key and end < len(units) and _range_of(units[end]) == key:
            end += 1
        if key is None:
            yield units[position]
        else:
            _, first, last = key
            for number in range(first, last + 1):
                for unit in units[position:end]:
                    modules = [_at(name, number) for name in unit["modules"]]
                    yield {**unit, "modules": modules}
        position = end


def _range_of(unit: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """The prefix, first and last number of the range that all names of a unit share."""
    modules = unit.get("modules")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        return None  # the plan's own check reports the error
    ranges = {_parse_range(name) for name in modules}
    if len(ranges) > 1:
        raise PlanError(
            f"The unit {modules!r} mixes ranges. Expected the same range after the same prefix in "
            "each of its names. Write the names out instead."
        )
    return ranges.pop() if ranges else None


def _parse_range(name: str) -> tuple[str, int, int] | None:
    if "{" not in name:
        return None
    found = _RANGE.fullmatch(name)
    if not found or int(found["first"]) > int(found["last"]):
        raise PlanError(
            f"Invalid range in {name!r}. Expected one range from a smaller to a greater number, "
            "such as 'layers.{0..7}'. Correct it, or write the names out."
        )
    return found["prefix"], int(found["first"]), int(found["last"])


def _at(name: str, number: int) -> str:
    return _RANGE.sub(lambda found: f"{found['prefix']}{number}{found['suffix']}", name)


def _compact_names(names: Sequence[str]) -> list[str]:
    return [modules[0] for modules, _ in _compact([((name,), {}) for name in names])]


def _expand_checkpointing(fields: dict[str, Any]) -> None:
    table = fields.get("checkpointing")
    if not isinstance(table, dict):
        return
    fields["checkpointing"] = {
        mode: [unit["modules"][0] for unit in _expanded([{"modules": [n]} for n in names])]
        if isinstance(names, list) and all(isinstance(name, str) for name in names)
        else names
        for mode, names in table.items()
    }
