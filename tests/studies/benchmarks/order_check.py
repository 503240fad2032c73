"""Measure the comparison of the order of collectives: many ranks on one store, and `raise`.

The ranks are simulated: each is an `OrderCheck` with its own connection to one TCPStore, in a few
processes on this machine. In a round, every rank has issued a step of collectives and calls
`compare()` once. With `raise`, every rank is a thread that calls `agree()`, and waits for the rest.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch.distributed as dist

from fsdp_inspect.recording.black_box import Order
from fsdp_inspect.recording.order_check import OrderCheck, interval_s
from fsdp_inspect.trace.black_box import Communicator
from tests.studies.benchmarks.figures import Figure

HOST = "127.0.0.1"
PROCESSES = 4
COLLECTIVES_OF_A_STEP = 200
"""The collectives of a step of 66 units: all-gather, all-gather in backward, reduce-scatter."""
_MASK = (1 << 64) - 1
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one comparison of all ranks."""

    world_size: int
    rank_s: float
    """Processor time of one rank's thread in one comparison."""
    server_s: float
    """Processor time of the store's server for one comparison of all ranks."""


def measure_order_check(
    world_sizes: Sequence[int], agreeing: Sequence[int], rounds: int
) -> list[Figure]:
    """Measure the comparison in the background, and the comparison before each optimizer step.

    Args:
        world_sizes: Numbers of ranks that compare in the background.
        agreeing: Numbers of ranks that compare before each optimizer step.
        rounds: Comparisons of each rank.
    """
    compared = [_measure_compare(world_size, rounds) for world_size in world_sizes]
    agreed = [(size, _measure_agree(size, rounds)) for size in agreeing]
    return [*map(_compare_figure, compared), *(_agree_figure(*each) for each in agreed)]


def _measure_compare(world_size: int, rounds: int) -> Cost:
    with _Server() as server:
        before = server.processor_s()
        ranks = [range(first, world_size, PROCESSES) for first in range(PROCESSES)]
        spent = _run(_compare, [(server.port, world_size, each, rounds) for each in ranks])
        total = sum(spent)
        return Cost(
            world_size,
            total / world_size / rounds,
            (server.processor_s() - before) / rounds,
        )


def _measure_agree(world_size: int, rounds: int) -> float:
    """Seconds from the call of all ranks to their return, the median over rounds."""
    with _Server() as server:
        count = min(PROCESSES, world_size)
        ranks = [range(first, world_size, count) for first in range(count)]
        taken = _run(_agree, [(server.port, world_size, each, rounds) for each in ranks])
        return sorted(taken)[len(taken) // 2]


# --- the simulated ranks


def _compare(port: int, world_size: int, ranks: Sequence[int], rounds: int) -> list[float]:
    """Processor time of all comparisons of some ranks, without their connections."""
    checks = [_make_check(port, rank, world_size) for rank in ranks]
    spent = 0.0
    for number in range(rounds):
        for check, order in checks:
            order.digests += [hash((number, at)) & _MASK for at in range(COLLECTIVES_OF_A_STEP)]
            begin = time.thread_time()
            assert check.compare() == []
            spent += time.thread_time() - begin
    return [spent]


def _agree(port: int, world_size: int, ranks: Sequence[int], rounds: int) -> list[float]:
    """Seconds of each agreement of the first of some ranks."""
    taken: list[float] = []

    def work(rank: int) -> None:
        check, order = _make_check(port, rank, world_size)
        for number in range(rounds):
            order.digests += [hash((number, at)) & _MASK for at in range(COLLECTIVES_OF_A_STEP)]
            order.last = order.digests[-1]
            begin = time.monotonic()
            assert check.agree() is None
            if rank == ranks[0] and number:
                taken.append(time.monotonic() - begin)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _make_check(port: int, rank: int, world_size: int) -> tuple[OrderCheck, Order]:
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    order = Order(0, Communicator("world", tuple(range(world_size))))
    box: Any = SimpleNamespace(orders=[order])
    return OrderCheck(store, "bench", rank, box, lambda: b"", lambda: ()), order


# --- processes


class _Server:
    """A store in a separate process."""

    def __enter__(self) -> _Server:
        ours, theirs = _SPAWN.Pipe()
        self._stop = ours
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port: int = ours.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.send(None)
        self._process.join(30)

    def processor_s(self) -> float:
        """Processor time of the server's process so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)


def _serve(pipe: Any) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _run(work: Callable[..., list[float]], arguments: Sequence[tuple[Any, ...]]) -> list[float]:
    """The joined results of some processes."""
    with _SPAWN.Pool(len(arguments)) as pool:
        return [value for each in pool.starmap(work, arguments) for value in each]


# --- figures


def _compare_figure(cost: Cost) -> Figure:
    every = interval_s(cost.world_size)
    share = cost.rank_s / every
    return Figure(
        name=f"order check, {cost.world_size:,} ranks: processor time of a rank",
        value=f"{cost.rank_s * 1e6:.0f} µs every {every:g} s ({share:.3%} of a core)",
        aim="under 1% of a step of 500 ms",
        how=(
            f"`compare()` after {COLLECTIVES_OF_A_STEP} collectives, in the watchdog's thread. The "
            f"store's server takes {cost.server_s * 1e3:.1f} ms for all ranks, "
            f"{cost.server_s / every:.2%} of a core of its host."
        ),
        numbers={
            "rank_s": cost.rank_s,
            "server_s": cost.server_s,
            "interval_s": every,
        },
    )


def _agree_figure(world_size: int, seconds: float) -> Figure:
    return Figure(
        name=f"on_desync='raise', {world_size} ranks: wait before an update",
        value=f"{seconds * 1e3:.1f} ms",
        how="Median of `agree()`, called by all ranks at once; the ranks are threads here.",
        numbers={"seconds": seconds},
    )
