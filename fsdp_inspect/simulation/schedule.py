"""Simulate FSDP2's schedule of a step in virtual time.

The schedule follows the order of calls in torch's `FSDPParamGroup` (2.13): when work is issued, and
which work waits for which. Tests compare it with torch's own code on virtual streams, so a torch
version with another schedule is noticed. The rules:

- Forward of a unit: issue its all-gather unless it was prefetched. Both gather streams wait for the
  copy-out of the unit before the previous one (two outputs alive). Compute waits for the
  all-gather. Then follow copy-out, explicit prefetches, compute and reshard. A smaller group copies
  its share before reshard, and the unit's next all-gather waits for that copy.
- Backward of a unit: as in forward, with two differences. The gather streams wait for its own
  copy-out. The previous unit in forward order is prefetched unless others are named (a smaller
  group gathers on the unit's own communicator). After compute and reshard, compute waits until
  fewer than `max_reduce_buffers` reduce-scatters are in flight. Then follow copy-in, reduce-scatter
  and all-reduce.
- After the backward: units whose inputs need no gradient reduce now. Compute waits for every
  reduction.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from fsdp_inspect.simulation.machine import CollectiveQueue, Machine, VirtualStream
from fsdp_inspect.simulation.memory import MemoryLedger, MemoryWork
from fsdp_inspect.simulation.workload import Op, Pass, Workload
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.intervals import Intervals


@dataclass(frozen=True, slots=True)
class Span:
    """An operation on the machine's clock, ns.

    As in a recorded run, FORWARD and BACKWARD of a unit last from ready parameters to the unit's
    end and contain nested units. Without a unit they are a whole pass. COMPUTE is a piece.
    """

    kind: EventKind
    unit: int
    phase: Phase
    microbatch: int
    issue_ns: int
    start_ns: int
    end_ns: int
    need_ns: int = -1
    """The moment at which the compute stream began to wait for it; -1: never."""
    issued_by: int = NO_UNIT
    """The unit whose hook issued the collective."""
    keeps_graph: bool = True
    """False for a forward under `no_grad`."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step on virtual time."""

    start_ns: int
    end_ns: int
    spans: Sequence[Span]
    peak_bytes: int | None = None
    """The peak of memory; None: the memory is unknown."""
    peak_unit: int = NO_UNIT
    """The unit that ran or gathered at the peak."""
    peak_amounts: tuple[int, ...] = ()
    """Bytes at the peak by `memory.Held`; they add up to the peak."""

    @property
    def duration_ns(self) -> int:
        """The step time."""
        return self.end_ns - self.start_ns

    def ran(self, kinds: Set[EventKind]) -> Intervals:
        """The time during which operations of these kinds ran."""
        spans = [span for span in self.spans if span.kind in kinds]
        return Intervals.of([span.start_ns for span in spans], [span.end_ns for span in spans])


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A collective on the link."""

    issue_ns: int
    start_ns: int
    end_ns: int
    held_ns: int | None
    """The moment at which it began to block the main thread, for a blocking backend."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """An all-gather without a wait so far."""

    transfer: _Transfer
    issued_by: int
    phase: Phase
    is_async: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Reduction:
    """A reduction without a wait so far."""

    kind: EventKind
    unit: int
    transfer: _Transfer
    issued_by: int


@dataclass(slots=True)
class _UnitState:
    gather: _Gather | None = None
    is_unsharded: bool = False
    reduced_ns: int | None = None
    """The end of its last reduction, until a wait for it."""
    has_share: bool = False
    """True while a smaller group keeps its parameters."""
    kept_ns: int | None = None
    """The end of a smaller group's copy of its share, until an all-gather waits for it."""
    forwards: list[int] = field(default_factory=list)
    """Positions in forward order of the passes without a backward so far."""
    is_done: bool = False
    """True after its post-backward."""
    ready_ns: list[int] = field(default_factory=list)
    """The start of each open pass."""


@dataclass(slots=True)
class _Context:
    """The state that the units of one FSDP root share (torch's `FSDPCommContext`)."""

    previous_copy_out_ns: int | None = None
    forward_order: list[int] = field(default_factory=list)
    in_flight: list[_Reduction] = field(default_factory=list)


class Schedule:
    """Simulates steps of a workload on a machine, with the state that torch keeps between steps."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._work = workload
        self._last_microbatch = max((each.microbatch for each in workload.passes), default=0)
        unknown = MemoryWork.unknown(len(workload.pieces), len(workload.units))
        self._memory = MemoryLedger(workload.memory or unknown)
        self._pieces_of = [
            [at for at, piece in enumerate(workload.pieces) if piece.unit == unit]
            for unit in range(len(workload.units))
        ]
        self._machine = machine
        self._units = [_UnitState() for _ in workload.units]
        self._gather_link = CollectiveQueue()
        self._reduce_link = (
            CollectiveQueue() if workload.separate_reduce_group else self._gather_link
        )
        self._replica_link = CollectiveQueue()
        self._smaller_links = [CollectiveQueue() for _ in workload.units]
        roots: dict[int, _Context] = {}
        self._contexts = [roots.setdefault(each.root, _Context()) for each in workload.policies]
        self._outstanding: list[_Reduction] = []
        self._hook_unit = NO_UNIT
        self._phase = Phase.OUTSIDE
        self._microbatch = 0
        self._keeps_graph = True
        self._spans: list[Span] = []

    def play(self) -> PlayedStep:
        """Simulate one step; the next call simulates the next step."""
        machine, work = self._machine, self._work
        self._spans = []
        self._memory.begin()
        start_ns = machine.reached(machine.compute)
        must_hold_back = work.host_ahead_ns is not None
        for each in work.passes:
            self._microbatch, self._keeps_graph = each.microbatch, each.keeps_graph
            self._memory.between(each.before_memory)
            machine.run(machine.compute, each.before_ns)
            self._phase = each.phase
            if each.is_forward:
                if must_hold_back and work.host_ahead_ns is not None:
                    machine.hold_back(work.host_ahead_ns)
                    must_hold_back = False
                self._forward(each)
            else:
                self._backward(each)
        self._phase = Phase.OPTIMIZER
        machine.run(machine.compute, work.after_ns)
        end_ns, memory = machine.reached(machine.compute), self._memory
        if work.memory is None:
            return PlayedStep(start_ns, end_ns, self._spans)
        return PlayedStep(
            start_ns, end_ns, self._spans, memory.peak, memory.peak_unit, memory.peak_amounts
        )

    # --- forward

    def _forward(self, one: Pass) -> None:
        begin_ns = self._machine.reached(self._machine.compute)
        self._hold_gathers_until(begin_ns)
        for op, index in one.tape:
            if op is Op.ENTER:
                self._enter(index)
            elif op is Op.LEAVE:
                self._leave(index)
            else:
                piece = self._work.pieces[index]
                self._memory.forward(index, piece.unit)
                self._compute(piece.unit, piece.forward_ns, piece.forward_launch_ns)
        self._memory.free_held()
        for context in self._contexts:
            if context.previous_copy_out_ns is not None:
                self._hold_gathers_until(context.previous_copy_out_ns)
                context.previous_copy_out_ns = None
        self._note_pass(EventKind.FORWARD, NO_UNIT, begin_ns)

    def _enter(self, unit: int) -> None:
        self._hook_unit = unit
        self._unshard(unit)
        self._wait_for_unshard(unit)
        for target in self._work.policies[unit].forward_prefetch:
            self._unshard(target)
        self._hook_unit = NO_UNIT
        self._units[unit].ready_ns.append(self._machine.reached(self._machine.compute))

    def _leave(self, unit: int) -> None:
        state = self._units[unit]
        self._note_pass(EventKind.FORWARD, unit, state.ready_ns.pop())
        if self._work.policies[unit].reshard_after_forward:
            self._reshard_after_forward(unit)
        order = self._contexts[unit].forward_order
        state.forwards.append(len(order))
        order.append(unit)

    # --- backward

    def _backward(self, one: Pass) -> None:
        begin_ns = self._machine.reached(self._machine.compute)
        for state in self._units:
            state.is_done = False
        # Autograd delivers the gradient of a parameter after the last use of the parameter.
        last = {index: at for at, (op, index) in enumerate(one.tape) if op is Op.LEAVE}
        for at, (op, index) in enumerate(one.tape):
            if op is Op.ENTER:
                self._pre_backward(index)
            elif op is Op.LEAVE:
                is_last = at == last[index]
                if not (is_last and self._work.units[index].ends_with_backward):
                    self._post_backward(index, one, has_gradient=is_last)
            else:
                piece = self._work.pieces[index]
                duration = piece.recompute_ns + piece.backward_ns
                self._memory.backward(index, piece.unit)
                self._compute(piece.unit, duration, piece.backward_launch_ns)
        self._finish_backward(one)
        self._note_pass(EventKind.BACKWARD, NO_UNIT, begin_ns)

    def _pre_backward(self, unit: int) -> None:
        policy, state = self._work.policies[unit], self._units[unit]
        self._hook_unit = unit
        if policy.unshard_in_backward:
            self._unshard(unit)
        self._wait_for_unshard(unit)
        for target in self._backward_targets(unit):
            if self._work.policies[target].unshard_in_backward:
                self._unshard(target)
        self._hook_unit = NO_UNIT
        state.is_done = False
        state.ready_ns.append(self._machine.reached(self._machine.compute))

    def _backward_targets(self, unit: int) -> Sequence[int]:
        """The units to prefetch while this unit computes."""
        state, named = self._units[unit], self._work.policies[unit].backward_prefetch
        position = state.forwards.pop() if state.forwards else 0
        if named:
            return named
        order = self._contexts[unit].forward_order
        return order[position - 1 : position] if position > 0 else ()

    def _post_backward(self, unit: int, one: Pass, *, has_gradient: bool = True) -> None:
        work, state = self._work.units[unit], self._units[unit]
        state.is_done = True
        if state.ready_ns:
            self._note_pass(EventKind.BACKWARD, unit, state.ready_ns.pop())
        if self._reshards_after(unit, one):
            self._reshard(unit)
        if one.reduces is not None and not one.reduces:
            return  # a backward without gradient sync
        # Torch waits for earlier reductions even if this unit has no gradient to reduce.
        in_flight = self._contexts[unit].in_flight
        while len(in_flight) >= self._work.max_reduce_buffers:
            oldest = in_flight.pop(0)
            self._await(oldest)
            self._memory.reduced(oldest.unit)
        reduces = has_gradient and (one.reduces is None or unit in one.reduces)
        if not work.is_trainable or not reduces:
            return
        self._hook_unit = unit
        if state.reduced_ns is not None:
            self._machine.wait(self._machine.compute, state.reduced_ns)
            state.reduced_ns = None
        self._reduce(unit, one)
        self._hook_unit = NO_UNIT

    def _finish_backward(self, one: Pass) -> None:
        """Torch's callback after the backward: each unit waits for all earlier reductions.

        Units that are still unsharded have their post-backward here, also units that this backward
        did not reach.
        """
        reached = {self._work.policies[unit].root for op, unit in one.tape if op is Op.ENTER}
        units = [unit for unit in self._work.final_order
                 if one.reduces is None or self._work.policies[unit].root in reached]  # fmt: skip
        for unit in units:
            state = self._units[unit]
            if not state.is_done and (state.ready_ns or one.reduces is None):
                self._post_backward(unit, one)
            elif not state.is_done and self._reshards_after(unit, one):
                self._reshard(unit)
            if one.finishes:
                self._await_all(unit)
                state.reduced_ns = None
                state.forwards.clear()
                self._drop_unused_gather(unit)
        for context in [self._contexts[unit] for unit in units] if one.finishes else []:
            for reduction in context.in_flight:
                self._memory.reduced(reduction.unit)
            context.in_flight.clear()
            context.forward_order.clear()

    def _reshards_after(self, unit: int, one: Pass) -> bool:
        """Whether a unit is resharded after a backward.

        A loop that keeps parameters between microbatches reshards them after the last one, because
        the optimizer changes the weights and the kept copies would be stale.
        """
        is_last = one.microbatch == self._last_microbatch
        return is_last or self._work.policies[unit].reshard_after_backward

    def _await_all(self, unit: int) -> None:
        """Let compute wait for all reductions of a unit's root."""
        context = self._contexts[unit]
        own = (each for each in self._outstanding if self._contexts[each.unit] is context)
        for reduction in sorted(own, key=lambda each: each.transfer.end_ns):
            self._await(reduction)

    # --- communication

    def _unshard(self, unit: int) -> None:
        state, work = self._units[unit], self._work.units[unit]
        if state.gather is not None or state.is_unsharded:
            return
        machine, is_async = self._machine, self._work.policies[unit].is_async
        if state.kept_ns is not None:
            self._hold_gathers_until(state.kept_ns)
            state.kept_ns = None
        self._memory.gather(unit)
        machine.launch(self._of_gather(unit, work.gather_launch_ns, work.gather_backward_launch_ns))
        copy_in, gather = self._gather_streams(is_async)
        issue_ns = machine.host_ns
        copy_ns = self._of_gather(unit, work.copy_in_ns, work.copy_in_backward_ns)
        copied = machine.run(copy_in, copy_ns)
        self._note(EventKind.ALL_GATHER_COPY_IN, unit, issue_ns, copied)
        if gather is not copy_in:
            machine.wait(gather, copied[1])
        duration_ns = self._of_gather(unit, work.gather_ns, work.gather_backward_ns)
        transfer = self._transfer(gather, self._link_of(unit), duration_ns, is_async=is_async)
        state.gather = _Gather(transfer, self._hook_unit, self._phase, is_async)

    def _transfer(
        self,
        stream: VirtualStream,
        link: CollectiveQueue,
        duration_ns: int,
        *,
        is_async: bool = False,
        not_before_ns: int = 0,
    ) -> _Transfer:
        machine = self._machine
        issue_ns = machine.host_ns
        start, end = machine.transfer(
            stream, link, duration_ns, is_async=is_async, not_before_ns=not_before_ns
        )
        holds = stream is machine.compute and stream.free_ns >= end
        return _Transfer(issue_ns, start, end, issue_ns if holds else None)

    def _gather_streams(self, is_async: bool) -> tuple[VirtualStream, VirtualStream]:
        machine = self._machine
        if is_async:
            return machine.compute, machine.compute
        return machine.copy_in, machine.gather

    def _link_of(self, unit: int) -> CollectiveQueue:
        """The communicator of the unit's all-gather."""
        return self._smaller_links[unit] if self._units[unit].has_share else self._gather_link

    def _of_gather(self, unit: int, forward_ns: int, backward_ns: int | None) -> int:
        """The cost of an all-gather issued now.

        The costs of a smaller group apply if the group has the parameters, else the costs of the
        phase. None: backward equals forward.
        """
        is_smaller = self._work.policies[unit].smaller_group is not None
        in_backward = self._units[unit].has_share if is_smaller else self._phase is Phase.BACKWARD
        return backward_ns if in_backward and backward_ns is not None else forward_ns

    def _reshard_after_forward(self, unit: int) -> None:
        state, machine = self._units[unit], self._machine
        if self._work.policies[unit].smaller_group is None or not state.is_unsharded:
            self._reshard(unit)
            return
        self._memory.keep_share(unit)
        machine.run(machine.compute, self._work.units[unit].reshard_ns)
        state.kept_ns = machine.reached(machine.compute)
        state.is_unsharded, state.has_share = False, True

    def _reshard(self, unit: int) -> None:
        state = self._units[unit]
        if state.is_unsharded:
            self._memory.free_unsharded(unit)
            state.is_unsharded = False
        self._drop_share(unit)

    def _drop_share(self, unit: int) -> None:
        self._units[unit].has_share = False
        self._memory.free_share(unit)

    def _wait_for_unshard(self, unit: int) -> None:
        state, machine = self._units[unit], self._machine
        gather = state.gather
        if gather is None:
            return
        in_forward = self._phase is Phase.FORWARD
        context = self._contexts[unit]
        if in_forward and context.previous_copy_out_ns is not None:
            self._hold_gathers_until(context.previous_copy_out_ns)
            context.previous_copy_out_ns = None
        self._note_gather(unit, gather, self._wait_for(gather.transfer))
        self._memory.copy_out(unit, keeps_output=in_forward and not gather.is_async)
        self._drop_share(unit)
        copied = machine.run(machine.compute, self._work.units[unit].copy_out_ns)
        self._note(EventKind.ALL_GATHER_COPY_OUT, unit, machine.host_ns, copied)
        if in_forward and not gather.is_async:
            context.previous_copy_out_ns = machine.reached(machine.compute)
        else:
            self._hold_gathers_until(machine.reached(machine.compute))
        state.gather, state.is_unsharded = None, True

    def _hold_gathers_until(self, event_ns: int) -> None:
        machine = self._machine
        machine.wait(machine.copy_in, event_ns)
        machine.wait(machine.gather, event_ns)

    def _reduce(self, unit: int, one: Pass) -> None:
        work, machine = self._work.units[unit], self._machine
        self._memory.reduce(unit, self._pieces_of[unit])
        machine.launch(work.reduce_launch_ns)
        issue_ns = machine.host_ns
        copied = machine.run(machine.compute, work.reduce_copy_in_ns)
        self._note(EventKind.REDUCE_SCATTER_COPY_IN, unit, issue_ns, copied)
        if machine.reduce is not machine.compute:
            machine.wait(machine.reduce, copied[1])
        scatter = self._transfer(machine.reduce, self._reduce_link, work.reduce_ns)
        self._contexts[unit].in_flight.append(
            self._reduction(EventKind.REDUCE_SCATTER, unit, scatter)
        )
        end_ns = scatter.end_ns
        if work.all_reduce_ns and one.all_reduces:
            reduced = self._transfer(
                machine.all_reduce, self._replica_link, work.all_reduce_ns, not_before_ns=end_ns
            )
            self._reduction(EventKind.ALL_REDUCE, unit, reduced)
            end_ns = reduced.end_ns
        self._units[unit].reduced_ns = end_ns

    def _reduction(self, kind: EventKind, unit: int, transfer: _Transfer) -> _Reduction:
        reduction = _Reduction(kind, unit, transfer, self._hook_unit)
        self._outstanding.append(reduction)
        return reduction

    def _await(self, reduction: _Reduction) -> None:
        """Let compute wait for a reduction, and complete its span."""
        if reduction not in self._outstanding:
            return
        self._outstanding.remove(reduction)
        self._note_transfer(
            reduction.kind,
            reduction.unit,
            Phase.BACKWARD,
            reduction.transfer,
            self._wait_for(reduction.transfer),
            reduction.issued_by,
        )

    def _wait_for(self, transfer: _Transfer) -> int:
        """Let compute wait for a collective; returns the start of the wait."""
        machine = self._machine
        need_ns = machine.reached(machine.compute)
        machine.wait(machine.compute, transfer.end_ns)
        return need_ns if transfer.held_ns is None else transfer.held_ns

    # --- spans

    def _drop_unused_gather(self, unit: int) -> None:
        """Wait for a gather that no backward used and drop it, as torch does."""
        gather = self._units[unit].gather
        if gather is not None:
            self._machine.wait(self._machine.compute, gather.transfer.end_ns)
            held_ns = gather.transfer.held_ns
            self._note_gather(unit, gather, -1 if held_ns is None else held_ns)
            self._memory.drop_output(unit)
            self._units[unit].gather = None

    def _compute(self, unit: int, duration_ns: int, launch_ns: int) -> None:
        machine = self._machine
        issue_ns = machine.host_ns
        ran = machine.run(machine.compute, duration_ns, launch_ns)
        self._note(EventKind.COMPUTE, unit, issue_ns, ran)

    def _note_pass(self, kind: EventKind, unit: int, begin_ns: int) -> None:
        machine = self._machine
        end_ns = machine.reached(machine.compute)
        self._spans.append(
            Span(
                kind,
                unit,
                self._phase,
                self._microbatch,
                begin_ns,
                begin_ns,
                end_ns,
                keeps_graph=self._keeps_graph,
            )
        )

    def _note(self, kind: EventKind, unit: int, issue_ns: int, ran: tuple[int, int]) -> None:
        if ran[1] > ran[0]:
            self._spans.append(Span(kind, unit, self._phase, self._microbatch, issue_ns, *ran))

    def _note_gather(self, unit: int, gather: _Gather, need_ns: int) -> None:
        self._note_transfer(
            EventKind.ALL_GATHER, unit, gather.phase, gather.transfer, need_ns, gather.issued_by
        )

    def _note_transfer(
        self,
        kind: EventKind,
        unit: int,
        phase: Phase,
        transfer: _Transfer,
        need_ns: int,
        issued_by: int,
    ) -> None:
        self._spans.append(
            Span(
                kind,
                unit,
                phase,
                self._microbatch,
                transfer.issue_ns,
                transfer.start_ns,
                transfer.end_ns,
                need_ns,
                issued_by,
            )
        )
