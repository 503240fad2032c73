"""Make FSDP wait for emulated collectives on CPU, where its events make it wait on CUDA.

torch's CPU streams and events are dummies, so on CPU FSDP2 waits only for a `Work`. Returning a
`Work` would put FSDP2 on its asynchronous branch, which frees the gather's output early and changes
the memory peak. Collectives therefore return None, and the main thread sleeps where FSDP makes
CUDA's compute stream wait for an event (`_fsdp_param_group.py`, torch 2.13):

    unshard                   notes the all-gather that it issues
    wait_for_unshard          waits for that all-gather
    post_backward             notes the reductions that it issues
    _wait_for_post_backward   waits for the reduce-scatters that FSDP has just dropped (all but
                              the newest K - 1, K the maximum of input buffers) and for the
                              unit's own last reduction
    finalize_backward         waits for every reduction, and for an unused gather

The wraps are on the class, so they apply to the units of any model, whenever they are made.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from fsdp_inspect.emulation.network import EmulatedNetwork
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.recording.torch_api.attributes import set_attribute
from fsdp_inspect.recording.torch_api.fsdp2 import (
    WAIT_FOR_REDUCE_SCATTERS,
    FSDPParamGroup,
    num_reduce_scatters_in_flight,
)


class UnitWaits:
    """The collectives that units have issued and not yet waited for."""

    def __init__(self, network: EmulatedNetwork) -> None:
        self._network = network
        self._gathers: WeakKeyDictionary[FSDPParamGroup, Transfer] = WeakKeyDictionary()
        self._last_reductions: WeakKeyDictionary[FSDPParamGroup, Transfer] = WeakKeyDictionary()
        self._in_flight: WeakKeyDictionary[Any, list[Transfer]] = WeakKeyDictionary()
        """Reduce-scatters whose input FSDP keeps, by FSDP root, oldest first."""
        self._outstanding: WeakKeyDictionary[Any, list[Transfer]] = WeakKeyDictionary()
        """Reductions until the end of backward, by FSDP root."""
        self.gathering: FSDPParamGroup | None = None
        """The unit whose `unshard` is running."""
        self.reducing: FSDPParamGroup | None = None
        """The unit whose `post_backward` is running."""
        self.fsdp_ns = 0
        """Time that the main thread has spent in FSDP's own code: copies and waits."""
        self._entered_ns = 0
        self._depth = 0

    def attach(self, undo: ExitStack) -> None:
        """Wrap the methods of every unit until `undo` is closed."""
        wraps: dict[str, Callable[..., Any]] = {
            "unshard": self._unshard,
            "wait_for_unshard": self._wait_for_unshard,
            "post_backward": self._post_backward,
            WAIT_FOR_REDUCE_SCATTERS: self._wait_for_post_backward,
            "finalize_backward": self._finalize_backward,
        }
        for name, wrap in wraps.items():
            original = vars(FSDPParamGroup)[name]
            undo.callback(set_attribute(FSDPParamGroup, name, self._bind(wrap, original)))

    # --- issued collectives

    def note_gather(self, transfer: Transfer) -> None:
        """Note the all-gather that the gathering unit has issued."""
        assert self.gathering is not None
        self._gathers[self.gathering] = transfer

    def note_reduction(self, transfer: Transfer, *, is_reduce_scatter: bool) -> None:
        """Note a reduce-scatter of the reducing unit, or the all-reduce after it."""
        group = self.reducing
        assert group is not None
        self._last_reductions[group] = transfer
        self._outstanding.setdefault(group.comm_ctx, []).append(transfer)
        if is_reduce_scatter:
            self._in_flight.setdefault(group.comm_ctx, []).append(transfer)

    @property
    def reduced_ns(self) -> int:
        """The end of the unit's previous reduction: an all-reduce follows its reduce-scatter."""
        assert self.reducing is not None
        last = self._last_reductions.get(self.reducing)
        return 0 if last is None else last.end_ns

    # --- the wrapped methods

    def _bind(self, wrap: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with self._inside_fsdp():
                return wrap(functools.partial(original, group, *args, **kwargs), group)

        return method

    def _unshard(self, original: Callable[[], None], group: FSDPParamGroup) -> None:
        outer, self.gathering = self.gathering, group
        try:
            original()
        finally:
            self.gathering = outer

    def _wait_for_unshard(self, original: Callable[[], None], group: FSDPParamGroup) -> None:
        self._wait(self._gathers.pop(group, None))
        original()

    def _post_backward(self, original: Callable[[], None], group: FSDPParamGroup) -> None:
        outer, self.reducing = self.reducing, group
        try:
            original()
        finally:
            self.reducing = outer
        self._wait_for_dropped(group)  # without gradients, inputs are dropped and not reduced

    def _wait_for_post_backward(self, original: Callable[[], None], group: FSDPParamGroup) -> None:
        self._wait_for_dropped(group)
        self._wait(self._last_reductions.pop(group, None))
        original()

    def _finalize_backward(self, original: Callable[[], None], group: FSDPParamGroup) -> None:
        for transfer in sorted(
            self._outstanding.pop(group.comm_ctx, []), key=lambda transfer: transfer.end_ns
        ):
            self._wait(transfer)
        self._in_flight.pop(group.comm_ctx, None)
        self._last_reductions.pop(group, None)
        self._wait(self._gathers.pop(group, None))
        original()

    def _wait_for_dropped(self, group: FSDPParamGroup) -> None:
        in_flight = self._in_flight.get(group.comm_ctx, [])
        for _ in range(len(in_flight) - num_reduce_scatters_in_flight(group)):
            self._wait(in_flight.pop(0))

    def _wait(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._network.wait(transfer)

    @contextmanager
    def _inside_fsdp(self) -> Iterator[None]:
        self._depth += 1
        if self._depth == 1:
            self._entered_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.fsdp_ns += time.perf_counter_ns() - self._entered_ns
