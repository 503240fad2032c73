"""The failed allocation of a memory snapshot of another tool, by category, line and growth."""

from fsdp_inspect.diagnosis.diagnose import ProblemClass
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.run import Run
from fsdp_inspect.store.reader import open_run
from tests.importing.snapshots import KIB, FakeAllocator, train

USER = {"filename": "/home/me/net.py", "line": 8, "name": "forward"}
TORCH = {"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 5, "name": "forward"}
NATIVE = {"filename": "??", "line": 0, "name": "at::empty"}


def diagnosed(allocator, tmp_path, **options):
    path = allocator.dump(tmp_path / "rank0.pickle", **options)
    import_snapshot(path, tmp_path / "run")
    return Run(open_run(tmp_path / "run")).diagnose()


def failing():
    allocator = FakeAllocator(segment_bytes=64 * KIB)
    train(allocator, num_steps=2)
    with allocator.inside("FSDP::pre_forward (layers.1)"):
        allocator.alloc(40 * KIB, frames=[NATIVE, TORCH, USER])
    allocator.out_of_memory(900 * KIB, 100 * KIB)
    return allocator


def test_an_imported_snapshot_with_a_failed_request_ran_out_of_memory(tmp_path):
    found = diagnosed(failing(), tmp_path)
    assert (found.problem, found.ranks) == (ProblemClass.OUT_OF_MEMORY, (0,))
    memory = found.out_of_memory
    assert memory.record.requested_bytes == 900 * KIB
    assert memory.record.device_free_bytes == 100 * KIB
    assert memory.live_bytes == memory.record.allocated_bytes
    assert {row.name: row.bytes for row in memory.by_place}["/home/me/net.py:8"] == 40 * KIB
    assert memory.fragmented_bytes == memory.record.reserved_bytes - memory.live_bytes
    assert memory.record.largest_free_block_bytes > 0


def test_what_grew_since_the_step_before_is_told(tmp_path):
    found = diagnosed(failing(), tmp_path)
    reference = found.out_of_memory.record.reference
    assert reference.step == found.step - 1
    assert sum(row.bytes for row in reference.live) == reference.bytes


def test_no_plan_is_proposed_for_a_snapshot(tmp_path):
    found = diagnosed(failing(), tmp_path)
    assert found.plans.reason == "imported"
    text = describe_diagnosis(found)
    assert text.sentence.startswith("Out of memory ")
    assert any("me/net.py:8 40.0 KiB" in line for line in text.evidence)
    assert not any("advise" in line for line in text.next)


def test_free_blocks_are_unknown_if_memory_was_freed_after_the_failure(tmp_path):
    allocator = failing()
    allocator.free(allocator.alloc(KIB))
    assert diagnosed(allocator, tmp_path).out_of_memory.record.largest_free_block_bytes is None


def test_a_snapshot_without_a_failure_tells_nothing(tmp_path):
    found = diagnosed(train(FakeAllocator()), tmp_path)
    assert (found.problem, found.out_of_memory) == (None, None)


def test_a_failure_after_which_steps_ended_was_caught(tmp_path):
    allocator = failing()
    train(allocator, num_steps=2)
    found = diagnosed(allocator, tmp_path)
    assert (found.problem, found.out_of_memory) == (None, None)
    [note] = [one for one in open_run(tmp_path / "run").manifest.notes if "failed" in one]
    assert note.endswith("1 allocation failed, and 2 steps ended after that: the script went on.")


def test_a_failure_after_which_memory_was_allocated_may_have_been_caught(tmp_path):
    allocator = failing()
    assert diagnosed(allocator, tmp_path).is_certain
    allocator.alloc(KIB)
    (tmp_path / "later").mkdir()
    assert not diagnosed(allocator, tmp_path / "later").is_certain
