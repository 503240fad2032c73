from hypothesis import given, strategies as st

from fsdp_inspect.comparison.sides import align_units
from tests.builders import RunBuilder


def units_of(*fqns):
    """Units by name; a comma joins the modules of one unit."""
    builder = RunBuilder(units=fqns)
    for fqn in fqns:
        builder.unit(fqn, modules=fqn.split(", "))
    return list(builder.units.values())


def names(rows):
    return [tuple(tuple(unit.fqn for unit in own) for own in row.members) for row in rows]


def test_units_of_one_name_stand_beside_each_other():
    rows = align_units([units_of("", "layers.0"), units_of("layers.0", "")])
    assert names(rows) == [(("",), ("",)), (("layers.0",), ("layers.0",))]
    assert not any(row.is_regrouped for row in rows)


def test_a_unit_of_one_run_only_has_an_empty_side():
    rows = align_units([units_of("layers.0"), units_of("layers.0", "head")])
    assert names(rows)[1] == ((), ("head",))


def test_merged_units_stand_beside_those_that_they_hold():
    merged = units_of("layers.0, layers.1", "head")
    rows = align_units([units_of("layers.0", "layers.1", "head"), merged])
    assert names(rows)[0] == (("layers.0", "layers.1"), ("layers.0, layers.1",))
    assert [row.is_regrouped for row in rows] == [True, False]


def test_a_split_block_stands_beside_its_halves():
    halves = units_of("layers.0.attention", "layers.0.ffn")
    [row] = align_units([units_of("layers.0"), halves])
    assert names([row]) == [(("layers.0",), ("layers.0.attention", "layers.0.ffn"))]


def test_a_part_with_a_unit_of_its_own_beside_the_block_is_only_in_that_run():
    rows = align_units([units_of("layers.0"), units_of("layers.0", "layers.0.up")])
    assert names(rows) == [(("layers.0",), ("layers.0",)), ((), ("layers.0.up",))]


def test_names_that_begin_alike_are_not_parts_of_each_other():
    rows = align_units([units_of("layers.1"), units_of("layers.10")])
    assert names(rows) == [(("layers.1",), ()), ((), ("layers.10",))]


def test_the_root_is_aligned_with_roots_only():
    rows = align_units([units_of(""), units_of("head")])
    assert names(rows) == [(("",), ()), ((), ("head",))]


def test_three_runs_are_aligned_at_once():
    rows = align_units(
        [units_of("a", "b"), units_of("a, b"), units_of("a", "b")],
    )
    assert names(rows) == [(("a", "b"), ("a, b",), ("a", "b"))]


FQNS = st.lists(st.sampled_from(["", "a", "a.x", "a.y", "b", "b.x", "c, d", "c", "d"]), unique=True)


@given(st.lists(FQNS, min_size=1, max_size=4))
def test_every_unit_is_in_exactly_one_row(sides):
    rows = align_units([units_of(*fqns) for fqns in sides])
    for side, fqns in enumerate(sides):
        found = [fqn for row in names(rows) for fqn in row[side]]
        assert sorted(found) == sorted(fqns)


@given(FQNS)
def test_a_run_against_itself_is_aligned_unit_by_unit(fqns):
    rows = align_units([units_of(*fqns), units_of(*fqns)])
    assert names(rows) == [((fqn,), (fqn,)) for fqn in fqns]
