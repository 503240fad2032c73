"""Fit the costs of copies and hooks in a run to the bytes and tensors of its units."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.simulation.workload import Op, UnitWork
from fsdp_inspect.trace.run import Unit


def copy_of_share(work: UnitWork, group: int, shard: int) -> int:
    """Duration of the copy of the share that a smaller group keeps on each rank, ns.

    Copy-in copies the shards of all ranks, and copy-out copies all parameters. The share is between
    the two.
    """
    weight = (1 / group - 1 / shard) / (1 - 1 / shard)
    return round(work.copy_in_ns + weight * max(work.copy_out_ns - work.copy_in_ns, 0))


class Rates:
    """Lines of the costs of copies and hooks over the bytes and tensors of the run's units."""

    def __init__(self, work: RecordedWork) -> None:
        works = work.workload.units
        gathered = [unit.unsharded_bytes for unit in work.units]
        reduced = [unit.reduce_bytes for unit in work.units]
        self._copy_in = _Line(gathered, [each.copy_in_ns for each in works], in_proportion=True)
        self._copy_out = _Line(gathered, [each.copy_out_ns for each in works], in_proportion=True)
        self._reduce_copy_in = _Line(
            reduced, [each.reduce_copy_in_ns for each in works], in_proportion=True
        )
        # The hooks of the first unit are before the forward, mixed with those of the loop.
        first = next(index for op, index in work.workload.passes[0].tape if op is Op.ENTER)
        others = [at for at in range(len(works)) if at != first] or [first]
        tensors = [unit.num_tensors or len(unit.parameters) for unit in work.units]
        self._gather = _Line(
            [tensors[at] for at in others], [works[at].gather_launch_ns for at in others]
        )
        self._backward = _Line(tensors, [each.gather_backward_launch_ns or 0 for each in works])
        self._reduce = _Line(tensors, [each.reduce_launch_ns for each in works])

    def copies(self, work: UnitWork, unit: Unit) -> UnitWork:
        """The work with the copies of a unit's messages."""
        return replace(
            work,
            copy_in_ns=self._copy_in.at(unit.unsharded_bytes),
            copy_out_ns=self._copy_out.at(unit.unsharded_bytes),
            reduce_copy_in_ns=self._reduce_copy_in.at(unit.reduce_bytes),
        )

    def hooks(self, num_tensors: int) -> UnitWork:
        """The hooks of a unit with that many tensors, without other work."""
        return UnitWork(
            gather_ns=0,
            reduce_ns=0,
            gather_launch_ns=self._gather.at(num_tensors),
            gather_backward_launch_ns=self._backward.at(num_tensors),
            reduce_launch_ns=self._reduce.at(num_tensors),
        )


class _Line:
    """A constant and a slope, both at least 0, by least squares; units of size 0 do not count.

    Units of a single size cannot separate the two. Bytes then cost in proportion (the device is
    bound by them), and tensors cost nothing besides the hook itself.
    """

    def __init__(
        self, sizes: Sequence[int], durations: Sequence[int], *, in_proportion: bool = False
    ) -> None:
        pairs = [(size, ns) for size, ns in zip(sizes, durations, strict=True) if size]
        is_one_size = len({size for size, _ in pairs}) == 1
        columns = np.array([(1.0, size) for size, _ in pairs]).reshape(-1, 2)
        scale = columns.max(axis=0, initial=1.0)
        columns = columns / scale
        if is_one_size:
            columns[:, 0 if in_proportion else 1] = 0
        from scipy.optimize import nnls  # takes half a second to load

        found, _ = nnls(columns, np.array([float(ns) for _, ns in pairs]))
        self._constant, self._slope = found / scale

    def at(self, size: int) -> int:
        """The duration for a size, ns; 0 for size 0."""
        return round(float(self._constant + self._slope * size)) if size else 0
