"""Compare the bytes of a simulated plan with those that a run recorded."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_inspect.simulation.simulate import Simulation
from fsdp_inspect.trace.run import Unit


def expect_bytes_of(simulation: Simulation, units: Iterable[Unit]) -> None:
    """Check that the predicted units have the bytes of the recorded ones."""
    recorded = {unit.fqn: unit for unit in units}
    for unit in simulation.predicted.event_units:
        known = recorded[unit.fqn]
        assert (unit.unsharded_bytes, unit.sharded_bytes, unit.reduce_bytes) == (
            known.unsharded_bytes,
            known.sharded_bytes,
            known.reduce_bytes,
        )
