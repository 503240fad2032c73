"""The lines of numerics steps."""

from hypothesis import given, strategies as st

from fsdp_inspect.trace.numerics import (
    NumericsStep,
    Observation,
    Place,
    Update,
    decode_steps,
    encode_step,
)

_COUNTS = st.integers(0, 1 << 60)
_NUMBERS = st.none() | st.floats(0, 1e300)
_OBSERVATIONS = st.builds(
    Observation,
    unit=st.integers(-1, 1000),
    place=st.sampled_from(Place),
    order=_COUNTS,
    count=_COUNTS,
    num_non_finite=_COUNTS,
    largest=_NUMBERS,
    squared_norm=_NUMBERS,
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16"]), max_size=2).map(tuple),
)
_UPDATES = st.builds(
    Update,
    unit=st.integers(-1, 1000),
    num_meant=_COUNTS,
    num_lost=_COUNTS,
    squared_change=_NUMBERS,
)
_STEPS = st.builds(
    NumericsStep,
    step=_COUNTS,
    observations=st.lists(_OBSERVATIONS, max_size=3).map(tuple),
    updates=st.lists(_UPDATES, max_size=3).map(tuple),
)


@given(st.lists(_STEPS, max_size=4))
def test_what_is_encoded_is_decoded(steps: list[NumericsStep]) -> None:
    assert list(decode_steps(b"".join(map(encode_step, steps)))) == steps


@given(_STEPS, st.data())
def test_a_line_that_was_cut_off_is_left_out(step: NumericsStep, data: st.DataObject) -> None:
    line = encode_step(step)
    cut = data.draw(st.integers(0, len(line) - 2))
    assert list(decode_steps(line + line[:cut])) == [step]


@given(st.binary(max_size=200))
def test_other_bytes_hold_no_step(content: bytes) -> None:
    assert list(decode_steps(content)) == []
