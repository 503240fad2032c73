"""The storage tracker sees every storage once: plain tensors with exact bytes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.storage_log import TrackedStepMemory
from fsdp_inspect.recording.storage_tracker import (
    FailedAllocation,
    MemoryLimit,
    StorageTracker,
)
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.tables import MemoryTable
from tests.torch_versions import needs_torch

KIB = 1024


class Place:
    """The position of the training loop, which tests set."""

    def __init__(self, unit: int = -1, phase: Phase = Phase.FORWARD) -> None:
        self.unit = unit
        self.phase = phase

    def __call__(self) -> tuple[int, int]:
        return self.unit, self.phase


def kib(num_kib: int) -> torch.Tensor:
    """A new tensor of this many KiB."""
    return torch.empty(num_kib * KIB, dtype=torch.uint8)


def end_of_step(body: Callable[[], Any]) -> TrackedStepMemory:
    """Run the body under a tracker and keep its result alive until the end."""
    tracker = StorageTracker(Place())
    with tracker:
        kept = body()
    del kept
    return tracker.result()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def tracker(place: Place) -> StorageTracker:
    return StorageTracker(place)


# --- every storage is counted once


def test_allocation_and_release_are_counted(tracker):
    with tracker:
        first = kib(3)
        del first
        second = kib(2)
    memory = tracker.result()
    assert memory.peak.total_bytes == 3 * KIB
    assert memory.end.total_bytes == second.nbytes == 2 * KIB


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base[:10], id="slice"),
        pytest.param(lambda base: base.view(2, -1).t(), id="transpose"),
        pytest.param(lambda base: base.expand(8, -1), id="expand"),
        pytest.param(lambda base: base.detach(), id="detach"),
        pytest.param(lambda base: base.view(torch.int32), id="other dtype"),
        pytest.param(lambda base: base.fill_(1), id="in place"),
        pytest.param(lambda base: torch.add(base, 1, out=base), id="out"),
        pytest.param(lambda base: base.split(100), id="several views"),
    ],
)
def test_aliases_share_the_bytes_of_their_storage(view):
    def keep_both():
        base = kib(4)
        return base, view(base)

    assert end_of_step(keep_both).end.total_bytes == 4 * KIB


def test_storage_lives_until_its_last_view_dies(tracker):
    with tracker:
        view = kib(4)[:1]
        tracker.mark(MemoryPoint.FORWARD_END)
        del view
    memory = tracker.result()
    assert memory.marks[0].instant.total_bytes == 4 * KIB
    assert memory.end.total_bytes == 0


def test_a_parameter_of_another_model_is_no_activation(tracker):
    teacher = torch.ones(KIB // 4, requires_grad=True)
    with tracker:
        with torch.no_grad():
            target = teacher.exp()
        tracker.mark(MemoryPoint.FORWARD_END)
    held = tracker.result().marks[0].instant.by_category
    assert held == {MemoryCategory.INPUT: KIB, MemoryCategory.ACTIVATION: KIB}
    assert target.numel() == teacher.numel()


def test_storage_held_by_autograd_alone_is_alive(tracker, place):
    weight = torch.ones(KIB // 4, requires_grad=True)
    with tracker:
        loss = weight.exp().sum()
        tracker.mark(MemoryPoint.FORWARD_END)
        place.phase = Phase.BACKWARD
        loss.backward()
    forward_end = tracker.result().marks[0].instant
    assert forward_end.by_category == {
        MemoryCategory.INPUT: KIB,
        MemoryCategory.ACTIVATION: KIB + 4,
    }


@pytest.mark.parametrize(
    ("body", "num_bytes"),
    [
        pytest.param(lambda: torch.empty(0), 0, id="empty tensor"),
        pytest.param(lambda: torch.tensor([1.0, 2.0]), 8, id="from numbers"),
        pytest.param(lambda: torch.empty(1 << 20, device="meta"), 0, id="meta"),
        pytest.param(lambda: [kib(1), (kib(2), {"key": kib(3)})], 6 * KIB, id="several"),
        pytest.param(lambda: kib(1).resize_(2 * KIB), 2 * KIB, id="resize_ of a tensor"),
        pytest.param(lambda: torch.topk(torch.zeros(8), 2), 2 * 4 + 2 * 8, id="two results"),
        pytest.param(lambda: torch.eye(3).to_sparse(), 3 * 4 + 2 * 3 * 8, id="sparse"),
    ],
)
def test_results_of_every_kind_are_counted(body, num_bytes):
    assert end_of_step(body).end.total_bytes == num_bytes


def test_storages_of_another_device_are_left_out_when_one_is_watched():
    tracker = StorageTracker(Place(), device_type="cuda")
    with tracker:
        kept = kib(1)
    assert kept.device.type == "cpu"
    assert tracker.result().peak.total_bytes == 0


def test_resizing_a_storage_frees_and_allocates(tracker):
    unsharded = kib(4)
    tracker.register_known(MemoryCategory.UNSHARDED_PARAMETER, unsharded, 3)
    with tracker:
        unsharded.untyped_storage().resize_(0)
        tracker.mark(MemoryPoint.FORWARD_START)
        unsharded.untyped_storage().resize_(8 * KIB)
    memory = tracker.result()
    assert [memory.start.total_bytes, memory.marks[0].instant.total_bytes] == [4 * KIB, 0]
    assert memory.end.owned == {(3, MemoryCategory.UNSHARDED_PARAMETER): 8 * KIB}


def test_empty_storage_that_nobody_named_counts_once_it_is_resized(tracker):
    outside = kib(1)
    outside.untyped_storage().resize_(0)
    with tracker:
        outside.untyped_storage().resize_(KIB)
    assert tracker.result().end.total_bytes == KIB


def test_resizes_between_registration_and_the_step_are_noticed(tracker):
    parameter = kib(4)
    tracker.register_known(MemoryCategory.UNSHARDED_PARAMETER, parameter, 0)
    parameter.untyped_storage().resize_(KIB)
    with tracker:
        pass
    assert tracker.result().start.total_bytes == KIB


def test_registered_storage_that_dies_before_the_step_does_not_rest(tracker):
    tracker.register_known(MemoryCategory.INPUT, [kib(4)], -1)
    with tracker:
        kept = kib(1)
    assert tracker.result().peak.total_bytes == kept.nbytes


def test_registered_tensors_that_share_a_storage_rest_once(tracker):
    shared = kib(4)
    tracker.register_known(MemoryCategory.BUFFER, (part for part in shared.split(KIB)), -1)
    with tracker:
        pass
    assert tracker.result().start.by_category == {MemoryCategory.BUFFER: 4 * KIB}


# --- kinds of storages


def test_classification_holds_for_the_whole_life_of_a_storage(tracker, place):
    with tracker:
        gathered = kib(2)
        tracker.mark(MemoryPoint.FORWARD_START)
        tracker.classify(gathered.untyped_storage(), MemoryCategory.ALL_GATHER_BUFFER, 5)
        del gathered
    instant = tracker.result().marks[0].instant
    assert instant.owned == {(5, MemoryCategory.ALL_GATHER_BUFFER): 2 * KIB}


def test_last_classification_counts(tracker):
    with tracker:
        output = kib(2)
        tracker.classify(output, MemoryCategory.REDUCE_SCATTER_BUFFER, 1)
        tracker.classify(output[:5], MemoryCategory.SHARDED_GRADIENT, 1)
    assert tracker.result().peak.by_category == {MemoryCategory.SHARDED_GRADIENT: 2 * KIB}


def test_unclassified_storage_belongs_to_the_unit_that_allocated_it(tracker, place):
    with tracker:
        place.unit = 2
        kept = kib(1)
        place.unit = 3
        del kept
    assert tracker.result().peak.by_owner == {2: {MemoryCategory.TEMPORARY: KIB}}


def test_tensor_that_existed_before_and_was_not_named_is_an_input_from_its_first_use(tracker):
    mask = torch.ones(KIB, dtype=torch.bool)
    with tracker:
        tracker.mark(MemoryPoint.FORWARD_START)
        mask.any()
    memory = tracker.result()
    assert memory.marks[0].instant.total_bytes == 0
    assert memory.end.by_category == {MemoryCategory.INPUT: KIB}


def test_classifying_after_the_step_changes_nothing(tracker):
    with tracker:
        kept = kib(1)
    tracker.classify(kept, MemoryCategory.BUFFER, 0)
    assert MemoryCategory.BUFFER not in tracker.result().peak.by_category


def test_recomputed_activations_are_activations(tracker, place):
    layer = nn.Linear(16, 16, bias=False)
    inputs = torch.ones(64, 16)
    tracker.register_known(MemoryCategory.SHARDED_PARAMETER, layer.weight, 0)
    tracker.register_known(MemoryCategory.INPUT, inputs, -1)
    with tracker:
        block = nn.Sequential(layer, nn.Sigmoid(), nn.Sigmoid())
        loss = checkpoint(block, inputs, use_reentrant=False, preserve_rng_state=False).sum()
        tracker.mark(MemoryPoint.FORWARD_END)
        place.phase = Phase.BACKWARD
        loss.backward()
    forward_end, peak = tracker.result().marks[0].instant, tracker.result().peak
    # Forward keeps the loss only; backward recomputes both sigmoids' outputs (64 x 16 float32).
    assert forward_end.by_category[MemoryCategory.ACTIVATION] == 4
    assert peak.by_category[MemoryCategory.ACTIVATION] == 4 + 2 * 4096


# --- against computation by hand, and against torch


def test_peak_of_one_layer_is_the_one_computed_by_hand(tracker, place):
    weight = torch.randn(8, 8, requires_grad=True)  # 256 B
    inputs = torch.randn(4, 8)  # 128 B
    tracker.register_known(MemoryCategory.SHARDED_PARAMETER, weight, 0)
    tracker.register_known(MemoryCategory.INPUT, inputs, -1)
    with tracker:
        loss = (inputs @ weight).relu().sum()
        tracker.mark(MemoryPoint.FORWARD_END)
        place.phase = Phase.BACKWARD
        loss.backward()
        tracker.mark(MemoryPoint.BACKWARD_END)
    forward_end, backward_end = tracker.result().marks
    # 384 resting; product 128 and relu 128 together are the forward's peak; the loss has 4.
    assert (forward_end.peak_bytes, forward_end.instant.total_bytes) == (640, 516)
    # Resting, loss, its gradient 4, the relu's gradient 128, the weight's 256; relu is freed.
    assert (backward_end.peak_bytes, backward_end.instant.total_bytes) == (776, 644)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"foreach": False}, id="for-loop"),
        pytest.param({"foreach": True}, id="foreach"),
        pytest.param({"fused": True}, id="fused"),
        pytest.param({"amsgrad": True, "foreach": True}, id="amsgrad"),
    ],
)
def test_peak_of_a_plain_model_is_that_of_torchs_tracker(options, num_microbatches):
    from torch.distributed._tools import MemTracker

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def train(model, optimizer, between=lambda: None):
        for _ in range(num_microbatches):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            between()
        optimizer.step()
        optimizer.zero_grad()

    tokens = torch.arange(48)
    model, optimizer = build()
    theirs = MemTracker()
    theirs.track_external(model, optimizer, tokens)
    with theirs:
        train(model, optimizer, between=theirs.reset_mod_stats)
    model, optimizer = build()
    ours = StorageTracker(Place())
    ours.register_known(MemoryCategory.SHARDED_PARAMETER, model.parameters(), 0)
    ours.register_known(MemoryCategory.INPUT, tokens, -1)
    with ours:
        train(model, optimizer)
    theirs_total = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ours.result().peak.total_bytes == theirs_total


# --- no traces remain


def test_resize_of_storages_is_torchs_own_again_after_the_step(tracker):
    before = dict(vars(torch.UntypedStorage))
    with tracker:
        assert vars(torch.UntypedStorage) != before
    assert dict(vars(torch.UntypedStorage)) == before


def test_a_step_that_raises_restores_everything_and_its_memory_is_known(tracker):
    before = dict(vars(torch.UntypedStorage))

    def step():
        with tracker:
            kib(1)
            raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert tracker.result().peak.total_bytes == KIB
    assert dict(vars(torch.UntypedStorage)) == before
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nested_trackers_restore_resize_in_turn(tracker):
    before = dict(vars(torch.UntypedStorage))
    inner = StorageTracker(Place())
    storage = kib(1).untyped_storage()
    with tracker, inner:
        storage.resize_(2 * KIB)
    assert [t.result().peak.total_bytes for t in (tracker, inner)] == [2 * KIB, 2 * KIB]
    assert dict(vars(torch.UntypedStorage)) == before


def test_tracker_and_tensors_are_freed_without_the_garbage_collector():
    gc.disable()
    try:
        tracker = StorageTracker(Place())
        weight = torch.ones(8, requires_grad=True)
        tracker.register_known(MemoryCategory.SHARDED_PARAMETER, weight, 0)
        with tracker:
            weight.exp().sum().backward()
        memory = tracker.result()
        gone = [weakref.ref(tracker), weakref.ref(weight), weakref.ref(weight.untyped_storage())]
        del tracker, weight
        assert [reference() for reference in gone] == [None, None, None]
        assert memory.peak.total_bytes > 0
    finally:
        gc.enable()


def test_a_bug_of_ours_ends_the_tracking_and_not_the_step(tracker, place, monkeypatch):
    with tracker:
        monkeypatch.setattr(place, "unit", None)
        monkeypatch.setattr(Place, "__call__", lambda self: 1 / 0)
        computed = torch.ones(2) + torch.ones(2)
        monkeypatch.undo()
    assert computed.tolist() == [2.0, 2.0]
    assert "ZeroDivisionError" in str(tracker.problem)
    with pytest.raises(RecordingError, match="could not be tracked: ZeroDivisionError"):
        tracker.result()


def test_a_mode_that_overlaps_the_step_makes_its_result_unknown_and_ends_well(tracker):
    other = TorchDispatchMode()
    other.__torch_dispatch__ = lambda func, types, args=(), kwargs=None: func(*args, **kwargs or {})
    other.__enter__()
    tracker.__enter__()
    other.__exit__(None, None, None)
    tracker.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0
    with pytest.raises(RecordingError, match="another dispatch mode"):
        tracker.result()


def test_a_compiled_model_stays_compiled_through_a_memory_step():
    needs_torch("2.11", "compiles nothing under a dispatch mode")
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    model = torch.compile(nn.Linear(4, 4), backend=backend)
    with StorageTracker(Place()):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(compilations) == 1
    torch.compiler.reset()


# --- wrong use


def test_result_before_the_step_says_when_it_exists(tracker):
    with pytest.raises(RecordingError, match="not begun"):
        tracker.result()


def test_result_during_the_step_says_when_it_exists(tracker):
    with tracker, pytest.raises(RecordingError, match="still running"):
        tracker.result()


def test_second_step_under_one_tracker_is_refused(tracker):
    with tracker:
        pass
    with pytest.raises(RecordingError, match="Make a new StorageTracker"):
        tracker.__enter__()


def test_rows_have_the_columns_of_the_memory_table(tracker):
    with tracker:
        kept = kib(1)
        tracker.mark(MemoryPoint.FORWARD_END, microbatch=2)
    rows = [dict(zip(MemoryTable.DTYPES, row, strict=True)) for row in tracker.rows(step=4)]
    assert [(row["point"], row["microbatch"]) for row in rows] == [
        (MemoryPoint.FORWARD_END, 2),
        (MemoryPoint.PEAK, 0),
        (MemoryPoint.PEAK_BY_OWNER, 0),
        (MemoryPoint.PHASE_PEAK, -1),
        (MemoryPoint.PHASE_PEAK_BY_OWNER, -1),
        (MemoryPoint.END_BY_OWNER, -1),
    ]
    assert {row["allocated"] for row in rows} == {kept.nbytes}


# --- a limit of the live bytes


class Limited:
    """A tracker with a limit, which logs the failed allocations."""

    def __init__(self, num_kib: int) -> None:
        self.failed: list[FailedAllocation] = []
        self.place = Place()
        self.tracker = StorageTracker(
            self.place,
            find_place=lambda frame: 7,
            limit=MemoryLimit(num_kib * KIB, self._make_error),
        )

    def _make_error(self, failed: FailedAllocation) -> BaseException:
        self.failed.append(failed)
        return torch.OutOfMemoryError("too much")


def test_an_allocation_that_passes_the_limit_raises_with_its_size_and_is_dropped() -> None:
    limited = Limited(100)
    with limited.tracker:
        kept = kib(60)
        limited.place.unit, limited.place.phase = 3, Phase.BACKWARD
        with pytest.raises(torch.OutOfMemoryError):
            kib(41)
        fits = kib(40)

    [failed] = limited.failed
    assert (failed.num_bytes, failed.live_bytes, failed.place) == (41 * KIB, 60 * KIB, 7)
    assert failed.moment[:2] == (3, Phase.BACKWARD)
    assert [each.num_bytes for each in failed.log.alive_at(failed.position)] == [60 * KIB]
    del kept, fits


def test_a_freed_storage_makes_room_under_the_limit() -> None:
    limited = Limited(100)
    with limited.tracker:
        for _ in range(5):
            kib(90)
    assert not limited.failed


def test_a_resize_that_passes_the_limit_raises_before_it_allocates() -> None:
    limited = Limited(100)
    with limited.tracker:
        kept = kib(60)
        freed = kib(20)
        freed.untyped_storage().resize_(0)
        with pytest.raises(torch.OutOfMemoryError):
            freed.untyped_storage().resize_(41 * KIB)
        assert freed.untyped_storage().nbytes() == 0
    assert limited.failed[0].num_bytes == 41 * KIB
    del kept


def test_storages_from_before_the_tracker_count_for_the_limit() -> None:
    limited, parameter = Limited(100), kib(90)
    limited.tracker.register_known(MemoryCategory.SHARDED_PARAMETER, [parameter], 0)
    with limited.tracker, pytest.raises(torch.OutOfMemoryError):
        kib(11)
    assert [(each.category, each.place) for each in limited.failed[0].log.alive_at(1)] == [
        (MemoryCategory.SHARDED_PARAMETER, 0)
    ]


def test_a_tracker_of_several_steps_keeps_what_is_alive_with_its_category_and_line() -> None:
    limited = Limited(100)
    with limited.tracker:
        kept, dropped = kib(10), kib(20)
        limited.tracker.classify(kept, MemoryCategory.BUFFER, 2)
        first = limited.tracker.end_step()
        del dropped
        more = kib(30)
        second = limited.tracker.end_step()

    assert first.summarize().peak.total_bytes == 30 * KIB
    assert second.summarize().start.total_bytes == 30 * KIB
    assert second.summarize().end.total_bytes == 40 * KIB
    [buffer] = [each for each in second.alive_at(4) if each.category is MemoryCategory.BUFFER]
    assert (buffer.owner_unit, buffer.place, buffer.num_bytes) == (2, 7, 10 * KIB)
    del kept, more


def test_what_an_exception_frees_does_not_change_the_categories_at_the_failure() -> None:
    limited = Limited(100)
    limited.place.phase = Phase.FORWARD
    with limited.tracker, pytest.raises(torch.OutOfMemoryError):
        _ = [kib(60), kib(60)]
    [failed] = limited.failed
    log = failed.log.until(failed.position, failed.moment)
    assert [each.category for each in log.alive_at(failed.position)] == [MemoryCategory.ACTIVATION]


def test_the_highest_moment_of_a_unit_and_phase_is_found() -> None:
    limited = Limited(1000)
    with limited.tracker:
        limited.place.unit, limited.place.phase = 1, Phase.FORWARD
        first = kib(50)
        limited.place.unit = 2
        second = kib(30)
    log = limited.tracker.log
    assert log.highest(1, Phase.FORWARD)[0] == 1
    assert log.highest(2, Phase.FORWARD)[0] == 2
    assert log.highest(9, Phase.BACKWARD)[0] == 2  # the peak of the step
    del first, second
