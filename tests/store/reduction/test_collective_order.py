"""The first collective in which ranks differ, and the kind of the difference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.store.reduction.collective_order import (
    Difference,
    find_difference,
    find_order_differences,
)
from fsdp_inspect.store.reduction.order_wording import describe_difference
from fsdp_inspect.trace.black_box import BlackBox, CodePlace
from fsdp_inspect.trace.codes import NO_UNIT, EventKind
from tests.boxes import Call, make_box

RANKS = (0, 1, 2)
USUAL = [Call(unit) for unit in (0, 1, 2, 3, 4)]
NAMES = ["", "a", "b", "c", "d"]


def boxes(deviant: list[Call], usual: list[Call] = USUAL) -> dict[int, BlackBox]:
    return {rank: make_box(deviant if rank == 1 else usual, RANKS) for rank in RANKS}


@pytest.mark.parametrize(
    ("calls", "position", "difference"),
    [
        ([Call(0), Call(2), Call(3), Call(4)], 1, Difference.SKIPPED),
        ([Call(0), Call(1), Call(1), Call(2), Call(3)], 2, Difference.EXTRA),
        ([Call(0), Call(2), Call(1), Call(3), Call(4)], 1, Difference.SWAPPED),
        ([Call(0), Call(1, bytes=8), Call(2)], 1, Difference.SIZE),
        ([Call(0), Call(1, dtype=2), Call(2)], 1, Difference.DTYPE),
    ],
)
def test_the_rank_that_differs_from_most_is_the_culprit(
    calls: list[Call], position: int, difference: Difference
) -> None:
    found = find_difference(boxes(calls), "all")

    assert found is not None
    assert (found.culprits, found.is_majority) == ((1,), True)
    assert (found.sequence, found.difference, found.is_first) == (position, difference, True)


def test_of_two_ranks_the_one_that_departs_from_its_step_before_is_the_culprit() -> None:
    steps = [call._replace(step=step) for step in (0, 1) for call in USUAL]
    skipped = [*steps[:6], *steps[7:]]
    pair = {0: make_box(steps, (0, 1)), 1: make_box(skipped, (0, 1))}

    found = find_difference(pair, "all")

    assert found is not None
    assert (found.culprits, found.is_majority) == ((1,), False)


def test_of_two_ranks_without_a_step_before_no_rank_is_named() -> None:
    pair = {0: make_box(USUAL, (0, 1)), 1: make_box(USUAL[1:], (0, 1))}

    found = find_difference(pair, "all")

    assert found is not None
    assert found.culprits == ()
    sentence = describe_difference(found, NAMES)
    assert sentence.startswith("The ranks issued different collectives in step 0: rank 0 the all")


def test_of_two_ranks_the_dtypes_of_one_collective_are_told_without_a_culprit() -> None:
    pair = {0: make_box([Call(1)], (0, 1)), 1: make_box([Call(1, bytes=32, dtype=2)], (0, 1))}

    found = find_difference(pair, "all")

    assert found is not None
    assert (found.culprits, found.difference) == ((), Difference.DTYPE)
    assert describe_difference(found, NAMES).startswith(
        "The ranks issued different collectives in step 0: rank 0 the all-gather of a in forward "
        "in float32 (train.py:7); rank 1 the all-gather of a in forward in bfloat16 (train.py:7)."
    )


def test_of_two_ranks_the_sizes_of_one_line_are_told_without_a_culprit() -> None:
    """Of no unit, so only the line shows that it is one collective."""
    pair = {
        rank: make_box([Call(NO_UNIT, bytes=size, kind=EventKind.ALL_REDUCE)], (0, 1))
        for rank, size in enumerate((12288, 16384))
    }

    found = find_difference(pair, "all")

    assert found is not None
    assert (found.culprits, found.difference) == ((), Difference.SIZE)
    assert describe_difference(found, NAMES).startswith(
        "The ranks issued different collectives in step 0: rank 0 an all-reduce of no unit in "
        "forward with 12.0 KiB (train.py:7); rank 1 an all-reduce of no unit in forward with 16.0"
    )


def test_a_difference_older_than_what_is_kept_is_told_without_its_place() -> None:
    whole = boxes([Call(9), *USUAL[1:]])
    cut = {
        rank: BlackBox(box.header, box.entries[2:], box.groups, box.places)
        for rank, box in whole.items()
    }

    found = find_difference(cut, "all")

    assert found is not None
    assert (found.is_unknown, found.is_first, found.culprits) == (True, False, ())
    assert describe_difference(found, NAMES) == (
        "The ranks issued different collectives before step 0. The first difference is older than "
        "the stored collectives. Results since then are wrong."
    )


def test_a_rank_that_is_behind_does_not_differ() -> None:
    assert find_order_differences(boxes(USUAL[:3])) == []


def test_a_missing_rank_does_not_hide_the_difference() -> None:
    known = boxes([Call(0), Call(2), Call(3)])
    del known[2]

    found = find_difference(known, "all")

    assert found is not None
    assert found.sequence == 1


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30), st.data())
def test_a_rank_that_is_behind_does_not_hide_the_difference_of_others(
    units: list[int], data: st.DataObject
) -> None:
    """The rank that is behind may be one of a majority, so it can clear or accuse nobody."""
    place = data.draw(st.integers(0, len(units) - 1))
    num_reached = data.draw(st.integers(1, len(units)))
    usual = [Call(unit) for unit in units]
    changed = [*usual[:place], Call(units[place] + 5), *usual[place + 1 :]]
    known = {rank: make_box(changed if rank == 1 else usual, range(4)) for rank in RANKS}
    known[3] = make_box(usual[:num_reached], range(4))

    found = find_difference(known, "all")

    assert found is not None
    assert (found.sequence, found.is_first) == (place, True)
    assert found.culprits == ((1,) if num_reached > place else ())
    assert found.is_majority is (num_reached > place)


def test_sizes_of_all_to_all_may_differ() -> None:
    one = find_difference(boxes([Call(0, kind=EventKind.ALL_TO_ALL)]), "all")
    assert one is not None  # the kind differs
    uneven = boxes(
        [Call(0, bytes=0, kind=EventKind.ALL_TO_ALL)], [Call(0, bytes=0, kind=EventKind.ALL_TO_ALL)]
    )
    assert find_difference(uneven, "all") is None


@given(st.lists(st.integers(0, 4), min_size=3, max_size=30), st.data())
def test_the_first_changed_position_is_found(units: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(units) - 1))
    usual = [Call(unit) for unit in units]
    changed = [*usual[:place], Call(units[place] + 5), *usual[place + 1 :]]

    found = find_difference(boxes(changed, usual), "all")

    assert found is not None
    assert (found.sequence, found.culprits) == (place, (1,))
    num_since = len(units) - place
    assert found.num_since == num_since
    assert np.all(boxes(changed, usual)[1].entries["finished_ns"] > 0)


def test_the_sentence_names_rank_unit_step_and_line() -> None:
    found = find_difference(boxes([Call(0), Call(2), Call(3)]), "all")

    assert found is not None
    assert describe_difference(found, NAMES) == (
        "Rank 1 left out the all-gather of a in forward in step 0 (train.py:7), and issued the "
        "all-gather of b in forward (train.py:7) instead. Position 2 of this process group "
        "pairs different tensors: 4 collectives have finished since, and those of different "
        "tensors have wrong results."
    )


def test_a_rank_that_does_not_update_is_found_at_its_next_collective() -> None:
    usual = [Call(0), Call(1), Call(0, step=1), Call(1, step=1)]
    late = [Call(0), Call(1), Call(0), Call(1)]

    found = find_difference(boxes(late, usual), "all")

    assert found is not None
    assert (found.sequence, found.difference, found.culprits) == (2, Difference.STEP, (1,))
    assert found.step == 0
    sentence = describe_difference(found, NAMES)
    assert sentence.startswith(
        "The ranks issued the all-gather of (root) in forward in different steps: ranks 0, 2 in "
        "step 1 (train.py:7); rank 1 in step 0 (train.py:7). Rank 1 did more or fewer backward "
        "passes or optimizer steps than before."
    )
    assert "still pairs the same tensors, but of different steps" in sentence
    assert "wrong" not in sentence


def test_two_threads_on_one_process_group_are_no_rank_s_fault() -> None:
    apart = Call(NO_UNIT, state=1)
    found = find_difference(boxes([Call(0), apart, Call(1)], [Call(0), Call(1), apart]), "all")

    assert found is not None
    assert (found.is_race, found.culprits) == (True, ())
    assert "so their order depends on timing" in describe_difference(found, NAMES)


def test_collectives_of_background_threads_alone_are_not_compared() -> None:
    one, other = Call(NO_UNIT, bytes=8, state=1), Call(NO_UNIT, bytes=16, state=1)
    assert find_difference(boxes([one, other], [other, one]), "all") is None


def test_collectives_inside_join_are_not_compared() -> None:
    shadows = [Call(NO_UNIT, state=2), Call(1, state=2), Call(1, step=1, state=2)]
    assert find_difference(boxes([Call(0), *shadows], [Call(0), *shadows[::-1]]), "all") is None


FORWARD = CodePlace("model.py", 5, "f", loop="train.py:10")
BACKWARD = CodePlace("train.py", 12, "f")
CRITIC = CodePlace("model.py", 5, "f", loop="train.py:14")


def placed(calls: list[tuple[int, CodePlace]]) -> BlackBox:
    """The box of a rank in step 0 whose collectives were issued at these places."""
    box = make_box([Call(unit) for unit, _ in calls], RANKS)
    box.entries["place"] = [[FORWARD, BACKWARD, CRITIC].index(place) for _, place in calls]
    return replace(box, places=dict(enumerate((FORWARD, BACKWARD, CRITIC))))


@pytest.mark.parametrize(
    ("deviant", "location", "is_measured"),
    [
        # a rank that leaves out the backward goes on with the forward of the next batch
        ([(0, FORWARD), (1, FORWARD), (0, FORWARD)], "train.py:12", True),
        # a rank that trains a critic in addition
        ([(0, FORWARD), (1, FORWARD), (0, CRITIC)], "train.py:14", True),
        # whose first collectives pair with equal ones of the next batch
        ([(0, FORWARD), (1, CRITIC), (0, FORWARD)], "train.py:14", True),
        # a rank that leaves out a layer: the line of the model, not that of the next collective
        ([(0, FORWARD), (2, BACKWARD), (3, BACKWARD)], "model.py:5", False),
    ],
)
def test_the_line_at_which_the_ranks_parted_is_that_of_the_loop(
    deviant: list[tuple[int, CodePlace]], location: str, is_measured: bool
) -> None:
    usual = [(0, FORWARD), (1, FORWARD), (2, BACKWARD), (3, BACKWARD)]
    found = find_difference(
        {rank: placed(deviant if rank == 1 else usual) for rank in RANKS}, "all"
    )
    assert found is not None
    assert found.culprits == (1,)
    assert found.location == location
    who = {"train.py:12": "In this step, only ranks 0, 2", "train.py:14": "Only rank 1"}
    text = describe_difference(found, NAMES)
    assert (f"{who.get(location)} reached {location}." in text) == is_measured
