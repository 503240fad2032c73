"""Ranks against collectives: rows in the order of issue, columns of equal ranks."""

from fsdp_inspect.diagnosis.collective_grid import (
    ROWS_BEFORE,
    CellState,
    CollectiveGrid,
    lay_out_collectives,
)
from fsdp_inspect.diagnosis.waits import find_waits
from fsdp_inspect.store.reduction.collective_order import find_order_differences
from fsdp_inspect.trace.black_box import BlackBox
from tests.boxes import Call, make_box

RANKS = (0, 1, 2)
DONE = [Call(0), Call(1), Call(2)]


def grid_of(*calls: list[Call]) -> CollectiveGrid:
    return grid_of_boxes({rank: make_box(each, RANKS) for rank, each in enumerate(calls)})


def grid_of_boxes(boxes: dict[int, BlackBox]) -> CollectiveGrid:
    differences = find_order_differences(boxes)
    waits = find_waits(boxes)
    grid = lay_out_collectives(
        boxes, differences[0] if differences else None, waits[0] if waits else None, waits
    )
    assert grid is not None
    return grid


def states(grid: CollectiveGrid) -> dict[tuple[int, ...], list[str]]:
    return {column.ranks: [cell.state.value for cell in column.cells] for column in grid.columns}


def test_the_late_rank_has_a_column_of_its_own() -> None:
    waiting = [*DONE, Call(3, has_finished=False)]

    grid = grid_of(waiting, DONE, waiting)

    assert states(grid) == {
        (0, 2): ["done", "done", "done", "waits"],
        (1,): ["done", "done", "done", "not issued"],
    }
    assert (grid.focus, [row.unit for row in grid.rows]) == (3, [0, 1, 2, 3])


def test_a_collective_without_an_end_is_not_done_unless_a_later_one_is() -> None:
    behind = [Call(0), Call(1, has_finished=False), Call(2), Call(3, has_finished=False)]
    ahead = [*DONE, Call(3), Call(4, has_finished=False)]
    grid = grid_of(ahead, behind, ahead)
    assert states(grid)[(1,)] == ["done", "done", "done", "issued", "not issued"]


def test_a_rank_that_left_out_a_collective_differs_from_there_on() -> None:
    grid = grid_of([*DONE, Call(3)], [Call(0), Call(2), Call(3)], [*DONE, Call(3)])

    assert states(grid) == {
        (0, 2): ["done", "done", "done", "done"],
        (1,): ["done", "differs", "differs", "not issued"],
    }
    column = next(column for column in grid.columns if column.ranks == (1,))
    assert [cell.issued.unit for cell in column.cells if cell.issued is not None] == [2, 3]
    assert grid.focus == 1


def test_only_the_collectives_around_the_one_in_question_are_shown() -> None:
    long = [Call(unit) for unit in range(100)]

    grid = grid_of(long, long, [*long[:60], Call(7), *long[61:]])

    assert grid.rows[grid.focus].unit == 60
    assert [row.unit for row in grid.rows] == list(range(60 - ROWS_BEFORE, 65))


def test_a_position_that_a_box_no_longer_holds_is_not_called_missing() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    short = boxes[1]
    boxes[1] = BlackBox(short.header, short.entries[2:], short.groups, short.places)

    assert states(grid_of_boxes(boxes))[(1,)] == ["not kept", "not kept", "done"]


def test_ranks_without_a_collective_have_no_grid() -> None:
    boxes = {rank: make_box([], RANKS) for rank in RANKS}
    assert lay_out_collectives(boxes, None, None, []) is None


def test_a_rank_that_issued_nothing_is_shown() -> None:
    grid = grid_of(DONE, [], DONE)
    assert states(grid)[(1,)] == [CellState.NOT_ISSUED] * 3
