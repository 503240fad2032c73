"""Define the measured durations of messages of many sizes, which a network probe writes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.records import SCHEMA_VERSION, Amount, Index, Moment, Record, WorldSize


class ProbedMessage(Record):
    """The durations of one kind of collective with one message size in one process group."""

    kind: str
    """Label of an `EventKind`: `all_gather`, `reduce_scatter` or `all_reduce`."""
    ranks: list[Index]
    """The process group of rank 0."""
    bytes: Amount
    """The full message: the output of an all-gather, the input of the other two."""
    count: Amount
    """Measured collectives."""
    duration_ns: Amount
    """Median of the measured durations; each is that of the slowest rank."""


class NetworkProbe(Record):
    """`network.json`: one probe of the network between the ranks of a run."""

    schema_version: int = SCHEMA_VERSION
    created_unix_ns: Moment = 0
    world_size: WorldSize
    backend: str
    device_type: str
    messages: list[ProbedMessage] = Field(default_factory=list)

    def durations_of(
        self, kind: EventKind, ranks: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes and durations (ns) of the messages of one kind and group, each of shape (n,)."""
        own = [
            (one.bytes, one.duration_ns)
            for one in self.messages
            if one.kind == kind.label and one.ranks == list(ranks)
        ]
        table = np.array(own, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]
