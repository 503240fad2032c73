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

FSDP1 (`FullyShardedDataParallel`) differs in these rules (torch 2.13, `_runtime_utils`):

- An all-gather writes the parameters themselves: no copy-out, and no gather stream waits for one.
  Compute waits for all all-gathers so far. With `limit_all_gathers`, the host waits before an
  all-gather for the moment at which the unit before the previous one was freed.
- Forward prefetches the next unit of the first forward. Backward prefetches the previous unit
  before or after the gradients of a unit, or not at all.
- Copy-in and reduce-scatter run on one stream. Compute waits for reductions after the backward
  only.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fsdp_inspect.simulation.machine import CollectiveQueue, Machine, VirtualStream
from fsdp_inspect.simulation.memory import MemoryLedger, NoLedger
from fsdp_inspect.simulation.workload import Op, Pass, UnitPolicy, UnitWork, Workload
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.plan import BackwardPrefetch

_MOST_GATHERS = 2
"""The frees that FSDP1's limiter leaves pending before the host waits for the oldest one."""


class Span(NamedTuple):
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
class SimulatedStep:
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


@dataclass(slots=True, eq=False)
class _Transfer:
    """A collective on the link without a wait so far."""

    kind: EventKind
    unit: int
    phase: Phase
    issue_ns: int
    start_ns: int
    end_ns: int
    held_ns: int | None
    """The moment at which it began to block the main thread, for a blocking backend."""
    issued_by: int
    is_async: bool = False


@dataclass(slots=True)
class _Context:
    """The state that the units of one FSDP root share (torch's `FSDPCommContext`)."""

    previous_copy_out_ns: int | None = None
    forward_order: list[int] = field(default_factory=list)
    in_flight: list[_Transfer] = field(default_factory=list)
    freed_ns: deque[int] = field(default_factory=deque)
    """FSDP1: the moments at which parameters were freed, of which no all-gather waited for."""


class _UnitState:
    """A unit with its costs and policy, and with the state that torch keeps of it."""

    __slots__ = (
        "backward_costs",
        "context",
        "costs",
        "forwards",
        "gather",
        "has_share",
        "is_done",
        "is_prefetched",
        "is_unsharded",
        "kept_ns",
        "needs_backward",
        "policy",
        "position",
        "ready_ns",
        "reduced_ns",
        "smaller_link",
        "streams",
        "work",
    )

    def __init__(
        self, work: UnitWork, policy: UnitPolicy, context: _Context, machine: Machine
    ) -> None:
        self.work = work
        self.policy = policy
        self.context = context
        self.streams = (
            (machine.compute, machine.compute)
            if policy.is_async
            else (machine.copy_in, machine.gather)
        )
        """The streams of its all-gather's copy-in and of the all-gather."""
        self.costs = (work.gather_launch_ns, work.copy_in_ns, work.gather_ns)
        """Launch, copy-in and duration of an all-gather."""
        launch, copy_in, gather = self.costs
        self.backward_costs = (
            _or_else(work.gather_backward_launch_ns, launch),
            _or_else(work.copy_in_backward_ns, copy_in),
            _or_else(work.gather_backward_ns, gather),
        )
        """The costs in backward, or of a smaller group that has the parameters."""
        self.smaller_link = CollectiveQueue()
        """The communicator of its smaller group."""
        self.gather: _Transfer | None = None
        """The all-gather without a wait so far."""
        self.is_unsharded = False
        self.reduced_ns: int | None = None
        """The end of its last reduction, until a wait for it."""
        self.has_share = False
        """True while a smaller group keeps its parameters."""
        self.kept_ns: int | None = None
        """The end of a smaller group's copy of its share, until an all-gather waits for it."""
        self.forwards: list[int] = []
        """Positions in forward order of the passes without a backward so far."""
        self.is_done = False
        """True after its post-backward."""
        self.ready_ns: list[int] = []
        """The start of each open pass."""
        self.is_prefetched = False
        """FSDP1: another unit's hook asked for its parameters, and it was not resharded since."""
        self.needs_backward = False
        """FSDP1: a forward with a graph ran, and no pre-backward since."""
        self.position: int | None = None
        """FSDP1: its first position in the order of forwards."""


def _next_in_forward(workload: Workload) -> dict[int, int]:
    """FSDP1: the unit that each unit prefetches in forward, by the order of the first forward."""
    found: dict[int, int] = {}
    if any(policy.forward_prefetch for policy in workload.policies):
        for root in {policy.root for policy in workload.policies}:
            first = next(workload.forwards).tape
            own = [unit for op, unit in first if op is Op.ENTER]
            own = [unit for unit in own if workload.policies[unit].root == root]
            found |= dict(pairwise(dict.fromkeys(own)))
    return found


def _or_else(value: int | None, other: int) -> int:
    return other if value is None else value


class Schedule:
    """Simulates steps of a workload on a machine, with the state that torch keeps between steps."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._work = workload
        self._last_microbatch = max((each.microbatch for each in workload.passes), default=0)
        self._memory = NoLedger() if workload.memory is None else MemoryLedger(workload.memory)
        self._machine = machine
        self._gather_link = CollectiveQueue()
        self._reduce_link = (
            CollectiveQueue() if workload.separate_reduce_group else self._gather_link
        )
        self._replica_link = CollectiveQueue()
        self._fsdp1 = workload.fsdp1
        self._next_in_forward = _next_in_forward(workload) if workload.fsdp1 else {}
        self._entered: set[int] = set()
        """FSDP1: the units of the current forward so far."""
        roots: dict[int, _Context] = {}
        self._units = [
            _UnitState(work, policy, roots.setdefault(policy.root, _Context()), machine)
            for work, policy in zip(workload.units, workload.policies, strict=True)
        ]
        self._contexts = list(roots.values())
        self._outstanding: dict[_Transfer, None] = {}
        """Reductions without a wait so far, in the order of issue."""
        self._hook_unit = NO_UNIT
        self._phase = Phase.OUTSIDE
        self._microbatch = 0
        self._keeps_graph = True
        self._spans: list[Span] | None = None

    def simulate(self, *, with_spans: bool = True) -> SimulatedStep:
        """Simulate one step; the next call simulates the next step.

        Args:
            with_spans: Collect the spans of the step; without them, the step has its time and its
                memory only.
        """
        machine, work, memory = self._machine, self._work, self._memory
        self._spans = [] if with_spans else None
        memory.begin()
        start_ns = machine.reached(machine.compute)
        must_hold_back = work.host_ahead_ns is not None
        for each in work.passes:
            self._microbatch, self._keeps_graph = each.microbatch, each.keeps_graph
            memory.between(each.before_memory)
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
        end_ns, spans = machine.reached(machine.compute), self._spans or ()
        if work.memory is None:
            return SimulatedStep(start_ns, end_ns, spans)
        return SimulatedStep(
            start_ns, end_ns, spans, memory.peak, memory.peak_unit, memory.peak_amounts
        )

    # --- forward

    def _forward(self, one: Pass) -> None:
        pieces, memory = self._work.pieces, self._memory
        enter, leave = Op.ENTER, Op.LEAVE
        begin_ns = self._machine.reached(self._machine.compute)
        self._hold_gathers_until(begin_ns)
        self._entered.clear()
        for op, index in one.tape:
            if op is enter:
                self._enter(index)
            elif op is leave:
                self._leave(index)
            else:
                piece = pieces[index]
                memory.forward(index, piece.unit)
                self._compute(piece.unit, piece.forward_ns, piece.forward_launch_ns)
        memory.free_held()
        for context in self._contexts:
            if context.previous_copy_out_ns is not None:
                self._hold_gathers_until(context.previous_copy_out_ns)
                context.previous_copy_out_ns = None
        self._note_pass(EventKind.FORWARD, NO_UNIT, begin_ns)

    def _enter(self, unit: int) -> None:
        state = self._units[unit]
        self._hook_unit = unit
        self._unshard(unit)
        self._await_parameters(unit, state)
        if self._fsdp1 is None:
            for target in state.policy.forward_prefetch:
                self._unshard(target)
        else:
            self._entered.add(unit)
            target = self._next_in_forward.get(unit, NO_UNIT)
            if target not in self._entered:
                self._prefetch(target)
        self._hook_unit = NO_UNIT
        state.ready_ns.append(self._machine.reached(self._machine.compute))

    def _leave(self, unit: int) -> None:
        state = self._units[unit]
        self._note_pass(EventKind.FORWARD, unit, state.ready_ns.pop())
        state.is_prefetched = False
        if state.policy.reshard_after_forward:
            self._reshard_after_forward(unit, state)
        order = state.context.forward_order
        state.forwards.append(len(order))
        if not state.position:  # torch, too, takes the place 0 for none
            state.position = len(order)
        state.needs_backward |= self._keeps_graph
        order.append(unit)

    # --- backward

    def _backward(self, one: Pass) -> None:
        pieces, memory, units = self._work.pieces, self._memory, self._units
        enter, leave = Op.ENTER, Op.LEAVE
        begin_ns = self._machine.reached(self._machine.compute)
        for state in units:
            state.is_done = False
        # Autograd delivers the gradient of a parameter after the last use of the parameter.
        last = {index: at for at, (op, index) in enumerate(one.tape) if op is leave}
        for at, (op, index) in enumerate(one.tape):
            if op is enter:
                self._pre_backward(index)
            elif op is leave:
                is_last = at == last[index]
                if not (is_last and units[index].work.ends_with_backward):
                    self._post_backward(index, one, has_gradient=is_last)
            else:
                piece = pieces[index]
                duration = piece.recompute_ns + piece.backward_ns
                memory.backward(index, piece.unit)
                self._compute(piece.unit, duration, piece.backward_launch_ns)
        self._finish_backward(one)
        self._note_pass(EventKind.BACKWARD, NO_UNIT, begin_ns)

    def _pre_backward(self, unit: int) -> None:
        state = self._units[unit]
        self._hook_unit = unit
        if state.policy.unshard_in_backward and (self._fsdp1 is None or state.needs_backward):
            self._unshard(unit)
        self._await_parameters(unit, state)
        state.needs_backward = False
        if self._fsdp1 is not None:
            self._prefetch_previous(state, "BACKWARD_PRE")
        else:
            for target in self._backward_targets(state):
                if self._units[target].policy.unshard_in_backward:
                    self._unshard(target)
        self._hook_unit = NO_UNIT
        state.is_done = False
        state.ready_ns.append(self._machine.reached(self._machine.compute))

    def _backward_targets(self, state: _UnitState) -> Sequence[int]:
        """The units to prefetch while this unit computes."""
        named = state.policy.backward_prefetch
        position = state.forwards.pop() if state.forwards else 0
        if named:
            return named
        order = state.context.forward_order
        return order[position - 1 : position] if position > 0 else ()

    def _post_backward(self, unit: int, one: Pass, *, has_gradient: bool = True) -> None:
        state = self._units[unit]
        state.is_done = True
        if state.ready_ns:
            self._note_pass(EventKind.BACKWARD, unit, state.ready_ns.pop())
        self._hook_unit = unit
        self._memory.flatten(unit)
        state.is_prefetched = False
        if self._reshards_after(state, one):
            self._reshard(unit, state)
        self._prefetch_previous(state, "BACKWARD_POST")
        self._hook_unit = NO_UNIT
        if one.reduces is not None and not one.reduces:
            return  # a backward without gradient sync
        # Torch waits for earlier reductions even if this unit has no gradient to reduce.
        in_flight = state.context.in_flight
        while len(in_flight) >= self._work.max_reduce_buffers:
            oldest = in_flight.pop(0)
            self._await(oldest)
            self._memory.reduced(oldest.unit)
        reduces = has_gradient and (one.reduces is None or unit in one.reduces)
        if not state.work.is_trainable or not reduces:
            return
        self._hook_unit = unit
        if state.reduced_ns is not None and self._fsdp1 is None:
            self._machine.wait(self._machine.compute, state.reduced_ns)
            state.reduced_ns = None
        self._reduce(unit, state, one)
        self._hook_unit = NO_UNIT

    def _finish_backward(self, one: Pass) -> None:
        """Torch's callback after the backward: each unit waits for all earlier reductions.

        Units that are still unsharded have their post-backward here, also units that this backward
        did not reach.
        """
        units, enter = self._units, Op.ENTER
        order = self._work.final_order
        if one.reduces is not None:
            reached = {units[unit].policy.root for op, unit in one.tape if op is enter}
            order = [unit for unit in order if units[unit].policy.root in reached]
        for unit in order:
            state = units[unit]
            self._finish_unit(unit, state, one)
            if one.finishes:
                self._await_all(state.context)
                state.reduced_ns = None
                state.forwards.clear()
                self._drop_unused_gather(unit, state)
        if one.finishes:
            for context in (units[unit].context for unit in order):
                for reduction in context.in_flight:
                    self._memory.reduced(reduction.unit)
                context.in_flight.clear()
                context.forward_order.clear()

    def _finish_unit(self, unit: int, state: _UnitState, one: Pass) -> None:
        """End the backward of a unit, and reshard it if it is still unsharded."""
        if not state.is_done and (state.ready_ns or one.reduces is None):
            self._post_backward(unit, one)
        elif not state.is_done and self._fsdp1 is None and self._reshards_after(state, one):
            self._reshard(unit, state)
        if self._fsdp1 is None:
            return
        if state.gather is not None:  # it was prefetched in vain
            self._note_transfer(state.gather, -1)
            state.gather, state.is_unsharded = None, True
        if state.is_unsharded and self._reshards_after(state, one):
            self._reshard(unit, state)
        state.needs_backward, state.is_prefetched, state.position = False, False, None

    def _reshards_after(self, state: _UnitState, one: Pass) -> bool:
        """Whether a unit is resharded after a backward.

        A loop that keeps parameters between microbatches reshards them after the last one, because
        the optimizer changes the weights and the kept copies would be stale. FSDP1 reshards them
        whenever it reduces gradients.
        """
        if self._fsdp1 is not None:
            return one.reduces is None or bool(one.reduces) or state.policy.reshard_after_backward
        is_last = one.microbatch == self._last_microbatch
        return is_last or state.policy.reshard_after_backward

    def _await_all(self, context: _Context) -> None:
        """Let compute wait for all reductions of an FSDP root."""
        if self._outstanding:
            units = self._units
            own = (each for each in self._outstanding if units[each.unit].context is context)
            for reduction in sorted(own, key=lambda each: each.end_ns):
                self._await(reduction)

    # --- communication

    def _await_parameters(self, unit: int, state: _UnitState) -> None:
        if state.gather is not None:
            self._wait_for_unshard(unit, state, state.gather)
        if self._fsdp1 is not None:
            self._machine.wait(self._machine.compute, self._machine.gather.free_ns)

    def _prefetch(self, target: int) -> None:
        """FSDP1: unshard a unit that runs later, unless it was prefetched already."""
        if target != NO_UNIT:
            self._unshard(target)
            self._units[target].is_prefetched = True

    def _prefetch_previous(self, state: _UnitState, moment: BackwardPrefetch) -> None:
        """FSDP1: unshard the previous unit of forward, if backward does so at this moment."""
        if self._fsdp1 is None or self._fsdp1.backward_prefetch != moment or not state.position:
            return
        target = state.context.forward_order[state.position - 1]
        if self._units[target].needs_backward:
            self._prefetch(target)

    def _limit_gathers(self, context: _Context) -> None:
        """FSDP1: let the host wait until the unit before the previous one was freed."""
        is_limited = self._fsdp1 is not None and self._fsdp1.limit_all_gathers
        if is_limited and len(context.freed_ns) >= _MOST_GATHERS:
            self._machine.wait(self._machine.host, context.freed_ns.popleft())

    def _unshard(self, unit: int) -> None:
        state = self._units[unit]
        if state.is_prefetched:
            return
        if state.is_unsharded or state.gather is not None:
            self._limit_gathers(state.context)
            return
        machine, policy = self._machine, state.policy
        if state.kept_ns is not None:
            self._hold_gathers_until(state.kept_ns)
            state.kept_ns = None
        self._memory.gather(unit)
        # The costs of a smaller group apply if the group has the parameters.
        is_smaller = policy.smaller_group is not None
        in_backward = state.has_share if is_smaller else self._phase is Phase.BACKWARD
        launch_ns, copy_ns, duration_ns = state.backward_costs if in_backward else state.costs
        machine.launch(launch_ns)
        copy_in, gather = state.streams
        issue_ns = machine.host.free_ns
        copied = machine.run(copy_in, copy_ns)
        if self._spans is not None:
            self._note(EventKind.ALL_GATHER_COPY_IN, unit, issue_ns, copied)
        if gather is not copy_in:
            machine.wait(gather, copied[1])
        self._limit_gathers(state.context)
        link = state.smaller_link if state.has_share else self._gather_link
        issue_ns = machine.host.free_ns
        start_ns, end_ns = machine.transfer(gather, link, duration_ns, is_async=policy.is_async)
        state.gather = _Transfer(
            EventKind.ALL_GATHER,
            unit,
            self._phase,
            issue_ns,
            start_ns,
            end_ns,
            self._held_ns(gather, issue_ns, end_ns),
            self._hook_unit,
            policy.is_async,
        )

    def _held_ns(self, stream: VirtualStream, issue_ns: int, end_ns: int) -> int | None:
        """The moment at which a collective begins to block the main thread; None: it does not."""
        is_held = stream is self._machine.compute and stream.free_ns >= end_ns
        return issue_ns if is_held else None

    def _reshard_after_forward(self, unit: int, state: _UnitState) -> None:
        if state.policy.smaller_group is None or not state.is_unsharded:
            self._reshard(unit, state)
            return
        machine = self._machine
        self._memory.keep_share(unit)
        machine.run(machine.compute, state.work.reshard_ns)
        state.kept_ns = machine.reached(machine.compute)
        state.is_unsharded, state.has_share = False, True

    def _reshard(self, unit: int, state: _UnitState) -> None:
        if state.is_unsharded:
            self._memory.free_unsharded(unit)
            state.is_unsharded = False
        if self._fsdp1 is not None:
            state.context.freed_ns.append(self._machine.reached(self._machine.compute))
        self._drop_share(unit, state)

    def _drop_share(self, unit: int, state: _UnitState) -> None:
        if state.has_share:
            state.has_share = False
            self._memory.free_share(unit)

    def _wait_for_unshard(self, unit: int, state: _UnitState, gather: _Transfer) -> None:
        machine, context = self._machine, state.context
        if self._fsdp1 is not None:
            self._wait_for(gather)
            state.gather, state.is_unsharded = None, True
            return
        in_forward = self._phase is Phase.FORWARD
        keeps_output = in_forward and not gather.is_async
        if in_forward and context.previous_copy_out_ns is not None:
            self._hold_gathers_until(context.previous_copy_out_ns)
            context.previous_copy_out_ns = None
        self._wait_for(gather)
        self._memory.copy_out(unit, keeps_output=keeps_output)
        self._drop_share(unit, state)
        copied = machine.run(machine.compute, state.work.copy_out_ns)
        if self._spans is not None:
            self._note(EventKind.ALL_GATHER_COPY_OUT, unit, machine.host.free_ns, copied)
        copied_ns = machine.reached(machine.compute)
        if keeps_output:
            context.previous_copy_out_ns = copied_ns
        else:
            self._hold_gathers_until(copied_ns)
        state.gather, state.is_unsharded = None, True

    def _hold_gathers_until(self, event_ns: int) -> None:
        machine = self._machine
        machine.wait(machine.copy_in, event_ns)
        machine.wait(machine.gather, event_ns)

    def _reduce(self, unit: int, state: _UnitState, one: Pass) -> None:
        work, machine = state.work, self._machine
        self._memory.reduce(unit)
        machine.launch(work.reduce_launch_ns)
        issue_ns = machine.host.free_ns
        copies = machine.compute
        if self._fsdp1 is not None:
            copies = machine.reduce
            machine.wait(copies, machine.reached(machine.compute))
        copied = machine.run(copies, work.reduce_copy_in_ns)
        if self._spans is not None:
            self._note(EventKind.REDUCE_SCATTER_COPY_IN, unit, issue_ns, copied)
        if machine.reduce is not copies:
            machine.wait(machine.reduce, copied[1])
        scatter = self._reduction(
            EventKind.REDUCE_SCATTER, unit, machine.reduce, self._reduce_link, work.reduce_ns
        )
        if self._fsdp1 is not None:
            self._memory.reduced(unit)
        else:
            state.context.in_flight.append(scatter)
        state.reduced_ns = scatter.end_ns
        if work.all_reduce_ns and one.all_reduces:
            reduced = self._reduction(
                EventKind.ALL_REDUCE,
                unit,
                machine.all_reduce,
                self._replica_link,
                work.all_reduce_ns,
                not_before_ns=scatter.end_ns,
            )
            state.reduced_ns = reduced.end_ns

    def _reduction(
        self,
        kind: EventKind,
        unit: int,
        stream: VirtualStream,
        link: CollectiveQueue,
        duration_ns: int,
        *,
        not_before_ns: int = 0,
    ) -> _Transfer:
        """Issue a reduction, for which nothing waits so far."""
        issue_ns = self._machine.host.free_ns
        start_ns, end_ns = self._machine.transfer(
            stream, link, duration_ns, not_before_ns=not_before_ns
        )
        held_ns = self._held_ns(stream, issue_ns, end_ns)
        reduction = _Transfer(
            kind, unit, Phase.BACKWARD, issue_ns, start_ns, end_ns, held_ns, self._hook_unit
        )
        self._outstanding[reduction] = None
        return reduction

    def _await(self, reduction: _Transfer) -> None:
        """Let compute wait for a reduction, unless it did so before."""
        if reduction in self._outstanding:
            del self._outstanding[reduction]
            self._wait_for(reduction)

    def _wait_for(self, transfer: _Transfer) -> None:
        """Let compute wait for a collective, and complete its span."""
        machine = self._machine
        if self._spans is not None:
            need_ns = machine.reached(machine.compute)
            held_ns = transfer.held_ns
            self._note_transfer(transfer, need_ns if held_ns is None else held_ns)
        machine.wait(machine.compute, transfer.end_ns)

    def _drop_unused_gather(self, unit: int, state: _UnitState) -> None:
        """Wait for a gather that no backward used and drop it, as torch does."""
        gather = state.gather
        if gather is not None:
            self._machine.wait(self._machine.compute, gather.end_ns)
            self._note_transfer(gather, -1 if gather.held_ns is None else gather.held_ns)
            self._memory.drop_output(unit)
            state.gather = None

    def _compute(self, unit: int, duration_ns: int, launch_ns: int) -> None:
        machine = self._machine
        issue_ns = machine.host.free_ns
        ran = machine.run(machine.compute, duration_ns, launch_ns)
        if self._spans is not None:
            self._note(EventKind.COMPUTE, unit, issue_ns, ran)

    # --- spans

    def _note_pass(self, kind: EventKind, unit: int, begin_ns: int) -> None:
        if self._spans is not None:
            end_ns = self._machine.reached(self._machine.compute)
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
        if self._spans is not None and ran[1] > ran[0]:
            self._spans.append(Span(kind, unit, self._phase, self._microbatch, issue_ns, *ran))

    def _note_transfer(self, transfer: _Transfer, need_ns: int) -> None:
        if self._spans is not None:
            self._spans.append(
                Span(
                    transfer.kind,
                    transfer.unit,
                    transfer.phase,
                    self._microbatch,
                    transfer.issue_ns,
                    transfer.start_ns,
                    transfer.end_ns,
                    need_ns,
                    transfer.issued_by,
                )
            )
