"""Reserved memory of a run is predicted from its allocation history."""

from dataclasses import replace

import numpy as np

from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.emulation.allocator.caching_allocator import predict_reserved_bytes
from fsdp_inspect.emulation.allocator.settings import MIB, parse_settings
from fsdp_inspect.report.memory_wording import describe_expandable
from fsdp_inspect.trace.allocations import AllocationHistory
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.tables import MemoryTable
from tests.builders import InMemoryRun

GROWING = [100 * MIB, -1, 120 * MIB, -1, 140 * MIB, -1]


def predict(
    events: list[int], *, recorded: int = 0, text: str = "", num_resting: int = 0
) -> ReservedPrediction | None:
    history = AllocationHistory(
        storage=np.zeros(len(events), dtype=np.int64),
        bytes=np.array(events, dtype=np.int64),
        stream=np.zeros(len(events), dtype=np.int64),
        num_resting=num_resting,
    )
    run = InMemoryRun(
        manifest=RunManifest(
            run_id="run",
            created="",
            created_unix_ns=0,
            world_size=1,
            backend="unknown",
            device_type="cuda",
            environment={"PYTORCH_CUDA_ALLOC_CONF": text},
        ),
        ranks=[],
        event_tables={},
        memory_tables={0: MemoryTable.from_rows([_sample(recorded)] if recorded else [])},
        allocation_histories={0: history},
    )
    return predict_reserved(run, rank=0)


def _sample(reserved: int) -> dict[str, int]:
    return {**dict.fromkeys(MemoryTable.DTYPES, -1), "reserved": reserved}


def test_growing_requests_reserve_their_sum_and_with_expandable_segments_the_largest() -> None:
    found = predict(GROWING, recorded=360 * MIB)

    assert found is not None
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes == 360 * MIB
    assert found.expandable_peak_reserved_bytes == 140 * MIB
    assert found.saved_bytes == 220 * MIB
    assert describe_expandable(found) == (
        "Expandable segments would reserve 140 MiB instead of 360 MiB (predicted)."
    )


def test_a_model_that_misses_the_snapshot_predicts_nothing_else() -> None:
    found = predict(GROWING, recorded=600 * MIB, num_resting=1)

    assert found is not None
    assert found.expandable_peak_reserved_bytes is None
    assert describe_expandable(found) == (
        "Cannot tell what expandable segments would reserve. The model of the allocator differs "
        "from the snapshot by -40%. The trace does not show how the 1 blocks before it were "
        "allocated."
    )


def test_settings_that_the_model_does_not_know_are_named() -> None:
    found = predict(GROWING, recorded=360 * MIB, text="backend:cudaMallocAsync")

    assert found is not None
    assert "'cudaMallocAsync'" in describe_expandable(found)


def test_a_run_with_expandable_segments_is_predicted_with_them() -> None:
    found = predict(GROWING, recorded=140 * MIB, text="expandable_segments:True")

    assert found is not None
    assert found.peak_reserved_bytes == 140 * MIB
    assert describe_expandable(found) == ""


def test_without_a_history_there_is_no_prediction() -> None:
    assert predict([]) is None


def test_a_full_device_ends_the_prediction() -> None:
    events = np.array([100 * MIB, 100 * MIB], dtype=np.int64)
    history = AllocationHistory(np.arange(2), events, np.zeros(2, dtype=np.int64))
    limited = replace(parse_settings(""), device_bytes=150 * MIB)

    assert predict_reserved_bytes(history, limited).failed_event == 1
    assert predict_reserved_bytes(history).fits
    assert predict_reserved_bytes(history).peak_reserved_bytes == 200 * MIB
