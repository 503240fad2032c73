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
