"""Measure the memory of the recorded step's units and pieces from the samples of a memory step.

Only memory steps record categories. The work's memory comes from the first memory step with samples
of every unit's forward and backward; its times are not used. A piece's memory is the change between
the unit boundaries around it, without the memory of communication.

[Note: older runs]
Runs without the columns `parameter` and `peak_compute` do not show the rise between two units, or
the part of a unit that rises. There, a unit that encloses others has only its gradients, and the
memory of the loss is 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.memory import Course, FirstUse, MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.parameters import (
    last_gradient_of,
    sharded_gradient_bytes,
    share_of,
)
from fsdp_inspect.simulation.workload import Op, Pass, Piece, Workload
from fsdp_inspect.trace.codes import OF_COMMUNICATION, MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable


class MeasuredMemory(NamedTuple):
    """The memory of the work of a memory step."""

    work: MemoryWork
    before_passes: Sequence[PieceMemory]
    """By pass, the memory of the code before it."""
    peak_bytes: int
    """The peak of the memory step."""


def measure_memory_work(
    samples: MemoryTable,
    units: Sequence[Unit],
    pieces: Sequence[Piece],
    passes: Sequence[Pass],
    shard: int,
    outputs: Mapping[str, int],
) -> MeasuredMemory | None:
    """The memory of a workload, and the peak of its memory step.

    Args:
        samples: Samples of one rank.
        units: Units by index in the workload.
        pieces: Pieces of the workload; `unit` is that index.
        passes: Passes of the workload.
        shard: Ranks of the shard group.
        outputs: `RankRecord.output_bytes`.

    Returns:
        None if no memory step has samples of every unit.
    """
    by_category = samples.sharded_parameter != MISSING_INT
    for step in np.unique(samples.step[by_category]).tolist():
        reader = _Reader(samples.where(samples.step == step), units, passes, shard, outputs)
        if reader.is_whole:
            peaks = samples.where(samples.step == step)
            peak = int(max(peaks.peak_allocated.max(), peaks.allocated.max()))
            return MeasuredMemory(reader.work(pieces), reader.between_passes(), peak)
    return None


class GrownMemory(NamedTuple):
    """The memory of a workload, changed to that of an unfinished step."""

    work: MemoryWork
    passes: Sequence[Pass]
    ratio: float
    """The bytes that forwards keep for backward, relative to the complete step, over the pieces
    that the unfinished step ran."""


def grow_memory(samples: MemoryTable, units: Sequence[Unit], workload: Workload) -> GrownMemory:
    """Change the memory of a workload to that of a step that did not end, as after a larger batch.

    The resting memory and the pieces that the step ran are measured. The memory of other pieces is
    scaled by the ratio of the bytes that forwards keep: of the same piece, or of all pieces.
    Gradients stay.

    Args:
        samples: Samples of the unfinished step of one rank.
        units: Units by index in the workload.
        workload: The workload, with the memory of a complete step.

    Raises:
        MissingDataError: The step ended before it ran the forward of a unit.
    """
    known = workload.memory
    assert known is not None, "the workload has memory"
    reader = _Reader(samples, units, workload.passes, shard=1, outputs={})
    now = reader.pieces_of_forward(workload.pieces)
    then_kept = sum(known.pieces[at].kept for at in now)
    if then_kept <= 0:
        raise MissingDataError(
            "The failed step ended before the forward of the first unit did, so its memory by unit "
            "is unknown. Expected one forward of a unit. Record a step with a smaller batch."
        )
    ratio = sum(each.kept for each in now.values()) / then_kept
    grown = [_grow(memory, now.get(at), ratio) for at, memory in enumerate(known.pieces)]
    resting = [reader.resting_bytes(unit) for unit in units]
    now_units = [
        replace(memory, resting=own) for memory, own in zip(known.units, resting, strict=True)
    ]
    work = replace(known, pieces=grown, units=now_units, rest=reader.rest_beyond(sum(resting)))
    passes = [replace(one, before_memory=_scale(one.before_memory, ratio))
              for one in workload.passes]  # fmt: skip
    return GrownMemory(work, passes, ratio)


def _grow(memory: PieceMemory, now: PieceMemory | None, ratio: float) -> PieceMemory:
    """The memory of a piece whose forward was measured (`now`) or not reached (None)."""
    own = now.kept / memory.kept if now is not None and memory.kept > 0 else ratio
    scaled = _scale(memory, own)
    if now is None:
        return scaled
    return replace(
        scaled, kept=now.kept, forward_rise=now.forward_rise, forward=now.forward or scaled.forward
    )


def _scale(memory: PieceMemory, ratio: float) -> PieceMemory:
    """The memory with all but gradients in proportion; unchanged within `_SAME_RATIO`."""
    if abs(ratio - 1) <= _SAME_RATIO:
        return memory
    return replace(
        memory,
        kept=round(memory.kept * ratio),
        forward_rise=round(memory.forward_rise * ratio),
        backward_rise=memory.gradients
        + round(max(memory.backward_rise - memory.gradients, 0) * ratio),
        left=round(memory.left * ratio),
        output=round(memory.output * ratio),
        forward=None,
        backward=None,
    )


_SAME_RATIO = 0.002
"""A smaller difference comes from storages whose release was not seen in the previous step."""

_PHASE_OF = {
    MemoryPoint.FORWARD_START: Phase.FORWARD,
    MemoryPoint.FORWARD_END: Phase.FORWARD,
    MemoryPoint.BACKWARD_START: Phase.BACKWARD,
    MemoryPoint.BACKWARD_END: Phase.BACKWARD,
}


class _Stretch(NamedTuple):
    """Pieces between two boundaries of units."""

    pieces: Sequence[int]
    begin: int
    """The sample at the first boundary."""
    end: int
    share: int = 0
    """Bytes by which shares change that smaller groups keep of units, for which the schedule
    accounts. A unit's share is allocated after its forward and freed before its backward."""


class _Reader:
    """Reads one memory step."""

    def __init__(
        self,
        samples: MemoryTable,
        units: Sequence[Unit],
        passes: Sequence[Pass],
        shard: int,
        outputs: Mapping[str, int],
    ) -> None:
        self._samples = samples
        self._copies = self._copies_of_backend()
        self._first = int(np.argmax(samples.microbatch == 0))
        """The first sample of the first forward."""
        self._units = units
        self._passes = passes
        self._shard = shard
        self._outputs = outputs
        self._leaves = _leaves(passes)
        self._rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        columns = (samples.microbatch, samples.point, samples.unit, samples.phase)
        for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            microbatch, point, unit, phase = key
            if phase == _PHASE_OF.get(point):  # not a forward that backward repeats
                self._rows[microbatch, point, unit].append(row)
        self._boundaries = [list(self._boundary_rows(one)) for one in passes]
        """By pass, the sample of each boundary; None: there is none."""
        self._records_rises = bool(np.any(samples.peak_compute != MISSING_INT))

    def _boundary_rows(self, one: Pass) -> Iterator[int | None]:
        """The sample of each boundary of a pass; a unit may have several of a kind."""
        for op, index in _boundaries_of(one):
            rows = self._rows.get((one.microbatch, int(_point(one, op)), self._units[index].index))
            yield rows.pop(0) if rows else None

    @property
    def is_whole(self) -> bool:
        """Whether every unit without inner units has its samples in each of the passes."""
        of_leaves = [
            row
            for one, rows in zip(self._passes, self._boundaries, strict=True)
            for (_, index), row in zip(_boundaries_of(one), rows, strict=True)
            if index in self._leaves
        ]
        return bool(of_leaves) and None not in of_leaves

    def between_passes(self) -> list[PieceMemory]:
        """By pass, the memory of the code before it; missing for the code before the first pass."""
        between = [PieceMemory()]
        for at, rows in enumerate(self._boundaries[1:]):
            begin = next((row for row in reversed(self._boundaries[at]) if row is not None), None)
            end = next((row for row in rows if row is not None), None)
            if not self._passes[at].is_forward:
                begin = self._reduced(begin)
            if not self._records_rises or begin is None or end is None or begin >= end:
                between.append(PieceMemory())
                continue
            kept = self._compute(end) - self._compute(begin)
            rise = self._rise(_Stretch((), begin, end))
            between.append(PieceMemory(kept=kept, forward_rise=rise))
        return between

    def _first_of_each_tape(self) -> Iterable[tuple[Pass, list[int | None]]]:
        """Passes with equal tapes share their pieces, so the first one shows their memory."""
        first: dict[object, tuple[Pass, list[int | None]]] = {}
        for one, rows in zip(self._passes, self._boundaries, strict=True):
            first.setdefault((one.phase, one.keeps_graph, one.tape), (one, rows))
        return first.values()

    def work(self, pieces: Sequence[Piece]) -> MemoryWork:
        """The memory of all pieces and units."""
        of_units = [self._unit(unit) for unit in self._units]
        return MemoryWork(
            pieces=self._pieces(pieces),
            units=of_units,
            rest=self._rest(of_units),
        )

    # --- pieces

    def _pieces(self, pieces: Sequence[Piece]) -> list[PieceMemory]:
        """The longest piece of each stretch gets the stretch's memory."""
        memory = [PieceMemory()] * len(pieces)
        for one, rows in self._first_of_each_tape():
            for stretch in self._known(self._stretches(one, rows), pieces):
                at = _longest(stretch, pieces)
                read = self._forward if one.is_forward else self._backward
                memory[at] = read(memory[at], stretch, pieces[at])
        memory = [replace(each, used=_used(each)) for each in memory]
        return memory if self._records_rises else self._with_late_gradients(memory, pieces)

    def pieces_of_forward(self, pieces: Sequence[Piece]) -> dict[int, PieceMemory]:
        """By piece, the memory of the forwards that the step ran, without their backward."""
        found: dict[int, PieceMemory] = {}
        for one, rows in self._first_of_each_tape():
            for stretch in self._stretches(one, rows) if one.is_forward else ():
                at = _longest(stretch, pieces)
                found[at] = self._forward(PieceMemory(), stretch, pieces[at])
        return found

    def resting_bytes(self, unit: Unit) -> int:
        """The sharded parameters and optimizer state of a unit at the first sample."""
        return self._unit(unit).resting

    def rest_beyond(self, resting_bytes: int) -> int:
        """The other memory at the first sample, without communication."""
        return self._compute(self._first) - resting_bytes

    def _forward(self, memory: PieceMemory, stretch: _Stretch, piece: Piece) -> PieceMemory:
        return replace(
            memory,
            kept=self._change(stretch),
            forward_rise=max(self._rise(stretch) - stretch.share, 0),
            forward=self._course(stretch, piece),
        )

    def _backward(self, memory: PieceMemory, stretch: _Stretch, piece: Piece) -> PieceMemory:
        grown = self._grown(MemoryCategory.UNSHARDED_GRADIENT, stretch)
        change = self._change(stretch)
        return replace(
            memory,
            backward_rise=self._rise(stretch),
            backward=self._course(stretch, piece),
            gradients=max(grown, 0),  # a reduction that is sampled late ends in the next stretch
            left=change - grown + memory.kept if self._records_rises else 0,
            # Older runs: other gradients may wait beside that of the output.
            output=self._outputs.get(str(self._units[piece.unit].index))
            or self._category(MemoryCategory.TEMPORARY, stretch.begin),
        )

    def _known(self, stretches: Iterable[_Stretch], pieces: Sequence[Piece]) -> Iterator[_Stretch]:
        """The stretches with known memory: only units without inner units in older runs."""
        for stretch in stretches:
            if self._records_rises or pieces[stretch.pieces[0]].unit in self._leaves:
                yield stretch

    def _with_late_gradients(
        self, memory: Sequence[PieceMemory], pieces: Sequence[Piece]
    ) -> list[PieceMemory]:
        """Add the gradients of an enclosing unit to its first piece, the last one of backward."""
        first = {piece.unit: at for at, piece in reversed([*enumerate(pieces)])}
        late = {at: self._units[unit] for unit, at in first.items() if unit not in self._leaves}
        return [
            replace(each, gradients=_gradient_bytes(late[at])) if at in late else each
            for at, each in enumerate(memory)
        ]

    def _stretches(self, one: Pass, rows: Sequence[int | None]) -> Iterator[_Stretch]:
        """The pieces between two boundaries of a pass, with the samples at both."""
        begin: int | None = None
        pieces: list[int] = []
        share = 0
        ends = iter(rows)
        for op, index in one.tape:
            if op is Op.RUN:
                pieces.append(index)
                continue
            end = next(ends)
            own = share_of(self._units[index], self._shard).kept
            if not one.is_forward:
                share = -own if op is Op.ENTER else 0
            yield from _stretch(pieces, begin, end, share)
            if one.is_forward:
                share = own if op is Op.LEAVE else 0
            is_reduced = op is Op.LEAVE and not one.is_forward
            begin, pieces = self._reduced(end) if is_reduced else end, []

    def _reduced(self, end: int | None) -> int | None:
        """The sample after a unit's reduction, which follows the end of its backward."""
        if end is None:
            return None
        samples = self._samples
        later = np.flatnonzero(
            (samples.point[end:] == MemoryPoint.AFTER_REDUCE)
            & (samples.microbatch[end:] == samples.microbatch[end])
        )
        return end + int(later[0]) if len(later) else end

    def _rise(self, stretch: _Stretch) -> int:
        """The peak of a stretch above its begin.

        If the samples include communication, its memory at the end is subtracted: prefetched
        all-gathers are issued right after the begin.
        """
        samples, end = self._samples, stretch.end
        high = int(samples.peak_compute[stretch.begin + 1 : end + 1].max())
        if high == MISSING_INT:
            high = max(int(samples.peak_allocated[end]), int(samples.allocated[end]))
            high -= self._communication(end)
        return max(high - self._compute(stretch.begin), 0)

    def _course(self, stretch: _Stretch, piece: Piece) -> Course | None:
        """The uses of the unit's parameters in the stretch; None without uses."""
        samples, unit = self._samples, self._units[piece.unit]
        names = [*unit.parameters]
        own = (samples.point == MemoryPoint.PARAMETER_USE) & (samples.unit == unit.index)
        begin_ns, end_ns = samples.time_ns[[stretch.begin, stretch.end]].tolist()
        rows = np.flatnonzero(own & (samples.time_ns >= begin_ns) & (samples.time_ns < end_ns))
        if not len(rows) or samples.parameter[rows].max() >= len(names):
            return None
        base = self._compute(stretch.begin)
        return Course(
            uses=tuple(
                FirstUse(
                    names[samples.parameter[row]],
                    level=self._compute(row) - base,
                    high=int(samples.peak_compute[row]) - base,
                    time_ns=int(samples.time_ns[row]),
                )
                for row in rows.tolist()
            ),
            end=self._compute(stretch.end) - base,
            high=self._rise(stretch),
            end_ns=end_ns,
        )

    # --- units

    def _unit(self, unit: Unit) -> UnitMemory:
        gradients = sharded_gradient_bytes(unit, self._shard)
        return UnitMemory(
            unsharded=unit.unsharded_bytes,
            reduce_input=unit.reduce_bytes,
            sharded_gradients=gradients,
            resting=unit.sharded_bytes + round(gradients * self._state_ratio()),
            last_gradient=last_gradient_of(unit),
            share=share_of(unit, self._shard),
        )

    def _state_ratio(self) -> float:
        """Bytes of optimizer state per byte of trained sharded parameters."""
        sharded = sum(sharded_gradient_bytes(unit, self._shard) for unit in self._units)
        states = self._category(MemoryCategory.OPTIMIZER_STATE, self._first)
        return states / sharded if sharded else 0.0

    def _rest(self, units: Sequence[UnitMemory]) -> int:
        """Memory at the first sample without the units' resting memory and communication."""
        return self.rest_beyond(sum(unit.resting for unit in units))

    # --- samples

    def _compute(self, row: int) -> int:
        """Allocated bytes without the memory of communication."""
        return int(self._samples.allocated[row]) - self._communication(row)

    def _communication(self, row: int) -> int:
        buffers = sum(self._category(category, row) for category in OF_COMMUNICATION)
        return buffers + self._copies[row]

    def _copies_of_backend(self) -> list[int]:
        """By sample, the copies of a reduce-scatter's input that gloo makes and frees on a thread.

        The recorder shows them as inputs of the step, which do not grow in a backward.
        """
        samples = self._samples
        copies = [0] * len(samples.point)
        first: dict[int, int] = {}
        for row in np.flatnonzero(samples.phase == Phase.BACKWARD).tolist():
            inputs = self._category(MemoryCategory.INPUT, row)
            own = first.setdefault(int(samples.microbatch[row]), inputs)
            copies[row] = max(inputs - own, 0)
        return copies

    def _change(self, stretch: _Stretch) -> int:
        """Bytes that the pieces of a stretch leave, without communication and shares."""
        return self._compute(stretch.end) - self._compute(stretch.begin) - stretch.share

    def _grown(self, category: MemoryCategory, stretch: _Stretch) -> int:
        return self._category(category, stretch.end) - self._category(category, stretch.begin)

    def _category(self, category: MemoryCategory, row: int) -> int:
        return max(int(getattr(self._samples, category.label)[row]), 0)


def _stretch(
    pieces: Sequence[int], begin: int | None, end: int | None, share: int
) -> Iterator[_Stretch]:
    """A stretch if there are pieces and both boundaries have samples."""
    if pieces and begin is not None and end is not None and begin < end:
        yield _Stretch(tuple(pieces), begin, end, share)


def _used(piece: PieceMemory) -> frozenset[str]:
    courses = [course for course in (piece.forward, piece.backward) if course is not None]
    return frozenset(use.parameter for course in courses for use in course.uses)


def _longest(stretch: _Stretch, pieces: Sequence[Piece]) -> int:
    return max(stretch.pieces, key=lambda at: pieces[at].forward_ns + pieces[at].backward_ns)


def _point(one: Pass, op: Op) -> MemoryPoint:
    """The kind of sample at a boundary of a unit."""
    if one.is_forward:
        return MemoryPoint.FORWARD_START if op is Op.ENTER else MemoryPoint.FORWARD_END
    return MemoryPoint.BACKWARD_START if op is Op.ENTER else MemoryPoint.BACKWARD_END


def _boundaries_of(one: Pass) -> list[tuple[Op, int]]:
    return [(op, index) for op, index in one.tape if op is not Op.RUN]


def _leaves(passes: Sequence[Pass]) -> set[int]:
    """Units without inner units."""
    leaves, enclosing = set(), set()
    for one in passes:
        inside: list[int] = []
        for op, unit in one.tape:
            if op is Op.ENTER:
                if one.is_forward:
                    enclosing.update(inside)
                inside.append(unit)
                leaves.add(unit)
            elif op is Op.LEAVE and unit in inside:
                inside.remove(unit)
    return leaves - enclosing


def _gradient_bytes(unit: Unit) -> int:
    """Unsharded gradients of a unit, in the dtype of its compute."""
    trained = unit.num_trainable_parameters / max(unit.num_parameters, 1)
    return round(unit.unsharded_bytes * trained)
