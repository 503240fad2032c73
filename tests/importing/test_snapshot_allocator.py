"""Snapshots of torch's own allocator are replayed on the model; see `tests/emulation/allocator`."""

import pickle
from pathlib import Path

import pytest

from fsdp_inspect.analysis.memory.overview import measure_memory_overview
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.report.memory_wording import describe_expandable
from fsdp_inspect.store.reader import open_run
from tests.studies.benchmarks.allocator import read_snapshot, replay_snapshot, snapshot_names

NAMES = snapshot_names()


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_trace_gives_the_reserved_memory_and_blocks_of_torch(name: str) -> None:
    found = replay_snapshot(read_snapshot(name))

    assert found.starts_empty
    assert found.largest_error_bytes == 0
    assert found.same_blocks
    assert found.modelled_segments == found.measured_segments
    assert found.modelled_split_bytes == found.measured_split_bytes
    assert (found.num_releases > 0) == name.startswith("random")


@pytest.mark.parametrize("kept", [0.5, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_trace_begins_with_blocks_that_follow_from_the_end(name: str, kept: float) -> None:
    found = replay_snapshot(read_snapshot(name, kept=kept))

    assert not found.starts_empty
    if name == "random-expandable" and kept == 0.5:
        # A snapshot does not show where the address range of an expandable segment begins.
        assert 0 < found.largest_error_bytes < 0.1 * found.measured.max()
    else:
        assert found.largest_error_bytes == 0
        assert found.same_blocks


def test_an_imported_snapshot_states_what_expandable_segments_would_reserve(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(read_snapshot("training")))
    import_snapshot(file, tmp_path / "run")
    reserved = measure_memory_overview(open_run(tmp_path / "run")).reserved

    assert reserved is not None
    assert reserved.peak_reserved_bytes == reserved.recorded_peak_reserved_bytes
    expandable = max(replay_snapshot(read_snapshot("training-expandable")).measured)
    assert reserved.expandable_peak_reserved_bytes == expandable
    assert describe_expandable(reserved).startswith("Expandable segments would reserve ")


def test_a_snapshot_with_expandable_segments_is_not_advised_to_use_them(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(read_snapshot("training-expandable")))
    import_snapshot(file, tmp_path / "run")
    reserved = measure_memory_overview(open_run(tmp_path / "run")).reserved

    assert reserved is not None
    assert reserved.allocator_settings == "expandable_segments:True"
    assert reserved.peak_reserved_bytes == reserved.recorded_peak_reserved_bytes
    assert describe_expandable(reserved) == ""
