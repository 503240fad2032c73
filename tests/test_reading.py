"""Files and texts with any content are read within limits."""

import os

import pytest

from fsdp_inspect.reading import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    InvalidTextError,
    parse_json,
    parse_toml,
    read_regular,
)


@pytest.mark.parametrize("place", ["/dev/zero", "a folder", "a pipe", "a large file", "a\0b"])
def test_only_a_regular_file_of_limited_size_is_read(tmp_path, place):
    path = tmp_path / "file"
    if place == "a folder":
        path.mkdir()
    elif place == "a pipe":
        os.mkfifo(path)
    elif place == "a large file":
        path.write_bytes(bytes(11))
    else:
        path = tmp_path / place
    with pytest.raises(OSError, match=r"regular file|directory|too large|null byte"):
        read_regular(path, 10)


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        '{"a":' * 5000 + "1" + "}" * 5000,
        '{"a": 1' + "0" * 400 + "}",
        '{"a": 1' + "0" * 5000 + "}",
        '"\\ud800"',
        "{",
        " " * (MAX_JSON_BYTES + 1),
    ],
    ids=["deep", "very deep", "400 digits", "5,000 digits", "lone surrogate", "cut off", "large"],
)
def test_json_beyond_a_limit_is_an_error_in_one_line(text):
    with pytest.raises(InvalidTextError) as raised:
        parse_json(text.encode())
    assert len(str(raised.value)) < 200
    assert "\n" not in str(raised.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 20_000) + " = 1",
        "a = " + "[" * 5000,
        "a = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "a = " + "9" * 5000,
        "a = ",
    ],
    ids=["20,000 dotted keys", "very deep", "deep", "5,000 digits", "cut off"],
)
def test_toml_beyond_a_limit_is_an_error_at_once(text):
    with pytest.raises(InvalidTextError):
        parse_toml(text)


def test_integers_beyond_64_bits_become_floats_so_that_a_seed_stays_readable():
    assert parse_json(b'{"seed": [18446744073709551615, 5]}') == {"seed": [2.0**64, 5]}
    assert parse_toml("seed = 18446744073709551615") == {"seed": 2.0**64}
