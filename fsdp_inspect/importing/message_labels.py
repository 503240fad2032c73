"""MessageLabel the messages of FSDP by the parts of a model that have their size.

The all-gather of a unit has its padded parameters, so a size identifies the parts that the unit
holds. All blocks of a model have one size. A part is in one unit only, and the embedding's unit is
reduced last: both tell units of equal size apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import prod

from fsdp_inspect.importing.flight_recorder_file import Collective
from fsdp_inspect.trace.codes import DTYPES, ITEMSIZE, NO_UNIT, EventKind

_BLOCK_TOLERANCE = 0.01
"""A block may have biases or norms that the model's sizes leave out."""
_VIEWED_SIZES = (2, 4)
"""Bytes of a parameter in an all-gather of mixed dtypes, which torch issues as uint8."""

REDUCTIONS = (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
"""gloo reduces and scatters with an all-reduce of the same size."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a decoder, by name, with the shapes of their parameters."""

    blocks: str
    """The name of the list of blocks, such as `model.layers`."""
    num_blocks: int
    block_shapes: Shapes
    first: tuple[str, Shapes]
    """The embedding."""
    last: tuple[tuple[str, Shapes], ...]
    """The last norm, and the output projection unless it is the embedding."""


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """The parts of the model in one message."""

    name: str = ""
    """The unit; empty: a block, or none of the model's."""
    is_block: bool = False
    has_first: bool = False
    has_last: bool = False
    elements: int = 0


NO_LABEL = MessageLabel()


def label_messages(
    collectives: Sequence[Collective], model: ModelParts, num_ranks: int
) -> list[MessageLabel]:
    """The label of each collective of a group."""
    sizes = [_sizes_of(each) for each in collectives]
    counts = Counter(size for mine in sizes for size in mine)
    for pad in (_pad_rows, _pad_sum):
        block = _block_size(counts, pad(model.block_shapes, num_ranks))
        if block:
            ends = _label_ends(
                counts,
                _reduced_last(collectives, sizes, block),
                model,
                partial(pad, num_ranks=num_ranks),
            )
            known = {**ends, block: MessageLabel(is_block=True, elements=block)}
            if block in ends:  # a block cannot be told from another unit
                del known[block]
            return [next((known[one] for one in each if one in known), NO_LABEL) for each in sizes]
    return [NO_LABEL] * len(sizes)


def _block_size(counts: Counter[int], expected: int) -> int:
    """The size of a block in the dump: as expected, else the most frequent near it; 0: none."""
    near = [size for size in counts if abs(size - expected) <= _BLOCK_TOLERANCE * expected]
    return max(near, key=lambda size: (size == expected, counts[size]), default=0)


def _reduced_last(
    collectives: Sequence[Collective], sizes: Sequence[list[int]], block: int
) -> dict[int, bool]:
    """Whether the messages of a size are reduced after the blocks, as the embedding's unit is."""
    found: dict[int, bool] = {}
    last: EventKind | None = None
    for each, mine in zip(collectives, sizes, strict=True):
        if block in mine:
            last = each.kind
        elif each.kind in REDUCTIONS and last is not None:
            found.update(dict.fromkeys(mine, last in REDUCTIONS))
    return found


def _label_ends(
    counts: Counter[int],
    is_last: Mapping[int, bool],
    model: ModelParts,
    measure: Callable[[Shapes], int],
) -> dict[int, MessageLabel]:
    """The labels of the sizes that parts other than blocks have. A part is in one unit only."""
    parts = [model.first, *model.last]
    chosen: dict[int, list[tuple[tuple[str, Shapes], ...]]] = {}
    for count in range(1, len(parts) + 1):
        for some in combinations(parts, count):
            size = measure(tuple(shape for _, shapes in some for shape in shapes))
            if size in counts and is_last.get(size) in (None, model.first in some):
                chosen.setdefault(size, []).append(some)
    possible = [
        choice
        for choice in product(*chosen.values())
        if len({name for some in choice for name, _ in some}) == sum(map(len, choice))
    ]
    labels = {}
    for place, size in enumerate(chosen):
        units = list(dict.fromkeys(choice[place] for choice in possible))
        labels[size] = MessageLabel(
            name=" or ".join(", ".join(name for name, _ in unit) for unit in units),
            has_first=all(model.first in unit for unit in units),
            has_last=all(any(part in unit for part in model.last) for unit in units),
            elements=size,
        )
    return labels


def _sizes_of(each: Collective) -> list[int]:
    """The elements of a message that may be of a unit."""
    dtype = DTYPES[each.dtype]
    itemsize = ITEMSIZE.get(dtype, 0)
    of_unit = each.kind is EventKind.ALL_GATHER or each.kind in REDUCTIONS
    if each.unit == NO_UNIT or not of_unit or each.bytes <= 0 or not itemsize:
        return []
    widths = (itemsize, *_VIEWED_SIZES) if dtype == "uint8" else (itemsize,)
    return [each.bytes // width for width in widths if each.bytes % width == 0]


def _pad_rows(shapes: Shapes, num_ranks: int) -> int:
    """The elements of FSDP2's all-gather, which pads the rows of each parameter."""
    return sum(_up(shape[0], num_ranks) * prod(shape[1:]) for shape in shapes)


def _pad_sum(shapes: Shapes, num_ranks: int) -> int:
    """The elements of FSDP1's all-gather, which pads the flat parameter."""
    return _up(sum(map(prod, shapes)), num_ranks)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
