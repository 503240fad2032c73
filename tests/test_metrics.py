import pytest

from fsdp_inspect.metrics import METRICS, Better, MetricUnit, find_metric
from fsdp_inspect.trace.codes import PARTS_OF_STEP

SUFFIXES = {
    MetricUnit.NS: "_ns",
    MetricUnit.RATIO: "_ratio",
    MetricUnit.BYTES_PER_S: "_bytes_per_s",
}


def test_a_metric_has_a_definition_in_one_plain_sentence_and_its_unit_in_its_name():
    for metric in METRICS.values():
        assert metric.label, metric.name
        assert len(metric.definition) > 10, metric.name
        assert not metric.definition.endswith("."), metric.name
        assert metric.name.endswith(SUFFIXES.get(metric.unit, ""))


def test_every_part_of_a_step_is_a_metric():
    assert {f"{part.label}_ns" for part in PARTS_OF_STEP} <= METRICS.keys()


def test_more_overlap_is_better_and_more_exposure_worse():
    assert find_metric("overlap_ratio").better is Better.HIGHER
    assert find_metric("exposed_ns").better is Better.LOWER


def test_an_undefined_metric_is_refused_by_name():
    with pytest.raises(KeyError, match="no metric 'speed'"):
        find_metric("speed")
