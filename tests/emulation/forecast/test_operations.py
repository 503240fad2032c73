"""An error in one of torch's formulas drops a count, and nothing else."""

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_inspect.emulation.forecast.tracked_step import OperationCounter


def test_a_formula_that_fails_drops_its_count_with_a_note(monkeypatch):
    def broken(*args, **kwargs):
        raise AssertionError

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    counter = OperationCounter(lambda: (0, "forward"))
    with counter:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 3, 2))
    assert sum(count.whole for count in counter.counts()) == 2 * (2 * 3 * 2)
    (note,) = counter.notes()
    assert "`mm` are not counted" in note
    assert torch.__version__ in note
    assert "AssertionError" in note


def test_formulas_that_hold_leave_no_note():
    counter = OperationCounter(lambda: (0, "forward"))
    with counter:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    assert counter.notes() == []
