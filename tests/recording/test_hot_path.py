"""The stand-in of the benchmark for the cost of an event follows the recorder's hooks."""

from tests.studies.benchmarks.hot_path import measure_hot_path


def test_the_recorder_records_the_stand_in_of_torch():
    cost = measure_hot_path(repeats=1)
    assert cost.encoding_ns > 0
