"""Snapshots in torch's form become runs whose numbers equal those of torch's own viewer.

The docstring of `train()` in `snapshots.py` lists the allocations of the steps. The peak is in the
backward of layers.1, right after its parameters are copied out of the all-gather buffer: 64 KiB
sharded parameters, 12 KiB optimizer state, 2 x 10 KiB activations, 32 KiB gathered, 30 KiB
unsharded.
"""

import json
import pickle

import pytest
import torch
from torch.cuda import _memory_viz

from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.errors import CorruptFileError, NotARunError, StoreError
from fsdp_inspect.importing.snapshot import import_snapshot, looks_like_snapshot
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint
from fsdp_inspect.trace.run import RunStatus
from tests.importing.snapshots import KIB, FakeAllocator, frame, train

PEAK_BYTES = (64 + 12 + 2 * 10 + 32 + 30) * KIB


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A snapshot of two steps, and the run made from it."""
    folder = tmp_path_factory.mktemp("snapshot")
    path = train(FakeAllocator()).dump(folder / "rank0.pickle")
    import_snapshot(path, folder / "run")
    return pickle.loads(path.read_bytes()), open_run(folder / "run")


def peak_of(run):
    return measure_memory(run).peak


def imported(allocator, folder, **options):
    path = allocator.dump(folder / "snapshot.pickle", **options)
    return import_snapshot(path, folder / "run"), open_run(folder / "run")


def test_the_peak_has_its_place_in_the_program(trained):
    peak = peak_of(trained[1])
    assert (peak.step, peak.phase, peak.fqn, peak.bytes) == (1, "backward", "layers.1", PEAK_BYTES)


def test_the_peak_is_told_by_category(trained):
    held = {row.category: row.bytes // KIB for row in peak_of(trained[1]).categories}
    assert held == {
        "sharded_parameter": 64,
        "all_gather_buffer": 32,
        "unsharded_parameter": 30,
        "activation": 20,
        "optimizer_state": 12,
    }


def test_the_peak_is_told_by_owning_unit(trained):
    owners = peak_of(trained[1]).owners
    assert [(owner.fqn, owner.bytes // KIB) for owner in owners] == [
        (None, 64 + 12),
        ("layers.1", 32 + 30 + 10),
        ("layers.0", 10),
    ]


def test_totals_are_those_of_torchs_own_viewer(trained):
    """`segsum` counts requested bytes; the rest of a used block is its `internal` part."""
    snapshot, run = trained
    table = run.memory(0)
    now = table.where(table.point == MemoryPoint.SNAPSHOT)
    told = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(int(now.reserved[0]))}\n" in told
    assert f"total_allocated: {_memory_viz.Bytes(int(now.allocated[0]))}\n" in told
    assert now.allocated[0] == sum(_memory_viz.calc_active(one) for one in snapshot["segments"])


def test_the_timeline_ends_where_the_snapshot_was_taken(trained):
    table = trained[1].memory(0)
    timeline = table.where(table.point == MemoryPoint.TIMELINE)
    now = table.where(table.point == MemoryPoint.SNAPSHOT)
    assert timeline.allocated[0] == 0
    assert timeline.allocated[-1] == now.allocated[0]
    assert timeline.allocated.max() == PEAK_BYTES


def test_every_moment_has_reserved_above_active_above_allocated(trained):
    table = trained[1].memory(0)
    whole = table.where(table.point != MemoryPoint.PEAK_BY_OWNER)
    assert (whole.reserved >= whole.active).all()
    assert (whole.active >= whole.allocated).all()


def test_categories_and_owners_add_up_to_the_peak(trained):
    table = trained[1].memory(0)
    owners = table.where(table.point == MemoryPoint.PEAK_BY_OWNER)
    peak = table.where(table.point == MemoryPoint.PEAK)
    labels = [one.label for one in MemoryCategory if one is not MemoryCategory.OUTSIDE_ALLOCATOR]
    assert owners.allocated.sum() == peak.allocated[0] == PEAK_BYTES
    for label in labels:
        assert getattr(owners, label).sum() == getattr(peak, label)[0]


def test_units_have_the_sizes_of_their_buffers(trained):
    units = trained[1].manifest.units
    assert [(unit.fqn, unit.unsharded_bytes, unit.reduce_bytes) for unit in units] == [
        ("layers.0", 32 * KIB, 21 * KIB),
        ("layers.1", 32 * KIB, 21 * KIB),
    ]


def test_a_run_from_a_snapshot_says_what_it_cannot_tell(trained):
    run = trained[1]
    assert run.status is RunStatus.IMPORTED
    assert run.manifest.source == "imported"
    assert any("no times of steps, compute or communication" in note for note in run.notes)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_gives_the_same_run(trained, tmp_path, protocol):
    _, run = imported(train(FakeAllocator()), tmp_path, protocol=protocol)
    same = trained[1].memory(0)
    for name, column in run.memory(0).columns().items():
        assert (column == getattr(same, name)).all(), name


def test_files_that_name_one_rank_are_noted(tmp_path):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in ("a_rank0.pickle", "b_rank0.pickle", "rank1.pickle"):
        train(FakeAllocator()).dump(folder / name)
    notes = import_snapshot(folder, tmp_path / "run").notes
    (note,) = [note for note in notes if "name rank" in note]
    assert note.startswith("a_rank0.pickle, b_rank0.pickle all name rank 0")


def test_a_leak_is_seen_at_the_ends_of_the_steps(tmp_path):
    _, run = imported(train(FakeAllocator(), num_steps=3, leak=4 * KIB), tmp_path)
    table = run.memory(0)
    ends = table.where(table.point == MemoryPoint.STEP_END)
    assert ends.step.tolist() == [0, 1, 2]
    assert (ends.allocated[1:] - ends.allocated[:-1]).tolist() == [4 * KIB, 4 * KIB]


def test_the_failed_request_is_told(tmp_path):
    allocator = train(FakeAllocator())
    with allocator.inside("FSDP::all_gather (layers.1)"):
        allocator.out_of_memory(2 << 30, device_free=1 << 30)
    done, run = imported(allocator, tmp_path)
    [failed] = done.failed_requests
    assert (failed.requested_bytes, failed.device_free_bytes) == (2 << 30, 1 << 30)
    assert (failed.step, run.manifest.units[failed.unit].fqn) == (2, "layers.1")
    assert run.ranks[0].failed_request == failed


def test_a_trace_that_was_cut_at_its_beginning_is_followed_from_its_end(tmp_path):
    _, run = imported(train(FakeAllocator(), num_steps=4), tmp_path, entries=60)
    peak = peak_of(run)
    held = {row.category: row.bytes // KIB for row in peak.categories}
    assert peak.bytes == PEAK_BYTES
    assert (held["sharded_parameter"], held["unattributed"]) == (64, 12)


def test_without_a_trace_the_moment_of_the_snapshot_is_all(tmp_path):
    allocator = FakeAllocator()
    allocator.alloc(3000)
    allocator.trace = []
    snapshot = allocator.snapshot() | {"device_traces": [[]]}
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(snapshot["segments"], protocol=2))
    import_snapshot(tmp_path / "old.pickle", tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert measure_memory(run).peak_allocated_bytes == 3072
    assert any("the peak before it is unknown" in note for note in run.notes)


def test_a_trace_of_another_snapshot_is_not_believed(tmp_path):
    allocator = FakeAllocator()
    address = allocator.alloc(4096)
    allocator.free(address)
    snapshot = allocator.snapshot()
    snapshot["device_traces"][0] = [
        e for e in snapshot["device_traces"][0] if "free" not in e["action"]
    ]
    (tmp_path / "odd.pickle").write_bytes(pickle.dumps(snapshot))
    done = import_snapshot(tmp_path / "odd.pickle", tmp_path / "run")
    assert any("contradicts its segments" in note for note in done.notes)
    assert MemoryPoint.TIMELINE not in open_run(tmp_path / "run").memory(0).point


def test_frees_that_were_recorded_only_once_completed_count(tmp_path):
    allocator = train(FakeAllocator())
    allocator.trace = [one for one in allocator.trace if one["action"] != "free_requested"]
    assert peak_of(imported(allocator, tmp_path)[1]).bytes == PEAK_BYTES


def test_annotations_of_older_versions_lie_in_the_trace(tmp_path):
    allocator = train(FakeAllocator())
    snapshot = allocator.snapshot()
    old = [
        {
            "action": "user_defined",
            "addr": 0,
            "size": 0,
            "time_us": one["time_us"],
            "frames": [{"name": one["stage"], "filename": one["name"], "line": 0}],
        }
        for one in snapshot.pop("external_annotations")
    ]
    snapshot["device_traces"][0] = sorted(
        snapshot["device_traces"][0] + old, key=lambda entry: entry["time_us"]
    )
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(snapshot))
    assert import_snapshot(tmp_path / "old.pickle", tmp_path / "run").units == (
        "layers.0",
        "layers.1",
    )
    assert peak_of(open_run(tmp_path / "run")).bytes == PEAK_BYTES


def test_without_annotations_the_code_that_allocated_tells_the_category(tmp_path):
    allocator = FakeAllocator()
    kept = {
        "sharded_parameter": frame("_init_sharded_param", "_fsdp_param.py"),
        "all_gather_buffer": frame("foreach_all_gather", "_fsdp_collectives.py"),
        "optimizer_state": frame("_init_group", "/lib/torch/optim/adamw.py"),
        "activation": frame("_call_impl", "/lib/torch/nn/modules/module.py"),
        "input": frame("fetch", "/lib/torch/utils/data/_utils/fetch.py"),
    }
    for number, place in enumerate(kept.values(), start=1):
        address = allocator.alloc(number * KIB, frames=[frame("empty", "??"), place])
        if place["name"] == "_call_impl":
            activation = address
    allocator.free(activation)
    done, run = imported(allocator, tmp_path)
    held = {row.category: row.bytes // KIB for row in peak_of(run).categories}
    assert held == dict(zip(kept, range(1, 6), strict=True))
    assert any("No FSDP units are known" in note for note in done.notes)


def test_metadata_that_names_a_category_wins(tmp_path):
    allocator = FakeAllocator(metadata="Optimizer state")
    allocator.alloc(KIB, frames=[frame("foreach_reduce")])
    [only] = peak_of(imported(allocator, tmp_path)[1]).categories
    assert (only.category, only.bytes) == ("optimizer_state", KIB)


def test_a_snapshot_that_torch_made_from_a_profile_is_read(tmp_path):
    """The only kind of snapshot that torch can make without a GPU; torch wrote all of it."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as prof:
        for _ in range(2):
            model(torch.ones(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    snapshot = _memory_viz._profile_to_snapshot(prof)
    (tmp_path / "profile.pickle").write_bytes(pickle.dumps(snapshot))
    import_snapshot(tmp_path / "profile.pickle", tmp_path / "run")
    memory = measure_memory(open_run(tmp_path / "run"))
    held = {row.category: row.bytes for row in memory.peak.categories}
    table = open_run(tmp_path / "run").memory(0)
    now = table.where(table.point == MemoryPoint.SNAPSHOT)
    assert held["sharded_parameter"] >= 4 * (64 * 64 + 64)
    assert held["optimizer_state"] >= 8 * (64 * 64 + 64)
    assert now.allocated[0] == sum(_memory_viz.calc_active(one) for one in snapshot["segments"])
    assert memory.peak_reserved_bytes is None


def test_several_files_are_several_ranks_by_the_numbers_in_their_names(tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    for number in (10, 2):
        train(FakeAllocator(), leak=number * KIB).dump(folder / f"oom_rank{number}.pickle")
    done = import_snapshot(folder, tmp_path / "run")
    memory = measure_memory(open_run(tmp_path / "run"))
    assert done.files == ("oom_rank2.pickle", "oom_rank10.pickle")
    assert (memory.peak_rank, len(memory.ranks)) == (1, 2)


def test_memory_on_another_device_is_mentioned(tmp_path):
    allocator = FakeAllocator()
    allocator.alloc(KIB)
    snapshot = allocator.snapshot()
    stray = {**snapshot["segments"][0], "device": 3, "total_size": 512, "blocks": []}
    snapshot["segments"].append(stray)
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(snapshot))
    done = import_snapshot(tmp_path / "two.pickle", tmp_path / "run")
    assert any("512 B on cuda:3" in note for note in done.notes)


def test_a_database_is_no_snapshot(tmp_path):
    path = tmp_path / "snapshot.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(4096))
    assert not looks_like_snapshot(path)
    with pytest.raises(CorruptFileError, match=r"begins with b'SQLi'. Expected a pickle"):
        import_snapshot(path, tmp_path / "run")


def test_other_files_do_not_look_like_snapshots(tmp_path):
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "empty.pickle").write_bytes(b"")
    assert not looks_like_snapshot(tmp_path / "trace.json")
    assert not looks_like_snapshot(tmp_path / "empty.pickle")
    assert not looks_like_snapshot(tmp_path)
    assert not looks_like_snapshot(tmp_path / "absent")


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(NotARunError, match="No memory snapshot found at"):
        import_snapshot(tmp_path / "absent.pickle", tmp_path / "run")


def test_a_folder_that_is_taken_is_left_alone(tmp_path):
    path = train(FakeAllocator()).dump(tmp_path / "snapshot.pickle")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    with pytest.raises(StoreError, match="exists already"):
        import_snapshot(path, tmp_path / "run")
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_run_that_cannot_be_written_is_removed(tmp_path, monkeypatch):
    path = train(FakeAllocator()).dump(tmp_path / "snapshot.pickle")

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("fsdp_inspect.store.finished.write_compacted", full)
    with pytest.raises(StoreError, match="No space left on device"):
        import_snapshot(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def dump_with_lines(folder, lines):
    """A snapshot of one step, with the memory in KiB that each line keeps."""
    allocator = train(FakeAllocator(), num_steps=1)
    with allocator.inside("FSDP::pre_forward (layers.0)"):
        for line, kibs in lines.items():
            file, _, number = line.partition(":")
            frames = [frame("forward", f"/home/ann/{file}", int(number))]
            for kib in kibs:
                allocator.alloc(kib * KIB, frames=frames)
    import_snapshot(allocator.dump(folder / f"{len(lines)}.pickle"), folder / f"run{len(lines)}")
    return folder / f"run{len(lines)}"


def test_compare_and_check_name_the_line_that_grew_between_two_commits(tmp_path, invoke):
    """The new commit adds lines above: model.py:40 moves to 43, and 50, which grows, to 53."""
    before = dump_with_lines(tmp_path, {"model.py:40": [200], "model.py:50": [100, 100]})
    lines = {"data.py:12": [30], "model.py:43": [200], "model.py:53": [100, 150]}
    after = dump_with_lines(tmp_path, lines)

    compared = json.loads(invoke("compare", before, after, "--json").out)["lines"][0]
    assert [(each["line"], [one // KIB for one in each["values"]]) for each in compared] == [
        ("/home/ann/model.py:53", [200, 250]),
        ("/home/ann/data.py:12", [0, 30]),
    ]
    shown = " ".join(invoke("compare", before, after).out.split())
    assert "Lines whose memory at the peak differs" in shown
    assert "model.py:43" not in shown

    baseline = tmp_path / "baseline.json"
    assert invoke("check", before, "--baseline", baseline, "--update").code == 0
    checked = invoke("check", after, "--baseline", baseline)
    assert checked.code == 1
    assert "model.py:53" in checked.out
    assert "model.py:43" not in checked.out
