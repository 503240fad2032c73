import pytest

from fsdp_inspect.report.wording import format_kind, format_method, format_metric


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        pytest.param("step_time_ns", 412_600_000, "413 ms", id="time"),
        pytest.param("peak_allocated_bytes", 3 << 30, "3.00 GiB", id="memory"),
        pytest.param("bus_bytes_per_s", 26.5e9, "26.5 GB/s", id="bandwidth"),
        pytest.param("overlap_ratio", 0.149, "14.9%", id="ratio"),
        pytest.param("num_parameters", 1_240_000_000, "1.24B", id="count"),
        pytest.param("loss", 2.34567, "2.346", id="number"),
        pytest.param("peak_reserved_bytes", None, "–", id="missing"),
        pytest.param("loss", None, "–", id="missing number"),
    ],
)
def test_a_value_reads_in_the_unit_of_its_metric(name, value, text):
    assert format_metric(name, value) == text


def test_collectives_are_hyphenated_as_the_field_does():
    assert format_kind("reduce_scatter") == "reduce-scatter"


def test_methods_read_in_words():
    assert format_method("inferred, host_blocking") == "inferred, host-blocking"
    assert format_method("storage_tracker") == "storage tracker"
