"""Repeat the order in which ZeRO-3 gathers, keeps and reduces.

[Note: The order of ZeRO-3]
DeepSpeed 0.19 notes the order of the modules in the first forward and backward. From then on, its
hooks follow these rules (`partitioned_param_coordinator.py`, `stage3.py`), which do not depend on
time:

- Before the forward or the backward of a module, its missing parameters are gathered in one
  message. The module waits for all its parameters. Then the next parameters of the order are
  prefetched in one message, until it has `prefetch_bucket_size` elements, or the gathered ones
  reach `max_live_parameters`. This also happens at modules without parameters.
- After it, its parameters are released, unless a prefetch has skipped a later use of them, or a
  module within the next `max_reuse_distance` elements uses them. DeepSpeed decides this once for
  each place in the order.
- Parameters of at most `param_persistence_threshold` elements stay until the update, and are
  gathered after it, each in its own message. The step waits for all of them.
- A gradient that would exceed `reduce_bucket_size` reduces the bucket before it. The rest is
  reduced after backward.
- A frozen parameter that a repeated forward uses stays until the backward around it has ended.
- Each update releases all parameters. Each forward forgets what was prefetched.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_inspect.trace.codes import ENTERS, EventKind, UseEvent
from fsdp_inspect.trace.run import UseOrder

_MOST_STEPS = 8
"""The steps until the messages of two steps must be equal."""


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """DeepSpeed's settings of gathers, in elements."""

    prefetch_bucket_size: float
    max_live_parameters: float
    max_reuse_distance: float
    param_persistence_threshold: float


class ShardedParameter(NamedTuple):
    """A parameter that ZeRO-3 shards."""

    numel: int
    padded: int
    """Its elements with those that make all shards equal."""
    gather_itemsize: int
    reduce_dtype: str
    reduce_itemsize: int


class Message(NamedTuple):
    """A collective of a step."""

    kind: EventKind
    parameters: tuple[int, ...]
    num_bytes: int


class HookAction(NamedTuple):
    """What a hook does with a message."""

    place: int
    """The event of `UseOrder.events` at which it happens; their number: the update."""
    message: int
    is_wait: bool
    """Whether it waits for the message; else, it issues it."""


class Messages(NamedTuple):
    """The messages of a step, in the order of their issue, and the actions of its hooks."""

    messages: tuple[Message, ...]
    actions: tuple[HookAction, ...]
    most_bytes: int
    """The most bytes of gathered parameters at once."""


def order_messages(
    uses: UseOrder,
    parameters: Sequence[ShardedParameter],
    settings: GatherSettings,
    reduce_bucket_size: float,
    *,
    scatters: bool,
) -> Messages | None:
    """The messages of a step; see [Note: The order of ZeRO-3]. None if steps never become equal.

    Gradients are reduce-scattered (`scatters`) or all-reduced.
    """
    coordinator = _Coordinator(uses, parameters, settings, reduce_bucket_size, scatters)
    before = None
    for _ in range(_MOST_STEPS):
        found = coordinator.run_step()
        if found == before:
            return found
        before = found
    return None


def entered_modules(uses: UseOrder) -> list[list[int]]:
    """The modules that each forward and backward of the model enters, in order."""
    passes: list[list[int]] = []
    for event, number, _ in uses.events:
        if event == UseEvent.BEGIN:
            passes.append([])
        elif event in ENTERS and passes:
            passes[-1].append(number)
    return passes


class _Coordinator:
    """The state that DeepSpeed keeps of the parameters."""

    def __init__(
        self,
        uses: UseOrder,
        parameters: Sequence[ShardedParameter],
        settings: GatherSettings,
        reduce_bucket_size: float,
        scatters: bool,
    ) -> None:
        self.uses, self.parameters, self.settings = uses, parameters, settings
        self.reduce_bucket_size, self.scatters = reduce_bucket_size, scatters
        self.order = entered_modules(uses)[0]
        self.used = [each.parameters for each in uses.modules]
        self.trained = {at for event, at, _ in uses.events if event == UseEvent.GRADIENT}
        self.in_flight: dict[int, int] = {}
        """The message of each parameter that was gathered without a wait so far."""
        self.gathered: set[int] = set()
        self.active: defaultdict[int, set[int]] = defaultdict(set)
        """The modules that use a parameter now."""
        self.in_backward: dict[int, None] = {}
        """The modules whose backward has not ended."""
        self.repeated: defaultdict[int, set[int]] = defaultdict(set)
        """The frozen parameters that forwards repeated during the backward of each module."""
        self.num_begun = 0
        self.queue: deque[tuple[int, int]] = deque()
        """The next parameters in the order, each with the place of its use."""
        self.fetched_for: dict[int, int] = {}
        """The last place in the order for which a parameter was fetched or skipped."""
        self.step = self.num_live = self.place = self.most_bytes = 0
        """The place in the order; the gathered elements; the event; the most gathered bytes."""
        self.released: dict[tuple[int, int], Set[int]] = {}
        """The parameters to release after a module at a place in the order."""
        self.bucket: defaultdict[str, list[int]] = defaultdict(list)
        self.messages: list[Message] = []
        self.actions: list[HookAction] = []

    @property
    def is_complete(self) -> bool:
        """Whether the order is known: after the first forward and backward."""
        return self.num_begun > 1

    def run_step(self) -> Messages:
        """Run a step, with its update."""
        self.messages, self.actions = [], []
        self.most_bytes = self._held_bytes()
        for place, (event, number, _) in enumerate(self.uses.events):
            self.place = place
            match event:
                case UseEvent.BEGIN:
                    self._begin()
                case UseEvent.GRADIENT:
                    self._add_gradient(number)
                case UseEvent.REDUCE_REST:
                    self._end_backward()
                case _ if event in ENTERS:
                    self._enter(number, is_backward=event == UseEvent.ENTER_BACKWARD)
                case _:
                    self._leave(number, is_backward=event == UseEvent.LEAVE_BACKWARD)
        self.place = len(self.uses.events)
        self._update()
        return Messages(tuple(self.messages), tuple(self.actions), self.most_bytes)

    def _end_backward(self) -> None:
        """Reduce the remaining gradients, and release the modules whose backward has no end."""
        for dtype in sorted(self.bucket):
            self._reduce(dtype)
        while self.in_backward:
            module, _ = self.in_backward.popitem()
            for parameter in {*self.used[module], *self.repeated.pop(module, ())}:
                self.active[parameter].discard(module)
                if self._may_release(parameter):
                    self._release(parameter)

    def _may_release(self, parameter: int) -> bool:
        return self.parameters[parameter].numel > self.settings.param_persistence_threshold

    def _begin(self) -> None:
        self._drain()
        self.num_begun += 1
        order = enumerate(self.order) if self.is_complete else ()
        self.queue = deque((each, place) for place, one in order for each in self.used[one])
        self.fetched_for.clear()
        self.step = self.num_live = 0

    def _drain(self) -> None:
        """Wait for what was prefetched, and release it."""
        for parameter in list(self.in_flight):
            if parameter in self.in_flight:
                self._await(parameter)
            self._release(parameter)

    def _enter(self, module: int, *, is_backward: bool) -> None:
        used = self.used[module]
        if is_backward:
            self.in_backward[module] = None
        elif self.in_backward:  # a repeated forward
            owner = next(reversed(self.in_backward))
            for each in {*used} - self.trained:
                self.repeated[owner].add(each)
                self.active[each].add(owner)
        self._gather([each for each in used if self._is_missing(each)])
        for parameter in used:
            self.active[parameter].add(module)
            if parameter in self.in_flight:
                self._await(parameter)
        if self.is_complete:
            self._skip(used)
            self._prefetch()
        self.step += 1

    def _skip(self, used: Sequence[int]) -> None:
        """Drop the parameters of this module from the queue, unless a prefetch has."""
        needed = {each for each in used if self.fetched_for.get(each, -1) < self.step}
        dropped: set[int] = set()
        while self.queue and len(dropped) < len(needed):
            parameter, place = self.queue.popleft()
            self.fetched_for[parameter] = place
            dropped.add(parameter)

    def _prefetch(self) -> None:
        wanted = self.settings.prefetch_bucket_size
        if wanted <= 0:
            return
        most = min(self.settings.max_live_parameters - self.num_live, wanted)
        taken: dict[int, None] = {}
        numel = 0
        while self.queue and numel < most:
            parameter, place = self.queue.popleft()
            self.fetched_for[parameter] = max(self.fetched_for.get(parameter, -1), place)
            if self._is_missing(parameter) and parameter not in taken:
                taken[parameter] = None
                numel += self.parameters[parameter].numel
        self._gather(taken)

    def _is_missing(self, parameter: int) -> bool:
        return parameter not in self.gathered and parameter not in self.in_flight

    def _gather(self, wanted: Sequence[int] | dict[int, None]) -> None:
        """Gather parameters in one message for each dtype."""
        for size in {self.parameters[each].gather_itemsize: None for each in wanted}:
            members = [each for each in wanted if self.parameters[each].gather_itemsize == size]
            number = self._issue(EventKind.ALL_GATHER, members)
            self.in_flight |= dict.fromkeys(members, number)
            self.num_live += self._numel(members)
        self.most_bytes = max(self.most_bytes, self._held_bytes())

    def _held_bytes(self) -> int:
        held = (self.parameters[each] for each in (*self.gathered, *self.in_flight))
        return sum(each.padded * each.gather_itemsize for each in held)

    def _issue(self, kind: EventKind, members: Sequence[int]) -> int:
        num_bytes = 0
        for each in (self.parameters[member] for member in members):
            is_gather = kind == EventKind.ALL_GATHER
            numel = each.numel if kind == EventKind.ALL_REDUCE else each.padded
            num_bytes += numel * (each.gather_itemsize if is_gather else each.reduce_itemsize)
        self.messages.append(Message(kind, tuple(members), num_bytes))
        number = len(self.messages) - 1
        self.actions.append(HookAction(self.place, number, is_wait=False))
        return number

    def _await(self, parameter: int) -> None:
        """Wait for the message of a parameter, which completes all its parameters."""
        number = self.in_flight[parameter]
        self.actions.append(HookAction(self.place, number, is_wait=True))
        arrived = [each for each, own in self.in_flight.items() if own == number]
        for each in arrived:
            del self.in_flight[each]
        self.gathered.update(arrived)

    def _leave(self, module: int, *, is_backward: bool) -> None:
        used, repeated = self.used[module], set[int]()
        if is_backward:
            self.in_backward.pop(module, None)
            repeated = self.repeated.pop(module, repeated)
        out: Set[int] = {*used}
        if self.is_complete:
            key = (module, self.step)
            if key not in self.released:
                self.released[key] = self._to_release(used)
            out = self.released[key]
        out = out | {each for each in repeated if self._may_release(each)}
        for parameter in {*used, *repeated}:
            self.active[parameter].discard(module)
            if parameter in out:
                self._release(parameter)

    def _to_release(self, used: Sequence[int]) -> Set[int]:
        is_old = (each for each in used if self.fetched_for.get(each, -1) <= self.step)
        found, passed = {each for each in is_old if self._may_release(each)}, 0
        for module in self.order[self.step :]:
            if passed >= self.settings.max_reuse_distance:
                break
            found -= set(self.used[module])
            passed += self._numel(self.used[module])
        return found

    def _numel(self, members: Iterable[int]) -> int:
        return sum(self.parameters[each].numel for each in members)

    def _release(self, parameter: int) -> None:
        if parameter in self.gathered and not self.active[parameter]:
            self.gathered.remove(parameter)
            self.num_live -= self.parameters[parameter].numel

    def _add_gradient(self, parameter: int) -> None:
        own = self.parameters[parameter]
        bucket = self.bucket[own.reduce_dtype]
        if bucket and self._numel(bucket) + own.numel > self.reduce_bucket_size:
            self._reduce(own.reduce_dtype)
        bucket.append(parameter)

    def _reduce(self, dtype: str) -> None:
        bucket = self.bucket[dtype]
        if not bucket:
            return
        is_scattered = self.scatters or self._numel(bucket) > self.reduce_bucket_size
        kind = EventKind.REDUCE_SCATTER if is_scattered else EventKind.ALL_REDUCE
        number = self._issue(kind, bucket)
        self.actions.append(HookAction(self.place, number, is_wait=True))
        bucket.clear()

    def _update(self) -> None:
        self.active.clear()
        self._drain()
        self.gathered.clear()
        threshold = self.settings.param_persistence_threshold
        kept = [at for at, each in enumerate(self.parameters) if each.numel <= threshold]
        for parameter in kept:
            number = self._issue(EventKind.ALL_GATHER, [parameter])
            self.gathered.add(parameter)
            if parameter == kept[-1]:
                self.actions.append(HookAction(self.place, number, is_wait=True))
