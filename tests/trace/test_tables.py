import numpy as np
import pytest

from fsdp_inspect.trace.tables import ScalarTable


def scalars(*values):
    return ScalarTable.from_rows(
        [
            {"step": step, "name": 0, "time_ns": 0, "value": value}
            for step, value in enumerate(values)
        ]
    )


def test_columns_have_the_types_of_the_file():
    table = scalars(1.5, 2.5)
    assert {name: column.dtype for name, column in table.columns().items()} == {
        name: np.dtype(dtype) for name, dtype in ScalarTable.DTYPES.items()
    }


def test_a_mask_and_an_index_both_choose_rows():
    table = scalars(1.0, 2.0, 3.0)
    assert table.where(table.value > 1.5).value.tolist() == [2.0, 3.0]
    assert table.where(np.array([2, 0])).value.tolist() == [3.0, 1.0]


def test_a_mask_that_chooses_every_row_gives_the_table_itself():
    table = scalars(1.0, 2.0)
    assert table.where(table.value > 0) is table
    assert table.where(np.array([1, 0])).value.tolist() == [2.0, 1.0]


def test_a_mask_of_another_length_is_a_mistake():
    with pytest.raises(AssertionError, match="a mask of 2 for 3 rows"):
        scalars(1.0, 2.0, 3.0).where(np.array([True, False]))


def test_consecutive_rows_are_a_view_and_not_a_copy():
    table = scalars(1.0, 2.0, 3.0)
    part = table.between(1, 3)
    assert part.value.tolist() == [2.0, 3.0]
    assert np.shares_memory(part.value, table.value)


def test_tables_are_joined_in_the_given_order():
    joined = ScalarTable.concat([scalars(1.0), ScalarTable.empty(), scalars(2.0)])
    assert (len(joined), joined.value.tolist()) == (2, [1.0, 2.0])


def test_no_tables_join_to_the_empty_one():
    assert len(ScalarTable.concat([])) == 0


def test_unknown_columns_are_ignored_and_missing_ones_refused():
    columns = {**scalars(1.0).columns(), "of_a_later_version": np.array([1])}
    assert len(ScalarTable.from_columns(columns)) == 1
    del columns["value"]
    with pytest.raises(KeyError, match="value"):
        ScalarTable.from_columns(columns)
