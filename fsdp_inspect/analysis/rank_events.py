"""Read the events of several ranks at once."""

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

_RANKS_AT_ONCE = 4


def events_of_ranks(
    run: RunSource,
    ranks: Iterable[int],
    *,
    steps: Collection[int] | None,
    kinds: Collection[int],
) -> Iterator[tuple[int, EventTable]]:
    """Read some ranks, with several threads: a file at a URL takes several round trips.

    Yields:
        Each rank, in the given order, with its events.

    Raises:
        IncompleteRunError: The run has no data of a rank.
        CorruptFileError: A file is damaged.
    """
    chosen = list(ranks)
    read = partial(run.events, steps=steps, kinds=kinds)
    if len(chosen) < 2:
        yield from ((rank, read(rank)) for rank in chosen)
        return
    with ThreadPoolExecutor(min(len(chosen), _RANKS_AT_ONCE)) as pool:
        yield from zip(chosen, pool.map(read, chosen), strict=True)
