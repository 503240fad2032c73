"""Compare the batches of the ranks: tokens or samples of each step, and padding."""

from dataclasses import dataclass

from fsdp_inspect.statistics import median
from fsdp_inspect.trace.host_work import BatchWork
from fsdp_inspect.trace.run import RunSource

UNEVEN_RATIO = 1.1
"""A rank has more work in a step from this multiple of the median of the other ranks."""
_LEAST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenWork:
    """The batches of one rank against those of the other ranks."""

    rank: int
    ratio: float
    """The rank's work / the median of the other ranks, as the median over the steps with more."""
    num_more: int
    """Steps in which the rank has more work."""
    out_of: int
    """Steps in which all ranks know their batch."""
    word: str
    """`tokens` or `samples`."""
    padding_ratio: float | None
    """Fraction of the rank's tokens that masks on the host leave out; None: unknown."""
    balanced_ratio: float
    """Mean work of all ranks / the rank's work, over the steps with more."""


def measure_uneven_work(run: RunSource, rank: int) -> UnevenWork | None:
    """Compare the batches of a rank with those of the others; None: not recorded, or too few."""
    batches = {
        record.rank: {batch.step: batch for batch in record.host_work.batches}
        for record in run.ranks
        if record.host_work is not None
    }
    own = batches.pop(rank, {})
    if not own or not batches:
        return None
    more: list[tuple[float, float]] = []
    out_of = 0
    for step, batch in own.items():
        others = [each[step] for each in batches.values() if step in each]
        if len(others) < len(batches) or not _are_alike([batch, *others]):
            continue
        out_of += 1
        usual = median([each.size for each in others]) or 0
        if usual and batch.size >= UNEVEN_RATIO * usual:
            mean = (batch.size + sum(each.size for each in others)) / (len(others) + 1)
            more.append((batch.size / usual, mean / batch.size))
    if out_of < _LEAST_STEPS or not more:
        return None
    more.sort()
    ratio, balanced = more[len(more) // 2]
    known = [batch for batch in own.values() if batch.used is not None]
    size = sum(batch.size for batch in known)
    return UnevenWork(
        rank=rank,
        ratio=ratio,
        num_more=len(more),
        out_of=out_of,
        word="tokens" if next(iter(own.values())).is_tokens else "samples",
        padding_ratio=1 - sum(batch.used or 0 for batch in known) / size if size else None,
        balanced_ratio=balanced,
    )


def _are_alike(batches: list[BatchWork]) -> bool:
    return len({batch.is_tokens for batch in batches}) == 1
