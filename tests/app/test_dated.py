from unittest import mock

import streamlit as st
from fsdp_inspect_app import dated


def test_a_value_is_computed_again_when_it_is_too_old() -> None:
    numbers = iter(range(10))

    @st.cache_resource(validate=dated.is_younger_than(3.0), show_spinner=False)
    def number() -> dated.Dated[int]:
        return dated.Dated(next(numbers), now[0])

    now = [100.0]
    found = []
    with mock.patch.object(dated.time, "monotonic", side_effect=lambda: now[0]):
        for now[0] in (100.0, 102.9, 103.0, 105.9, 106.5):
            found.append(number().value)
    assert found == [0, 0, 1, 1, 2]


def test_a_value_that_takes_long_lives_longer_up_to_a_limit() -> None:
    is_young, now = dated.is_younger_than(3.0), [100.0]
    quick, slow, slowest = (dated.Dated("", 100.0, took_s) for took_s in (0.1, 0.5, 60.0))
    ages = (2.9, 9.9, 29.9, 30.1)
    with mock.patch.object(dated.time, "monotonic", side_effect=lambda: now[0]):
        found = []
        for now[0] in (100.0 + age for age in ages):
            found.append([is_young(each) for each in (quick, slow, slowest)])
    assert found == [[True] * 3, [False, True, True], [False, False, True], [False] * 3]


def test_the_time_of_a_computation_is_measured() -> None:
    with mock.patch.object(dated.time, "monotonic", side_effect=[5.0, 7.5, 7.5]):
        found = dated.dated(lambda: "value")
    assert (found.value, found.took_s) == ("value", 2.5)
