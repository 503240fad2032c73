"""Bound the time and the memory of a candidate from below, without a simulation.

All sums grow linearly with the number of blocks. So two short models give the sums of a long one.
"""

from dataclasses import dataclass, replace

from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.workload import Speed, build_workload


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a candidate."""

    ns_per_token: float
    """All compute, or all messages of the shard group, and the optimizer."""
    allocated_bytes: float
    """States, all kept activations, and the largest unit."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over a microbatch; all but `largest` are linear in the number of blocks."""

    compute_ns: float
    messages_ns: float
    optimizer_ns: float
    bytes: float
    largest: float

    def extend(self, other: "_Sums", times: float) -> "_Sums":
        """The sums with the difference to another model added a number of times."""

        def grow(own: float, more: float) -> float:
            return own + times * (more - own)

        return _Sums(
            compute_ns=grow(self.compute_ns, other.compute_ns),
            messages_ns=grow(self.messages_ns, other.messages_ns),
            optimizer_ns=grow(self.optimizer_ns, other.optimizer_ns),
            bytes=grow(self.bytes, other.bytes),
            largest=self.largest,
        )


def bound(job: Job, candidate: Candidate, speed: Speed) -> Bounds:
    """The lower bounds of a candidate."""
    size, layers = candidate.blocks_per_unit, job.model.num_layers
    if layers <= 2 * size:
        sums = _sums(job, candidate, speed, layers)
    else:
        short = _sums(job, candidate, speed, size)
        sums = short.extend(_sums(job, candidate, speed, 2 * size), times=(layers - size) // size)
    count = candidate.microbatches
    step_ns = count * max(sums.compute_ns, sums.messages_ns) + sums.optimizer_ns
    return Bounds(step_ns / job.tokens_of_step(candidate), sums.bytes + sums.largest)


def _sums(job: Job, candidate: Candidate, speed: Speed, num_layers: int) -> _Sums:
    short = replace(job, model=replace(job.model, num_layers=num_layers))
    work = build_workload(short, replace(candidate, microbatches=1), speed)
    assert work.memory is not None
    compute = sum(
        piece.forward_ns + piece.backward_ns + piece.recompute_ns for piece in work.pieces
    )
    copies = sum(unit.copy_out_ns + unit.reduce_copy_in_ns for unit in work.units)
    messages = sum(
        unit.gather_ns * (2 if policy.reshard_after_forward else 1) + unit.reduce_ns
        for unit, policy in zip(work.units, work.policies, strict=True)
    )
    kept = sum(piece.kept for piece in work.memory.pieces)
    return _Sums(
        compute + copies,
        messages,
        work.after_ns,
        work.memory.resting + kept,
        max(unit.unsharded for unit in work.memory.units),
    )
