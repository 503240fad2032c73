import pytest

from fsdp_inspect.quantities import parse_bytes, parse_bytes_per_s, parse_time_ns


@pytest.mark.parametrize(
    ("text", "value"),
    [("20us", 20e3), ("1.5 ms", 1.5e6), ("2s", 2e9), ("7ns", 7.0), ("3µs", 3e3)],
)
def test_durations_read_in_ns(text: str, value: float):
    assert parse_time_ns(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("50GB/s", 50e9), ("400Gbit/s", 50e9), ("400Gb/s", 50e9), ("1MiB/s", 2.0**20), ("9B/s", 9)],
)
def test_bandwidths_read_in_bytes_and_bits_as_the_field_writes_them(text: str, value: float):
    assert parse_bytes_per_s(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("38 GiB", 38 * 2**30),
        ("38GB", 38 * 10**9),
        ("17", 17),
        ("1.5 MiB", 3 * 2**19),
        ("2k", 2000),
    ],
)
def test_amounts_read_in_powers_of_1024_and_of_1000(text: str, value: int):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "fast", "20", "1.2.3s", "-1us", "50GB", "12 parsecs"])
def test_what_is_no_duration_and_no_bandwidth_reads_as_none(text: str):
    assert parse_time_ns(text) is None
    assert parse_bytes_per_s(text) is None
    assert parse_bytes("lots") is None
    assert parse_bytes("1e999 GiB") is None
