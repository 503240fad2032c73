"""The bytes of a black box."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.trace.black_box import (
    EMPTY_HEADER,
    HEADER_BYTES,
    MAX_BYTES,
    BlackBoxError,
    CodePlace,
    Communicator,
    decode,
    encode_group,
    encode_header,
    encode_place,
)

HEADER = replace(EMPTY_HEADER, rank=3, step=7, pid=99)


def make_bytes(text: bytes = b"") -> bytearray:
    content = bytearray(MAX_BYTES)
    head = encode_header(HEADER, len(text))
    content[: len(head)] = head
    start = MAX_BYTES - (128 << 10)
    content[start : start + len(text)] = text
    return content


def test_what_is_encoded_is_decoded() -> None:
    group, place = Communicator("0", (0, 1)), CodePlace("a.py", 5, "f", "b.py:2")

    box = decode(make_bytes(encode_group(2, group) + encode_place(4, place)))

    assert (box.header.rank, box.header.step, box.header.pid) == (3, 7, 99)
    assert box.groups == {2: group}
    assert box.places == {4: place}
    assert len(box.entries) == 0


def test_a_line_of_text_that_was_cut_off_is_left_out() -> None:
    line = encode_place(1, CodePlace("a.py", 5, "f"))
    box = decode(make_bytes(line + line[:-7]))
    assert list(box.places) == [1]


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(BlackBoxError):
        decode(content)


@given(st.integers(HEADER_BYTES, MAX_BYTES))
def test_a_box_cut_anywhere_after_its_header_is_read(size: int) -> None:
    assert decode(make_bytes()[:size]).header.rank == 3


@given(st.binary(min_size=8, max_size=HEADER_BYTES))
def test_a_damaged_header_gives_values_or_an_error(noise: bytes) -> None:
    content = make_bytes()
    content[24 : 24 + len(noise)] = noise
    decode(content)
