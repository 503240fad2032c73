"""A trace without the sizes of its messages: unknown is neither zero nor frozen."""

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

_SIZES = ("In msg nelems", "Out msg nelems", "dtype")


def import_step(folder, *, is_sized):
    trace = TraceWriter()
    fsdp2_step(trace)
    for event in trace.events:
        for name in () if is_sized else _SIZES:
            event.get("args", {}).pop(name, None)
    name = "sized" if is_sized else "unsized"
    import_traces(trace.write(folder / f"{name}.json"), folder / name)
    return open_run(folder / name)


@pytest.fixture(scope="module")
def unsized(tmp_path_factory):
    return import_step(tmp_path_factory.mktemp("unsized"), is_sized=False)


def test_units_of_unknown_size_are_neither_empty_nor_frozen(unsized):
    unit = measure_units(unsized).units[0]
    assert unit.num_parameters is None
    assert unit.num_trainable_parameters is None
    assert (unit.unsharded_bytes, unit.sharded_bytes, unit.reduce_bytes) == (None, None, None)


def test_whether_unsized_messages_fit_the_plan_cannot_be_told(unsized):
    check = check_plan(unsized)
    assert check.is_consistent is None
    assert "cannot be checked" in check.sentence
    assert "record_shapes=True" in check.sentence
    assert check.findings == ()


def test_the_bytes_of_unsized_messages_are_unknown(unsized):
    assert measure_overlap(unsized).run.communication_bytes is None
    assert measure_summary(unsized).communication_bytes is None


def test_units_whose_sizes_are_told_are_compared_with_them(tmp_path):
    unit = measure_units(import_step(tmp_path, is_sized=True)).units[0]
    assert unit.num_trainable_parameters == unit.num_parameters > 0


def test_a_comparison_with_unknown_bytes_names_no_change_of_them(tmp_path, unsized):
    comparison = compare_runs(import_step(tmp_path, is_sized=True), unsized)
    rows = {row.name: row for row in comparison.metrics}
    assert rows["communication_bytes"].values[0] > 0
    assert rows["communication_bytes"].values[1] is None
