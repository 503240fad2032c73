"""Infer the units of a flight recorder dump from its message sizes and the sizes of a model.

A dump names no unit. `message_labels` finds the parts of the model by size. The order in a pass
tells blocks apart: forward gathers them in order, backward gathers and reduces them in reverse. A
dump that begins or ends within a pass is counted from the other side. Where the count of blocks
fits no pass, and from the first position at which the ranks differ, the block stays open:
`layers.*`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.importing.flight_recorder_file import Collective
from fsdp_inspect.importing.message_labels import (
    REDUCTIONS,
    MessageLabel,
    ModelParts,
    label_messages,
)
from fsdp_inspect.trace.codes import NO_UNIT, UNKNOWN_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import Unit

_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class NamedUnits:
    """The units of a model that a dump has messages of."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Elements of the all-gather of each unit."""
    units: dict[tuple[str, int], int]
    """The index of the unit of each collective, by group and position in it."""

    def describe(self) -> list[Unit]:
        """The units of the run. Their bytes are unknown: a dump has no dtype of a unit."""
        return [
            Unit(
                index=index,
                fqn=name,
                modules=name.split(", "),
                num_parameters=size,
                num_trainable_parameters=size,
                unsharded_bytes=0,
                sharded_bytes=0,
                reduce_bytes=0,
                param_dtype="unknown",
                reduce_dtype="unknown",
                reshard_after_forward=None,
                are_sizes_known=False,
            )
            for index, (name, size) in enumerate(zip(self.names, self.sizes, strict=True))
        ]


def name_units(
    groups: Mapping[str, tuple[Sequence[Collective], int, int]], model: ModelParts
) -> NamedUnits:
    """Infer the units of all groups.

    Args:
        groups: By name: its collectives of any rank by position, its number of ranks, and the
            first position at which the ranks differ.
        model: The parts of the model.
    """
    found: dict[tuple[str, int], str] = {}
    sizes: dict[str, int] = {}
    for group, (collectives, num_ranks, differs) in groups.items():
        labels = label_messages(collectives, model, num_ranks)
        named = [*_name_blocks(collectives, labels, model, differs)]
        for each, label, name in zip(collectives, labels, named, strict=True):
            if name:
                found[group, each.sequence] = name
                sizes.setdefault(name, label.elements)
    blocks = [f"{model.blocks}.{index}" for index in range(model.num_blocks)]
    ends = sorted(set(sizes) - {*blocks}, key=lambda name: name != model.first[0])
    names = [name for name in [*ends, *blocks] if name in sizes]
    places = {name: index for index, name in enumerate(names)}
    return NamedUnits(
        tuple(names),
        tuple(sizes[name] for name in names),
        {key: places[name] for key, name in found.items()},
    )


# --- Tell the blocks apart by their order.


def _name_blocks(
    collectives: Sequence[Collective],
    labels: Sequence[MessageLabel],
    model: ModelParts,
    differs: int,
) -> Iterator[str]:
    """The unit of each collective of a group; empty: none, or unknown."""
    order: dict[int, int] = {}
    gathers, reductions = (
        [at for at, each in enumerate(collectives) if each.kind in kinds and labels[at].elements]
        for kinds in ((EventKind.ALL_GATHER,), REDUCTIONS)
    )
    gaps = [*_gaps(gathers, labels, [at for at in reductions if labels[at].is_block])]
    again = {gap.num_again(model.num_blocks) for gap in gaps} - {None}
    known = again.pop() if len(again) == 1 else None
    for gap in gaps:
        passes = gap.gathers(model.num_blocks, known)
        for at, (number, phase) in zip(gap.places, passes, strict=True):
            if collectives[at].phase in (phase, Phase.OUTSIDE):
                order[at] = number
    for gap in _gaps(reductions, labels, ()):
        order.update(zip(gap.places, gap.reductions(model.num_blocks), strict=True))
    for at, (each, label) in enumerate(zip(collectives, labels, strict=True)):
        number = order.get(at, _UNKNOWN) if each.sequence < differs else _UNKNOWN
        if label.is_block:
            yield f"{model.blocks}.{'*' if number == _UNKNOWN else number}"
        else:
            yield label.name


@dataclass(frozen=True, slots=True)
class _Gap:
    """The blocks between two messages of other units."""

    left: MessageLabel | None
    """The message before; None: the dump begins here."""
    right: MessageLabel | None
    """The message after; None: the dump ends here."""
    places: tuple[int, ...]
    has_reductions: bool
    """Whether a block is reduced before the last all-gather."""

    def num_again(self, blocks: int) -> int | None:
        """The blocks that backward gathers again, from a complete gap; None: unknown."""
        if self.left is None or self.right is None:
            return None
        count = len(self.places)
        if count in (2 * blocks, 2 * blocks - 1):
            return count - blocks
        if self._is_backward and count in (blocks, blocks - 1):
            return count
        return None

    @property
    def _is_backward(self) -> bool:
        return self.has_reductions or self._follows_last

    @property
    def _follows_last(self) -> bool:
        return self.left is not None and self.left.has_last and not self.left.has_first

    @property
    def _precedes_last(self) -> bool:
        return self.right is not None and self.right.has_last and not self.right.has_first

    def gathers(self, blocks: int, again: int | None) -> list[tuple[int, Phase]]:
        """The number of each block that is gathered, and the pass of that number.

        Args:
            blocks: The number of blocks.
            again: The blocks that each backward gathers again; None: unknown.
        """
        count = len(self.places)
        forward = [(number, Phase.FORWARD) for number in range(blocks)]
        backward = [(number, Phase.BACKWARD) for number in reversed(range(again or 0))]
        if self.left is not None and self.right is not None:
            back = self.num_again(blocks)
            if back is not None:
                backward = [(number, Phase.BACKWARD) for number in reversed(range(back))]
                return backward if count == back else forward + backward
            is_forward = self._precedes_last or self.left.has_first
            return _take(forward if is_forward and count == blocks else [], count)
        if self.left is not None:  # the dump ends in this pass
            if self._follows_last:
                return _take(backward, count)
            is_forward = self.left.has_first and (count > blocks or not self.has_reductions)
            return _take(forward + backward if is_forward else [], count)
        if self._precedes_last:
            return _take(forward[::-1], count)[::-1]
        begins_next = self.right is not None and self.right.has_first and again is not None
        return _take((forward + backward)[::-1] if begins_next else [], count)[::-1]

    def reductions(self, blocks: int) -> list[int]:
        """The number of each block that is reduced."""
        count, backward = len(self.places), list(reversed(range(blocks)))
        if self.left is not None and self.right is not None:
            return backward if count == blocks else [_UNKNOWN] * count
        if self.left is not None:
            chosen = backward[:count]
        else:
            chosen = backward[-count:] if self.right is not None else []
        return chosen if len(chosen) == count else [_UNKNOWN] * count


def _take(numbers: Sequence[tuple[int, Phase]], count: int) -> list[tuple[int, Phase]]:
    """The first numbers; all unknown if there are too few."""
    return list(numbers[:count]) if count <= len(numbers) else [(_UNKNOWN, Phase.OUTSIDE)] * count


def _gaps(
    places: Sequence[int], labels: Sequence[MessageLabel], reductions: Sequence[int]
) -> Iterator[_Gap]:
    left: MessageLabel | None = None
    blocks: list[int] = []
    for at in [*places, None]:
        right = None if at is None else labels[at]
        if at is not None and right is not None and right.is_block:
            blocks.append(at)
            continue
        if blocks:
            is_mixed = any(blocks[0] < one < blocks[-1] for one in reductions)
            yield _Gap(left, right, tuple(blocks), is_mixed)
        left, blocks = right, []


def assign_units(collectives: Sequence[Collective], named: NamedUnits) -> tuple[Collective, ...]:
    """The collectives with the index of their unit, where it is known."""
    return tuple(
        each
        if each.unit == NO_UNIT
        else replace(each, unit=named.units.get((each.group, each.sequence), UNKNOWN_UNIT))
        for each in collectives
    )
