"""The causes of waits of torch's own FSDP2 in virtual time, where every cause is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.analysis.wait_causes import Cause, Waits, split_waits
from fsdp_inspect.trace.codes import EventKind, Phase

from .virtual_device import MS
from .virtual_training import WORLD_SIZE, Replay


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def last_step_of(replay: Replay) -> Waits:
    events = replay.events
    return split_waits(events.where(events.step == events.step.max()))


def causes_ms(waits: Waits) -> dict[str, float]:
    totals = waits.share_by_cause_ns.sum(axis=0) / MS
    return {cause.label: round(float(totals[cause]), 2) for cause in Cause if totals[cause]}


def in_forward(waits: Waits) -> Waits:
    return waits.where(waits.collectives.phase == Phase.FORWARD)


def test_a_slow_link_gives_bandwidth() -> None:
    # Gathers of 6 ms after forwards of 4 ms: the second one is exposed, three more by 2 ms each.
    waits = last_step_of(Replay(gather_ms=6, scatter_ms=0.1))
    assert causes_ms(in_forward(waits)) == {"floor": 6, "bandwidth": 6 + 3 * 2}


def test_a_late_host_gives_late_issue() -> None:
    # The host spends 5 ms in a block that computes 0.5 ms; each gather of 1 ms is half hidden.
    waits = last_step_of(Replay(gather_ms=1, scatter_ms=1, forward_ms=0.5, host_ms=5))
    assert causes_ms(in_forward(waits)) == {"floor": 1, "bandwidth": 1, "late_issue": 3 * 0.5}


def test_one_communicator_for_gathers_and_reductions_gives_serialized() -> None:
    # In backward, a gather of 6 ms is queued behind a reduction of 6 ms, next to compute of 8 ms.
    waits = last_step_of(Replay(gather_ms=6, scatter_ms=6))
    collectives = waits.collectives
    gathers = (collectives.kind == EventKind.ALL_GATHER) & (collectives.phase == Phase.BACKWARD)
    assert causes_ms(waits.where(gathers)) == {"bandwidth": 2, "serialized": 4 + 4}


def test_the_causes_of_the_step_add_up_to_the_time_the_stream_stood_still() -> None:
    waits = last_step_of(Replay(gather_ms=3, scatter_ms=7))
    assert waits.share_by_cause_ns.sum() == waits.exposed_ns.sum() > 0
