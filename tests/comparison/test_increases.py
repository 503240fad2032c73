"""Growth is named; moves and variation are not."""

from fsdp_inspect.comparison.increases import (
    Increase,
    abbreviate_units,
    find_increases,
    find_longer,
)

GATHER, SCATTER = "all_gather in backward", "reduce_scatter in backward"


def test_what_moved_between_units_did_not_grow() -> None:
    before = {("layers.0", "activation"): 5, ("layers.1", "activation"): 0}
    after = {("layers.0", "activation"): 0, ("layers.1", "activation"): 5}

    assert find_increases(before, after) == ()


def test_alike_units_are_named_together_in_the_order_of_their_numbers() -> None:
    after = {(f"layers.{block}", "activation"): 4 for block in (10, 2, 1)}

    (grown,) = find_increases({}, after)

    assert grown == Increase("activation", ("layers.1", "layers.2", "layers.10"), 0, 12)
    assert grown.where == "layers.*"


def test_two_units_are_named_as_they_are() -> None:
    assert abbreviate_units(["layers.2", "layers.5"]) == "layers.2, layers.5"


def test_the_wait_that_became_longer_is_named_and_jitter_is_not() -> None:
    before = {(f"layers.{block}", GATHER): 100 for block in range(6)}
    after = {**before, ("layers.3", GATHER): 900, ("layers.1", GATHER): 130}
    after[("layers.0", SCATTER)] = 20

    longer = find_longer({}, {}, before, after)

    assert longer == (Increase(GATHER, ("layers.3",), 100, 900),)


def test_waits_that_all_became_longer_are_all_named() -> None:
    before = {(f"layers.{block}", GATHER): 100 for block in range(6)}
    after = {key: amount + 50 for key, amount in before.items()}

    (longer,) = find_longer({}, {}, before, after)

    assert (longer.where, longer.increase) == ("layers.*", 300)


def test_of_a_longer_step_the_parts_come_first_and_waits_only_where_a_wait_grew() -> None:
    parts = {"forward": 100, "backward": 200, "exposed_all_gather": 10}
    waits = {("layers.0", GATHER): 10}

    slow = find_longer(parts, {**parts, "backward": 260}, waits, {("layers.0", GATHER): 14})
    assert slow == (Increase("backward", (), 200, 260),)

    waiting = find_longer(
        parts, {**parts, "exposed_all_gather": 60}, waits, {("layers.0", GATHER): 60}
    )
    assert waiting == (
        Increase("exposed_all_gather", (), 10, 60),
        Increase(GATHER, ("layers.0",), 10, 60),
    )


def test_a_baseline_without_parts_and_waits_blames_nothing() -> None:
    assert find_longer({}, {"forward": 9}, {}, {("layers.0", GATHER): 9}) == ()
