import pytest

from fsdp_inspect import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(412_600_000, "413 ms", id="milliseconds"),
        pytest.param(999_600, "1.00 ms", id="rounded up to the next unit"),
        pytest.param(1_234_000_000_000, "1,234 s", id="thousands of seconds"),
        pytest.param(50, "50 ns", id="whole nanoseconds"),
        pytest.param(0.25, "0.25 ns", id="below a nanosecond"),
        pytest.param(18_000, "18.0 µs", id="microseconds"),
        pytest.param(1_200_000_000, "1.20 s", id="seconds"),
        pytest.param(-2_500_000, "-2.50 ms", id="negative"),
        pytest.param(0, "0 ns", id="zero"),
        pytest.param(None, "–", id="missing"),
    ],
)
def test_a_duration_reads_with_three_digits(value, text):
    assert formatting.format_ns(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(41_017_137_971, "38.2 GiB", id="GiB"),
        pytest.param(1024, "1.00 KiB", id="KiB"),
        pytest.param(1023, "1,023 B", id="bytes"),
        pytest.param(0, "0 B", id="zero"),
        pytest.param(None, "–", id="missing"),
    ],
)
def test_memory_reads_in_powers_of_1024(value, text):
    assert formatting.format_bytes(value) == text


def test_bandwidth_reads_in_powers_of_1000():
    assert formatting.format_bytes_per_s(26_500_000_000) == "26.5 GB/s"
    assert formatting.format_bytes_per_s(None) == "–"


def test_counts_ratios_and_milliseconds_read_as_the_field_writes_them():
    assert formatting.format_count(1_240_000_000) == "1.24B"
    assert formatting.format_count(17) == "17"
    assert formatting.format_ratio(0.149) == "14.9%"
    assert formatting.format_ms(18_000) == "0.018"


@pytest.mark.parametrize(
    ("ratio", "text", "signed"),
    [
        pytest.param(0.1, "10%", "+10%", id="whole"),
        pytest.param(-0.227, "-22.7%", "-22.7%", id="decimal"),
        pytest.param(1, "100%", "+100%", id="all"),
        pytest.param(0.99951, "100%", "+100%", id="rounded to three digits"),
        pytest.param(12.345, "1,234%", "13.3x", id="many times"),
        pytest.param(75.4467, "7,545%", "76.4x", id="very many times"),
        pytest.param(1999, "199,900%", "2,000x", id="thousands of times"),
        pytest.param(0, "0%", "0%", id="zero"),
        pytest.param(0.00001, "0.0%", "0.0%", id="rounds to zero"),
    ],
)
def test_changes_have_no_space_and_at_most_three_digits(ratio, text, signed):
    assert (formatting.format_ratio(ratio), formatting.format_signed(ratio)) == (text, signed)


def test_a_missing_number_is_never_shown_as_zero():
    shown = [
        formatting.format_count(None),
        formatting.format_ratio(None),
        formatting.format_ms(None),
    ]
    assert shown == [formatting.MISSING] * 3


def test_the_root_has_a_name_to_be_shown_by():
    assert formatting.format_unit("") == "(root)"
    assert formatting.format_unit("norm, lm_head") == "norm, lm_head"


def test_control_characters_are_shown_and_other_text_stays():
    shown = formatting.show_controls("layers.0 µ–é\xa0█\n\t\x00\x1b[0m\x7f\x85\u2066")
    hidden = "\N{REPLACEMENT CHARACTER}"
    assert shown == f"layers.0 µ–é\xa0█\n\t␀␛[0m␡{hidden}{hidden}"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        pytest.param([0, 1, 2, 7], "0-2, 7", id="a run and one"),
        pytest.param([7, 2, 1], "1-2, 7", id="in any order"),
        pytest.param([5], "5", id="one"),
        pytest.param([], "none", id="none"),
    ],
)
def test_runs_of_numbers_read_in_short(numbers, text):
    assert formatting.format_numbers(numbers) == text


def test_spans_are_the_first_and_last_of_each_run():
    assert formatting.find_spans([3, 4, 5, 9]) == [(3, 5), (9, 9)]
