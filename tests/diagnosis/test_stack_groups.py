"""Stacks of equal ranks are one group, and library frames are folded."""

from fsdp_inspect.diagnosis.stack_groups import group_stacks
from fsdp_inspect.report.diagnosis_pictures import fold_stack
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump, parse_dump

_OUTER = '  File "train.py", line 9 in main\n  File "train.py", line 99 in <module>\n'
_LIBRARY = '  File "/x/site-packages/torch/nn/modules/module.py", line 1 in call\n'


def dump(*inner: str) -> list[StackDump]:
    frames = "".join(inner)
    found = parse_dump(
        '{"training_thread": "0x01", "statements": {"train.py:5": "batch = next(loader)"}}\n'
        f"Thread 0x01 (most recent call first):\n{frames}{_OUTER}",
        DumpSource.WATCHDOG,
    )
    assert found is not None
    return [found]


def at(line: int) -> str:
    return f'  File "train.py", line {line} in step\n'


def test_equal_stacks_are_one_group_and_the_smallest_group_comes_first() -> None:
    groups = group_stacks({0: dump(at(7)), 1: dump(at(5)), 2: dump(at(7)), 3: []})

    assert [group.ranks for group in groups] == [(1,), (0, 2)]
    assert [group.num_shared for group in groups] == [2, 2]


def test_a_stack_shows_the_users_lines_and_folds_the_rest() -> None:
    groups = group_stacks({0: dump(at(7)), 1: dump(_LIBRARY, _LIBRARY, _LIBRARY, at(5))})
    folded = next(fold_stack(group) for group in groups if group.ranks == (1,))

    assert [frame.text for frame in folded] == [
        "2 frames as in the other stacks, to main (train.py:9)",
        "step (train.py:5)",
        "2 frames in torch.nn",
        "call (modules/module.py:1)",
    ]
    assert folded[1].statement == "batch = next(loader)"


def test_a_single_stack_shares_nothing() -> None:
    (group,) = group_stacks({0: dump(at(7)), 1: dump(at(7))})
    assert [frame.text for frame in fold_stack(group)] == [
        "<module> (train.py:99)",
        "main (train.py:9)",
        "step (train.py:7)",
    ]
