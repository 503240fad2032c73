"""Record DeepSpeed engines with ZeRO-1 or ZeRO-2.

[Note: Where the recorder attaches to ZeRO-1 and ZeRO-2]
Parameters are whole on every rank. Gradients are reduced in buckets that DeepSpeed fills during
backward, in the order in which gradients become ready (ZeRO-1: after backward, in the order of the
parameters). The first backward shows the buckets. Before it, the recorder uses expected buckets.
The optimizer's step gathers the flat parameters of each parameter group.

A bucket is not a module, so it has neither a forward nor a backward.

On a device without `overlap_comm`, a reduction runs on the compute stream, which stands still. With
it, the compute stream waits at each reduction for the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.sharders.zero import Zero, ZeroHooks
from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.recording.torch_api.deepspeed_zero import (
    EPILOGUE,
    REDUCTIONS,
    GradientBucketHandle,
    ParameterGroupHandle,
)
from fsdp_inspect.recording.unit_timing import UnitTimer
from fsdp_inspect.recording.units import dtype_name
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.sharders import ZERO1, ZERO2

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups

Handle = GradientBucketHandle | ParameterGroupHandle
Members = tuple[tuple[int, int, int], ...]
"""The gradients of a bucket: parameter group, place in it, number."""


class Zero2(Zero[Handle]):
    """The buckets and parameter groups of engines with ZeRO-2."""

    name = ZERO2
    stage = 2

    def find_units(self) -> list[Handle]:
        """The parameter groups, then the expected buckets."""
        finds = (deepspeed_zero.find_parameter_groups, deepspeed_zero.expected_buckets)
        return [
            handle
            for find in finds
            for prefix, engine in self.engines
            for handle in find(prefix, engine)
        ]

    def make_hooks(self, session: Session, memory: MemoryProbe) -> ZeroBucketHooks:
        """Hooks on the reductions and on the final gather."""
        return ZeroBucketHooks(session, self, memory)

    def describe_unit(self, handle: Handle, index: int, name: str, groups: ProcessGroups) -> Unit:
        """Describe a bucket or a parameter group."""
        if isinstance(handle, ParameterGroupHandle):
            return self._describe_group(handle, index, name, groups)
        num_parameters = sum(handle.full_numels)
        dtype = handle.parameters[0].dtype
        return Unit(
            index=index,
            fqn=name,
            modules=list(handle.fqns),
            num_parameters=num_parameters,
            num_trainable_parameters=num_parameters,
            num_tensors=len(handle.parameters),
            parameters=handle.parameter_shapes,
            unsharded_bytes=num_parameters * dtype.itemsize,
            sharded_bytes=num_parameters * dtype.itemsize,
            reduce_bytes=handle.num_bytes,
            param_dtype=dtype_name(dtype),
            reduce_dtype=dtype_name(handle.dtype),
            reshard_after_forward=False,
            replicate_group=groups.find(deepspeed_zero.group_of(handle.engine), "shard"),
            recorded_by="zero_bucket",
        )

    def _describe_group(
        self, handle: ParameterGroupHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a parameter group; its parameters are counted in the buckets."""
        flat = handle.flat
        return Unit(
            index=index,
            fqn=name,
            modules=[""],
            num_parameters=0,
            num_trainable_parameters=0,
            unsharded_bytes=flat.nbytes,
            sharded_bytes=flat.nbytes // handle.group.size(),
            reduce_bytes=0,
            param_dtype=dtype_name(flat.dtype),
            reduce_dtype=dtype_name(flat.dtype),
            reshard_after_forward=False,
            shard_group=groups.find(handle.group, "shard"),
            recorded_by="zero_group",
        )

    def shared_buffers(self) -> list[tuple[MemoryCategory, torch.Tensor]]:
        """The buckets, this rank's gradients and the optimizer's copies of the parameters."""
        return [
            each
            for _, engine in self.engines
            for each in deepspeed_zero.shared_buffers_of_stages_1_and_2(engine)
        ]

    def learn_bucket(
        self, prefix: str, engine: Any, number: int, members: Members, dtype: torch.dtype
    ) -> bool:
        """Replace the expected bucket of this number by a real one; False if they are equal.

        A real bucket after the last expected one is added to the units.
        """
        found = deepspeed_zero.make_bucket(prefix, engine, number, members, dtype)
        for place, handle in enumerate(self.units):
            is_bucket = isinstance(handle, GradientBucketHandle) and handle.engine is engine
            if is_bucket and handle.name == found.name:
                if handle == found:
                    return False
                self.units[place] = found
                break
        else:
            self.units.append(found)
        self.num_changes += 1
        return True

    def keep_buckets(self, engine: Any, count: int) -> None:
        """Drop the expected buckets of an engine that its first backward did not have."""
        kept = [
            handle
            for handle in self.units
            if not isinstance(handle, GradientBucketHandle)
            or handle.engine is not engine
            or handle.bucket < count
        ]
        if len(kept) < len(self.units):
            self.units[:] = kept
            self.num_changes += 1


class Zero1(Zero2):
    """The buckets and parameter groups of engines with ZeRO-1."""

    name = ZERO1
    stage = 1


class ZeroBucketHooks(ZeroHooks):
    """The hooks on all buckets; see [Note: Where the recorder attaches to ZeRO-1 and ZeRO-2]."""

    _sharder: Zero2

    def __init__(self, session: Session, sharder: Zero2, memory: MemoryProbe) -> None:
        super().__init__(session, sharder, memory)
        self._next: dict[int, int] = {}
        """The number of the next bucket, by engine."""
        self._ends_backward = False
        """Whether DeepSpeed reduces the last bucket of a backward now."""
        self._last_issue: Any = None
        """The compute stream after that reduction, which DeepSpeed then waits for."""
        self._timers = {
            index: UnitTimer(session, handle, index, memory)
            for index, handle in enumerate(sharder.units)
            if isinstance(handle, ParameterGroupHandle)
        }

    def attach_to(self, engine: Any, patches: Patches) -> None:
        """Wrap the two ways to reduce a bucket, and the end of the reductions."""
        zero = engine.optimizer
        prefix = next(name for name, each in self._sharder.engines if each is engine)

        def end(unit: int) -> None:
            self._after_reduction(engine)

        def before(*args: Any, **kwargs: Any) -> None:
            self._ends_backward = True

        def of_buffer(tensor: Any, dtype: torch.dtype, *unused: Any, **also: Any) -> int:
            return self._find_bucket(prefix, engine, dtype)

        def of_list(rank: Any, grads: Any, dtype: torch.dtype, *unused: Any, **also: Any) -> int:
            return self._find_bucket(prefix, engine, dtype)

        finders: tuple[Callable[..., int], ...] = (of_buffer, of_list)
        for name, unit_of in zip(REDUCTIONS, finders, strict=True):
            patches.set_attribute(zero, name, self.reducing(getattr(zero, name), unit_of, end))

        def after(token: Any, result: Any) -> None:
            self._after_epilogue(engine)

        wrapped = wrap_call(getattr(zero, EPILOGUE), before, after, self._session)
        patches.set_attribute(zero, EPILOGUE, wrapped)

    def begin_forward(self, engine: Any) -> None:
        """Expect the first bucket as the next reduction."""
        self._next[id(engine)] = 0

    def _find_bucket(self, prefix: str, engine: Any, dtype: torch.dtype) -> int:
        """The unit of the bucket before its reduction; no unit if the bucket is new."""
        if engine.optimizer.overlap_comm and self._reductions.has_any:
            self._reductions.wait_for_all(self._session, self._session.clock.mark())
        bucket = engine.optimizer.ipg_buckets[dtype]
        members: Members = tuple(tuple(each) for each in bucket.params)
        if not members:
            return NO_UNIT
        number = self._next.get(id(engine), 0)
        self._next[id(engine)] = number + 1
        has_changed = self._sharder.learn_bucket(prefix, engine, number, members, dtype)
        if has_changed and self._session.step == 0:
            return NO_UNIT  # the numbers of units may still change
        if has_changed:
            self._session.problem(
                "The buckets of gradients differ between steps: a bucket has the parameters of the "
                "last step."
            )
        name = f"{prefix} bucket {number}".lstrip()
        unit, handle = next(
            (index, handle)
            for index, handle in enumerate(self._sharder.units)
            if handle.engine is engine and handle.name == name
        )
        if self._session.watches_memory:
            self._memory.unsharded_gradients(handle, unit)
            self.classify_gradients()
        return unit

    def gather(
        self, collective: Callable[[], Any], output: torch.Tensor, shard: torch.Tensor, group: Any
    ) -> Any:
        """Run the gather of a parameter group, or another gather of DeepSpeed."""
        for index, timer in self._timers.items():
            handle = self._sharder.units[index]
            assert isinstance(handle, ParameterGroupHandle)
            if handle.flat.data_ptr() == output.data_ptr():
                timer._enter_hook()
                try:
                    return timer.all_gather(collective, output, group)
                finally:
                    timer._leave_hook()
        return collective()

    def _after_reduction(self, engine: Any) -> None:
        """Called after a reduction is issued; on CPU, it has ended."""
        if not engine.optimizer.overlap_comm:
            self._reductions.ran_on_compute_stream(self._session)
        elif self._ends_backward and self._reductions.has_any and self._last_issue is None:
            self._last_issue = self._session.clock.mark()

    def _after_epilogue(self, engine: Any) -> None:
        session = self._session
        number = self._next.get(id(engine), 0)
        if session.step == 0 and number:
            self._sharder.keep_buckets(engine, number)
        issued, self._last_issue, self._ends_backward = self._last_issue, None, False
        if self._reductions.has_any:
            begin = session.clock.mark() if issued is None else issued
            self._reductions.wait_for_all(session, begin)
        self.classify_gradients()
