"""Collectives of the training script, issued one by one or through the coalescing manager."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fsdp_inspect.recording.clocks import CudaClock, HostClock
from fsdp_inspect.recording.dist_calls import DistCalls
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import WAIT_OF, EventFlag, EventKind, Method, Phase
from fsdp_inspect.trace.tables import EventTable

from .virtual_device import MS, VirtualDevice


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Recorded:
    """The rows of the collectives that run in the block."""

    def __init__(self, clock: Any = None) -> None:
        self._rows: list[tuple[int, ...]] = []
        self.session = Session(clock or HostClock(), self._rows.append, ProcessGroups())
        self._patches = Patches()
        self.calls = DistCalls(self.session, lambda unit: Reductions())

    def __enter__(self) -> Recorded:
        self.calls.attach(self._patches)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        assert self.session.journal.settle(5.0) == 0

    def collectives(self) -> list[dict[str, int]]:
        return [row for row in self._named() if row["bytes"] >= 0]

    def waits(self) -> list[dict[str, int]]:
        kinds = {EventKind.OTHER_WAIT, *WAIT_OF.values()}
        return [row for row in self._named() if row["kind"] in kinds]

    def _named(self) -> list[dict[str, int]]:
        return [dict(zip(EventTable.DTYPES, row, strict=True)) for row in self._rows]


def manager(**options: Any) -> Any:
    # Looked up at the call, like torch's own callers.
    return dist.distributed_c10d._coalescing_manager(**options)


def test_a_coalesced_collective_is_one_row_with_all_bytes() -> None:
    tensors = [torch.ones(size) for size in (10, 20, 30)]
    with Recorded() as recorded, manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    [row] = recorded.collectives()
    assert (row["kind"], row["bytes"]) == (EventKind.ALL_REDUCE, 60 * 4)
    assert row["method"] == Method.HOST_BLOCKING
    assert row["end_ns"] > row["start_ns"]
    assert row["sequence"] == 0


def test_an_asynchronous_coalesced_collective_ends_with_its_work() -> None:
    with Recorded() as recorded:
        with manager(async_ops=True) as work:
            dist.all_reduce(torch.ones(8))
            dist.all_reduce(torch.ones(8))
        work.wait()
    [row] = recorded.collectives()
    assert row["bytes"] == 64
    assert row["flags"] & EventFlag.ASYNC


def test_the_wait_for_an_asynchronous_collective_is_where_the_script_waits() -> None:
    with Recorded() as recorded:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        issued_ns = time.perf_counter_ns()
        assert recorded.collectives() == []
        work.wait()
        work.wait()
    [row] = recorded.collectives()
    [wait] = recorded.waits()
    assert row["flags"] & EventFlag.ASYNC
    assert row["start_ns"] < row["end_ns"]
    assert row["start_ns"] < issued_ns <= row["need_ns"] == wait["start_ns"]
    assert wait["collective"] == row["collective"]


def test_an_asynchronous_collective_that_is_never_waited_for_ends_with_its_future() -> None:
    with Recorded() as recorded:
        future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
        while not future.done():
            time.sleep(0.001)
        recorded.calls.close()
    [row] = recorded.collectives()
    assert row["end_ns"] > row["start_ns"]
    assert recorded.waits() == []
    assert recorded.session.problems == []


def test_on_a_device_an_asynchronous_collective_ends_with_the_wait_for_it() -> None:
    device = VirtualDevice()
    with Recorded(CudaClock(device)) as recorded:
        issued_ns = device.host_ns()
        work = dist.all_reduce(torch.ones(8), async_op=True)
        device.run("forward", "x", 3 * MS)
        device.now_ns += 3 * MS
        work.wait()
        device.now_ns += MS
        dist.all_reduce(torch.ones(4), async_op=True)
        recorded.calls.close()
    [row] = recorded.collectives()
    assert row["method"] == Method.INFERRED
    assert row["flags"] & EventFlag.LATEST_END
    assert row["start_ns"] == pytest.approx(issued_ns, abs=200)
    assert row["end_ns"] == pytest.approx(issued_ns + 3 * MS, abs=200)
    [problem] = recorded.session.problems
    assert "was never waited for" in problem


def test_a_wait_during_the_capture_of_a_graph_takes_no_mark() -> None:
    with Recorded() as recorded:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        recorded.session.pause("A graph is captured.")
        work.wait()
        recorded.session.resume()
        recorded.calls.close()
    assert recorded.collectives() == []
    assert recorded.session.problems == ["A graph is captured."]


def test_a_call_after_the_manager_is_a_row_of_its_own() -> None:
    with Recorded() as recorded:
        with manager():
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(2))
    assert [row["bytes"] for row in recorded.collectives()] == [16, 8]


def test_an_empty_manager_records_nothing() -> None:
    with Recorded() as recorded, manager():
        pass
    assert recorded.collectives() == []


def test_what_is_raised_in_the_block_goes_through_and_recording_goes_on() -> None:
    with Recorded() as recorded:
        with pytest.raises(KeyError, match="mine"), manager():
            raise KeyError("mine")
        dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch does not remove its queue
        dist.all_reduce(torch.ones(2))
    assert [row["bytes"] for row in recorded.collectives()] == [8]
    assert recorded.session.active


def test_a_reduction_after_a_forward_of_an_evaluation_belongs_to_the_evaluation() -> None:
    with Recorded() as recorded:
        session = recorded.session
        session.enter_forward(session.clock.mark(), grad_enabled=False)
        session.leave_forward(session.clock.mark())
        with torch.no_grad():
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
    phases = [row["phase"] for row in recorded.collectives()]
    assert phases == [Phase.EVALUATION, Phase.OUTSIDE]


def test_functions_that_torch_compares_are_never_replaced() -> None:
    isend, irecv = dist.isend, dist.irecv
    message = dist.P2POp(dist.isend, torch.ones(1), 0)
    send, receive = dist.ProcessGroup.send, dist.ProcessGroup.recv
    with Recorded():
        assert (dist.isend, dist.irecv) == (isend, irecv)
        assert message.op is dist.isend
        assert dist.ProcessGroup.send is not send
    assert (dist.ProcessGroup.send, dist.ProcessGroup.recv) == (send, receive)


def test_a_functional_collective_that_another_collective_waits_for_is_recorded() -> None:
    with Recorded() as recorded:
        reduced = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        dist.all_reduce(reduced)  # its call waits for its message
    assert [row["bytes"] for row in recorded.collectives()] == [16, 16]
    assert {row["kind"] for row in recorded.collectives()} == {EventKind.ALL_REDUCE}


class FinishedWork(dist.Work):
    """The handle of a message that has arrived."""

    def wait(self, *args: object) -> bool:
        return True


def test_an_asynchronous_message_is_one_row_at_its_first_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "send", lambda *arguments: FinishedWork())
    with Recorded() as recorded:
        work = dist.isend(torch.ones(4), 0)
        assert recorded.collectives() == []
        assert work is not None
        assert isinstance(work, dist.Work)
        assert [work.wait(), work.wait()] == [True, True]
    [row] = recorded.collectives()
    assert (row["kind"], row["bytes"]) == (EventKind.POINT_TO_POINT, 16)
    assert row["flags"] & EventFlag.LATEST_END
    assert row["start_ns"] <= row["need_ns"] <= row["end_ns"]


def test_a_gather_of_another_dimension_is_recorded_where_torch_waits_in_the_call() -> None:
    has_new_name = hasattr(functional, "all_gather_single")
    name = "all_gather_single" if has_new_name else "all_gather_tensor"
    with Recorded() as recorded:
        getattr(functional, name)(torch.ones(3, 4), 1, dist.group.WORLD)
        recorded.session.step += 2
        recorded.calls.end_step()
    [row] = recorded.collectives()
    assert (row["kind"], row["bytes"]) == (EventKind.ALL_GATHER, 48)
    assert row["start_ns"] <= row["need_ns"] <= row["end_ns"]
    assert recorded.session.problems == []


@pytest.mark.parametrize("role", ["replicate", "other"])
def test_only_a_reduction_of_the_units_own_groups_belongs_to_the_unit(role: str) -> None:
    """Tensor parallelism reduces gradients of norms in FSDP's hook, over another group."""
    with Recorded() as recorded:
        session = recorded.session
        session.process_groups.index(None, role)
        session.hook_unit, session.phase = 3, Phase.BACKWARD
        dist.all_reduce(torch.ones(4))
    [row] = recorded.collectives()
    assert row["unit"] == (3 if role == "replicate" else -1)


def test_a_wait_for_the_future_of_a_collective_is_recorded() -> None:
    with Recorded() as recorded:
        future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
        issued_ns = time.perf_counter_ns()
        future.then(lambda done: done.value()).wait()
        future.wait()
    [row], [wait] = recorded.collectives(), recorded.waits()
    assert wait["start_ns"] == row["need_ns"]
    assert row["need_ns"] >= issued_ns
    assert row["start_ns"] < row["end_ns"]


def test_the_end_of_backward_waits_for_the_futures_of_communication_hooks() -> None:
    futures = []

    def reduce(gradient: torch.Tensor) -> None:
        futures.append(dist.all_reduce(gradient.clone(), async_op=True).get_future())

    with Recorded() as recorded:
        recorded.session.has_comm_hooks = True
        weights = [torch.ones(4, requires_grad=True) for _ in range(2)]
        for weight in weights:
            weight.register_hook(reduce)
        (weights[0] * weights[1]).sum().backward()
        ended_ns = time.perf_counter_ns()
    assert len(recorded.collectives()) == len(futures) == 2
    issued = max(row["issue_ns"] for row in recorded.collectives())
    for row, wait in zip(recorded.collectives(), recorded.waits(), strict=True):
        assert issued <= row["need_ns"] == wait["start_ns"]
        assert row["need_ns"] <= wait["end_ns"] <= ended_ns


class Link:
    """An emulated link on which each collective takes 60 s, longer than any busy machine."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None

    def take_transfer(self) -> Transfer | None:
        taken, self.transfer = self.transfer, None
        return taken

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        now_ns = time.perf_counter_ns()
        transfer = Transfer(EventKind.ALL_REDUCE, 16, now_ns, now_ns, now_ns + 60_000 * MS)
        self.transfer = transfer
        return EmulatedWork(transfer)


class EmulatedWork(FinishedWork):
    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self.transfer = transfer

    def wait(self, *args: object) -> bool:
        self.transfer.need_ns = time.perf_counter_ns()
        return True


def test_an_emulated_asynchronous_collective_is_waited_for_where_the_script_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link()
    monkeypatch.setattr(dist, "all_reduce", link.all_reduce)
    recorded = Recorded()
    monkeypatch.setattr(recorded.session, "emulation", link)
    with recorded:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert recorded.collectives() == []
        assert work is not None
        work.wait()
    [row], [wait] = recorded.collectives(), recorded.waits()
    assert row["end_ns"] - row["start_ns"] == 60_000 * MS
    assert row["start_ns"] < row["need_ns"] == wait["start_ns"]
    assert wait["end_ns"] == row["end_ns"]
