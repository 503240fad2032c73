"""The background comparison of the order, while the training thread issues collectives."""

import sys
import threading
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fsdp_inspect.recording.black_box import BlackBoxWriter, Order
from fsdp_inspect.recording.order_check import WINDOW, OrderCheck
from fsdp_inspect.trace.black_box import CAPACITY, EMPTY_HEADER, Communicator
from fsdp_inspect.trace.codes import EventKind, Phase

WORLD = Communicator("world", (0, 1))
NUM_COLLECTIVES = 6 * CAPACITY


@pytest.fixture
def fast_switches() -> Iterator[None]:
    """The interpreter changes threads as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def check_of(
    rank: int, order: Order, store: dist.Store, contents: bytes = b"", name: str = "test"
) -> OrderCheck:
    return OrderCheck(
        store, name, rank, SimpleNamespace(orders=[order]), lambda: contents, lambda: ()
    )


def test_a_comparison_while_the_training_continues_finds_no_difference(fast_switches):
    store = dist.HashStore()
    mine, leader = Order(1, WORLD), Order(0, WORLD)
    mine.digests.extend(range(1, NUM_COLLECTIVES + 1))
    leads, follows = check_of(0, leader, store), check_of(1, mine, store)

    def train() -> None:
        for number in range(1, NUM_COLLECTIVES + 1):
            leader.digests.append(number)
            if number % 64 == 0:
                leader.forget_old()

    training = threading.Thread(target=train)
    training.start()
    while training.is_alive():
        assert leads.compare() == []
        assert follows.compare() == []
    training.join()
    assert leader.count == NUM_COLLECTIVES
    assert leader.newest(WINDOW)[1][-1] == leader.digest_at(NUM_COLLECTIVES) == NUM_COLLECTIVES


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def box_of(group: dist.ProcessGroup, units: list[int]) -> BlackBoxWriter:
    box = BlackBoxWriter(lambda: 5)
    for unit in units:
        box.issue(int(EventKind.ALL_GATHER), unit, group, 64, 1, Phase.FORWARD, 3, 0, 0)
    box.write_header(EMPTY_HEADER)
    return box


def test_the_order_goes_on_when_process_groups_are_created_again():
    box = BlackBoxWriter(lambda: 5)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        box.issue(int(EventKind.ALL_GATHER), 0, dist.group.WORLD, 64, 1, Phase.FORWARD, 3, 0, 0)
        dist.destroy_process_group()
    assert [order.count for order in box.orders] == [2]


@pytest.mark.parametrize(("other", "is_different"), [([0, 1, 2], False), ([0, 2, 1], True)])
def test_a_suspicion_is_reported_only_if_the_black_boxes_confirm_it(group, other, is_different):
    store = dist.HashStore()
    boxes = [box_of(group, [0, 1, 2]), box_of(group, other)]
    communicator = Communicator(boxes[0].orders[0].group.name, (0, 1))
    checks = []
    for rank, box in enumerate(boxes):
        order = box.orders[0]
        order.group = communicator
        checks.append(check_of(rank, order, store, box.contents()))
    members = zlib.crc32(b"(0, 1)")
    key = f"test/{communicator.name}/{members:x}"
    store.set(f"{key}/differs", "1")
    answers: dict[int, list[str]] = {}
    leader = threading.Thread(target=lambda: answers.update({0: checks[0].compare()}))
    leader.start()
    while not store.check([f"{key}/leader"]):
        pass
    answers[1] = checks[1].compare()
    leader.join()
    assert answers[0] == answers[1]
    assert bool(answers[0]) == is_different
