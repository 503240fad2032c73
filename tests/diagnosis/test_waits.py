"""The collectives in which ranks wait, read from black boxes that may be damaged."""

import itertools

import pytest

from fsdp_inspect.diagnosis.waits import find_waits
from tests.boxes import Call, make_box


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_entries_in_any_order_are_read(order: tuple[int, ...]) -> None:
    box = make_box([Call(0), Call(1, has_finished=False), Call(2)], (0, 1))
    box.entries["sequence"] = order

    for wait in find_waits({0: box, 1: make_box([Call(0)], (0, 1))}):
        assert wait.waiting == (0,)
        assert set(wait.absent) <= {1}
