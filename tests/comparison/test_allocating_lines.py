"""The lines that allocate an increase, as a law over arbitrary compositions of memory."""

from collections import Counter

from hypothesis import given, strategies as st

from fsdp_inspect.comparison.increases import (
    UNKNOWN_LINE,
    Increase,
    LineBytes,
    MemoryMoment,
    find_lines,
)

AMOUNTS = st.lists(st.sampled_from([4, 8, 16, 64, 512]), max_size=3)


def moment_of(lines: list[tuple[str, int, str]], *, unknown: int = 0) -> MemoryMoment:
    """A moment with activations only.

    Args:
        lines: Unit, bytes and line.
        unknown: Bytes of `layers.0` without a line.
    """
    held: Counter[tuple[str, str]] = Counter({("layers.0", "activation"): unknown})
    for unit, num_bytes, _ in lines:
        held[unit, "activation"] += num_bytes
    rows = [LineBytes(unit, "activation", line, amount, 1) for unit, amount, line in lines]
    return MemoryMoment(held.total(), "layers.0", dict(held), tuple(rows))


def increase_of(before: MemoryMoment, after: MemoryMoment) -> Increase:
    units = tuple(sorted({unit for unit, _ in (*before.held, *after.held)}))
    return Increase("activation", units, before.bytes, after.bytes)


@given(old=AMOUNTS, new=AMOUNTS.filter(len), shift=st.integers(0, 90))
def test_new_lines_are_found_although_an_edit_moved_all_others(
    old: list[int], new: list[int], shift: int
) -> None:
    before = moment_of([("layers.0", amount, "") for amount in old])
    moved = [("layers.0", amount, f"old.py:{at + shift}") for at, amount in enumerate(old)]
    added = [("layers.0", amount, f"new.py:{at}") for at, amount in enumerate(new)]
    after = moment_of([*moved, *added])

    found = list(find_lines([increase_of(before, after)], before, after))

    assert all(line.is_changed for line in found)
    # Only a line with as many bytes as a new line may be listed with the new ones.
    assert {line.bytes for line in found} <= set(new)
    named = {line.line for line in found}
    assert not named or any(line.startswith("new.py") for line in named) or set(new) & set(old)


def test_a_line_that_holds_more_than_before_is_found() -> None:
    before = moment_of([("layers.0", 64, ""), ("layers.1", 64, "")])
    after = moment_of([("layers.0", 128, "model.py:3"), ("layers.1", 64, "model.py:3")])

    (line,) = find_lines([increase_of(before, after)], before, after)

    assert (line.units, line.bytes, line.is_changed) == (("layers.0",), 128, True)


def test_without_all_lines_of_the_baseline_none_is_called_changed() -> None:
    before = moment_of([("layers.0", 8, "")], unknown=56)
    after = moment_of([("layers.0", 8, "model.py:3"), ("layers.0", 120, "model.py:4")])

    found = list(find_lines([increase_of(before, after)], before, after))

    assert [line.line for line in found] == ["model.py:4"]  # line 3 holds what it held before
    assert not any(line.is_changed for line in found)


def test_bytes_without_a_line_that_grow_are_a_row_and_an_equal_line_is_none() -> None:
    before = moment_of([("layers.0", 16, "")])
    after = moment_of([("layers.0", 16, "data.py:8")], unknown=512)

    (row,) = find_lines([increase_of(before, after)], before, after)

    assert (row.line, row.units, row.bytes, row.count) == (UNKNOWN_LINE, ("layers.0",), 512, None)
    assert not row.is_changed


def test_a_run_without_lines_names_none() -> None:
    before, after = moment_of([], unknown=8), moment_of([], unknown=64)

    assert list(find_lines([increase_of(before, after)], before, after)) == []
    assert list(find_lines([increase_of(before, after)], before, None)) == []
