"""Find ranks that share too few cores, and ranks far from their GPU.

A process that runs on the cores of one NUMA node and drives a GPU of another node crosses the link
between the nodes with each launch and each copy. How much that costs depends on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.run import RankRecord


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores on which a rank may run, and who else may."""

    threads: int
    """Threads of torch's operators, of all these ranks."""
    cores: int
    ranks: int

    @property
    def threads_of_each(self) -> int:
        """The most threads of a rank that leave each thread a core, at least 1."""
        return max(self.cores // self.ranks, 1)


@dataclass(frozen=True, slots=True)
class FarDevice:
    """A rank whose process may not run on the NUMA node of its GPU."""

    rank: int
    core_nodes: tuple[int, ...]
    device_node: int
    num_ranks: int
    """All such ranks."""


def find_shared_cores(records: Sequence[RankRecord], rank: int) -> SharedCores | None:
    """The cores of a rank, with the ranks of its host that may run on them; None: unknown."""
    record = next((each for each in records if each.rank == rank), None)
    work = None if record is None else record.host_work
    if record is None or work is None or not (work.num_cores and work.num_threads):
        return None
    own = work.core_numbers
    beside = [
        each.host_work
        for each in records
        if each.host == record.host
        and each.host_work is not None
        and (each is record or own & each.host_work.core_numbers)
    ]
    cores = frozenset[int]().union(*(each.core_numbers for each in beside))
    return SharedCores(
        threads=sum(each.num_threads for each in beside),
        cores=len(cores) or work.num_cores,
        ranks=len(beside),
    )


def find_far_device(records: Sequence[RankRecord]) -> FarDevice | None:
    """The first rank that runs on other NUMA nodes than that of its GPU; None: none is known."""
    far = [
        (record.rank, tuple(work.core_nodes), work.device_node)
        for record in records
        if (work := record.host_work) is not None
        and work.device_node is not None
        and work.core_nodes
        and work.device_node not in work.core_nodes
    ]
    return FarDevice(*far[0], num_ranks=len(far)) if far else None
