"""What memory did the recorded step's units and pieces hold? From the samples of a memory step.

Only a memory step tells categories, so the work's memory comes from one of those (the first with
samples of every unit's forward and backward); its times count for nothing. A unit that encloses
others is known by its gradients alone.
"""

from collections.abc import Sequence

import numpy as np

from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.parameters import last_gradient_of, share_of
from fsdp_inspect.simulation.workload import Op, Piece, Tape
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable


def measure_memory_work(
    samples: MemoryTable, units: Sequence[Unit], pieces: Sequence[Piece], tape: Tape, shard: int
) -> tuple[MemoryWork, int] | None:
    """The memory of a workload, and the highest moment of the step that it comes from.

    Args:
        samples: Of one rank.
        units: By index in the workload.
        pieces: Of the workload; `unit` is that index.
        tape: Of the workload.
        shard: Ranks that shard.

    Returns:
        None if no memory step has samples of every unit.
    """
    by_category = samples.sharded_parameter != MISSING_INT
    for step in np.unique(samples.step[by_category]).tolist():
        of_step = samples.where((samples.step == step) & (samples.microbatch == 0))
        reader = _Reader(of_step, units, tape, shard)
        if reader.is_whole:
            peaks = samples.where(samples.step == step)
            return reader.work(pieces), int(max(peaks.peak_allocated.max(), peaks.allocated.max()))
    return None


_OF_COMMUNICATION = (
    "unsharded_parameter",
    "all_gather_buffer",
    "reduce_scatter_buffer",
    "sharded_gradient",
)
"""What the ledger counts by FSDP2's rules."""


class _Reader:
    """Reads one memory step."""

    def __init__(self, samples: MemoryTable, units: Sequence[Unit], tape: Tape, shard: int) -> None:
        self._samples = samples
        self._units = units
        self._shard = shard
        self._leaves = _leaves(tape)
        self._rows = {
            (int(point), int(unit)): row
            for row, (point, unit) in enumerate(zip(samples.point, samples.unit, strict=True))
            if samples.phase[row] in (Phase.FORWARD, Phase.BACKWARD)
        }

    @property
    def is_whole(self) -> bool:
        """Whether every unit without others inside has its four samples."""
        points = (
            MemoryPoint.FORWARD_START,
            MemoryPoint.FORWARD_END,
            MemoryPoint.BACKWARD_START,
            MemoryPoint.BACKWARD_END,
        )
        return bool(self._leaves) and all(
            (int(point), self._units[unit].index) in self._rows
            for point in points
            for unit in self._leaves
        )

    def work(self, pieces: Sequence[Piece]) -> MemoryWork:
        """The memory of all pieces and units."""
        of_units = [self._unit(unit) for unit in self._units]
        return MemoryWork(pieces=self._pieces(pieces), units=of_units, rest=self._rest(of_units))

    def _pieces(self, pieces: Sequence[Piece]) -> list[PieceMemory]:
        """A leaf's memory goes to its longest piece; an enclosing unit's gradients to its last."""
        memory = [PieceMemory()] * len(pieces)
        for unit in range(len(self._units)):
            own = [at for at, piece in enumerate(pieces) if piece.unit == unit]
            if not own:
                continue
            if unit in self._leaves:
                longest = max(own, key=lambda at: pieces[at].forward_ns + pieces[at].backward_ns)
                memory[longest] = self._leaf(self._units[unit])
            else:
                memory[own[0]] = PieceMemory(gradients=_gradient_bytes(self._units[unit]))
        return memory

    def _leaf(self, unit: Unit) -> PieceMemory:
        start, end = (
            self._row(point, unit) for point in (MemoryPoint.FORWARD_START, MemoryPoint.FORWARD_END)
        )
        begin, done = (
            self._row(point, unit)
            for point in (MemoryPoint.BACKWARD_START, MemoryPoint.BACKWARD_END)
        )
        gradients = self._category("unsharded_gradient", done)
        gradients -= self._category("unsharded_gradient", begin)
        return PieceMemory(
            kept=self._compute(end) - self._compute(start),
            forward_rise=self._rise(start, end),
            backward_rise=self._rise(begin, done),
            gradients=gradients,
            output=self._category("temporary", begin),
        )

    def _rise(self, start: int, end: int) -> int:
        """The highest moment between two samples above the first, without communication.

        Prefetched all-gathers are issued right behind the first sample: the compute that follows
        rises from there.
        """
        high = max(int(self._samples.peak_allocated[end]), int(self._samples.allocated[end]))
        return max(high - self._communication(end) - self._compute(start), 0)

    def _compute(self, row: int) -> int:
        """Allocated, less what communication holds."""
        return int(self._samples.allocated[row]) - self._communication(row)

    def _communication(self, row: int) -> int:
        return sum(self._category(name, row) for name in _OF_COMMUNICATION)

    def _unit(self, unit: Unit) -> UnitMemory:
        trained = unit.num_trainable_parameters / max(unit.num_parameters, 1)
        return UnitMemory(
            unsharded=unit.unsharded_bytes,
            reduce_input=unit.reduce_bytes,
            sharded_gradients=round(unit.sharded_bytes * trained),
            resting=unit.sharded_bytes + round(unit.sharded_bytes * trained * self._state_ratio()),
            last_gradient=last_gradient_of(unit),
            share=share_of(unit, self._shard),
        )

    def _state_ratio(self) -> float:
        """Optimizer state for each byte of trained sharded parameters."""
        sharded = sum(
            unit.sharded_bytes * unit.num_trainable_parameters / max(unit.num_parameters, 1)
            for unit in self._units
        )
        return self._category("optimizer_state", 0) / sharded if sharded else 0.0

    def _rest(self, units: Sequence[UnitMemory]) -> int:
        """At the first sample, what is neither at rest in a unit nor communication."""
        return self._compute(0) - sum(unit.resting for unit in units)

    def _category(self, name: str, row: int) -> int:
        return max(int(getattr(self._samples, name)[row]), 0)

    def _row(self, point: MemoryPoint, unit: Unit) -> int:
        return self._rows[int(point), unit.index]


def _leaves(tape: Tape) -> set[int]:
    """Units with no other unit inside."""
    inside: list[int] = []
    leaves, enclosing = set(), set()
    for op, unit in tape:
        if op is Op.ENTER:
            enclosing.update(inside)
            inside.append(unit)
            leaves.add(unit)
        elif op is Op.LEAVE:
            inside.remove(unit)
    return leaves - enclosing


def _gradient_bytes(unit: Unit) -> int:
    """Unsharded gradients of a unit, in the dtype of its compute."""
    trained = unit.num_trainable_parameters / max(unit.num_parameters, 1)
    return round(unit.unsharded_bytes * trained)
