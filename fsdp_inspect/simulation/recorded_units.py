"""Look up the units and parameters of a run for `scenario`, which derives the work of many plans.

Everything here depends on the run only. `parameters_of` names the parameters of a unit. A parameter
that several units name belongs to the last one.
"""

import math
from collections import defaultdict
from collections.abc import Collection
from functools import cached_property

from fsdp_inspect.simulation.parameters import itemsize, parameters_of
from fsdp_inspect.simulation.rates import Rates
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import Unit


class RecordedUnits:
    """The units of a recorded work, by parameter."""

    def __init__(self, work: RecordedWork, ran: Plan, shard: int) -> None:
        """Index the units.

        Args:
            work: The recorded work of the run.
            ran: The plan that ran.
            shard: The number of ranks that sharded the units without a separate mesh.
        """
        self._work = work
        self._shard = shard
        self.planned = {unit.name: unit for unit in ran.units}
        """The units of the plan that ran, by name."""
        self.shapes: dict[str, list[int]] = {}
        """The shape of each parameter."""
        self.lumps: dict[str, Unit] = {}
        """The units without recorded parameters, by the single entry of each."""
        self._owners: dict[str, list[int]] = defaultdict(list)
        self._by_parameters: dict[frozenset[str], Unit] = {}
        self._positions: dict[int, int] = {}
        for position, unit in enumerate(work.units):
            parameters = parameters_of(unit)
            self.shapes |= parameters
            for name in parameters:
                self._owners[name].append(position)
            if not unit.parameters:
                self.lumps |= dict.fromkeys(parameters, unit)
            self._by_parameters.setdefault(frozenset(parameters), unit)
            self._positions.setdefault(unit.index, position)
        self.numels = {name: math.prod(shape) for name, shape in self.shapes.items()}
        """The number of elements of each parameter."""
        self.pieces_of: dict[int, list[int]] = defaultdict(list)
        """The pieces of each unit, by position."""
        for at, piece in enumerate(work.workload.pieces):
            self.pieces_of[piece.unit].append(at)
        self.sharded_bytes = sum(unit.sharded_bytes for unit in work.units) or 1

    @cached_property
    def rates(self) -> Rates:
        """Fitted only if a unit or its messages changed."""
        return Rates(self._work)

    def position(self, unit: Unit) -> int:
        """The index of a unit in the workload."""
        return self._positions[unit.index]

    def with_parameters(self, parameters: Collection[str]) -> Unit | None:
        """The unit with exactly these parameters."""
        return self._by_parameters.get(frozenset(parameters))

    def owners(self, parameters: Collection[str]) -> list[int]:
        """The units that own some of these parameters, by position, in order."""
        return sorted({each for name in parameters for each in self._owners[name]})

    def trained_ratio(self, parameters: Collection[str]) -> float:
        """The fraction of trained parameters, derived from the units that own them."""
        total = trained = 0.0
        for position in self.owners(parameters):
            unit = self._work.units[position]
            own = sum(self.numels[name] for name in parameters_of(unit) if name in parameters)
            total += own
            trained += own * unit.num_trainable_parameters / max(unit.num_parameters, 1)
        return trained / total if total else 1.0

    def elements(self, parameters: Collection[str]) -> tuple[int, int]:
        """The padded elements of the units that own parameters, and their bytes on all ranks."""
        total = own = 0
        for position in dict.fromkeys(self._owners[name][-1] for name in parameters):
            unit = self._work.units[position]
            total += unit.unsharded_bytes // itemsize(unit.param_dtype)
            own += unit.sharded_bytes * self._shard_of(unit)
        return total, own

    def _shard_of(self, unit: Unit) -> int:
        recorded = self.planned.get(unit.fqn)
        return recorded.num_shards(self._shard) if recorded else self._shard
