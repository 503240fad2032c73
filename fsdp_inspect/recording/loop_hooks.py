"""Time forward, backward, optimizer and data in an unmodified training loop.

The recorder wraps autograd's entry point, the optimizer's own hooks, the DataLoader's iterator and
the recomputation of checkpointing while it is attached.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.tensors import local_part, strided_parts
from fsdp_inspect.recording.torch_api.autograd import (
    LoaderIterator,
    recomputation_hook,
    versions_of,
)
from fsdp_inspect.recording.torch_api.dispatch import storage_key
from fsdp_inspect.recording.torch_api.optimizers import Nesting
from fsdp_inspect.recording.training_checks import TrainingChecks
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.codes import EventKind, Phase

_OBSERVED_STEPS = 3
"""The first steps, in which gradients are compared between the backwards."""


class LoopHooks:
    """Times the parts of a step that belong to no unit."""

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        on_optimizer_step: Callable[[torch.optim.Optimizer], None],
        before_update: Callable[[], None] | None = None,
        outer: Sequence[tuple[Any, torch.optim.Optimizer]] = (),
        units: Sequence[UnitHandle] = (),
    ) -> None:
        """`before_update` runs before each optimizer step; its exceptions reach the training.

        The gradients of `units` are observed between the backwards of the first steps.
        `outer`: see `Sharder.outer_optimizers`. A step of an outer optimizer counts as one step.
        """
        self._session = session
        self._before_update = before_update
        self._optimizers = optimizers
        self._on_optimizer_step = on_optimizer_step
        self._outer = outer
        self._units = units
        self._gradients: set[tuple[int, int, int]] = set()
        """The storage and the versions of each gradient after the last backward."""
        self._backward_depth = 0
        self._optimizer_start: Any = None
        self._nesting = Nesting()
        """See [Note: nested updates]."""
        self._stepped_in_backward: torch.optim.Optimizer | None = None
        self._joined: Any = None
        """The end of the last backward, before any update has begun: the recorder may be attached
        within an update, whose closure runs the first forward."""
        self._has_updated = False

    def attach(self, patches: Patches) -> None:
        """Install every hook."""
        self._wrap_backward(patches)
        self._hook_optimizer(patches)
        for optimizer, inner in self._outer:
            self._wrap_outer(optimizer, inner, patches)
        self._wrap_data_loader(patches)
        self._wrap_recomputation(patches)
        self._wrap_join(patches)

    def _wrap_join(self, patches: Patches) -> None:
        """Note that the script expects uneven inputs."""
        from torch.distributed.algorithms.join import Join

        original, session = Join.__init__, self._session

        @functools.wraps(original)
        def joined(join: Any, joinables: Any, *args: Any, **options: Any) -> None:
            original(join, joinables, *args, **options)
            is_enabled = args[0] if args else options.get("enable", True)
            if is_enabled and session.active:
                session.stop_comparing()

        patches.set_attribute(Join, "__init__", joined)

    # --- backward

    def _wrap_backward(self, patches: Patches) -> None:
        original = torch.autograd.backward
        session = self._session

        def before(*args: Any, **kwargs: Any) -> Any:
            self._backward_depth += 1
            passing = not session.active or self._backward_depth > 1
            if not (passing or session.loss_dtype):
                session.loss_dtype = _dtype_of(_start_of(args, kwargs))
            if passing or torch.compiler.is_compiling():
                return None
            if session.checks is not None:
                session.checks.before_backward(_start_of(args, kwargs))
            self._note_gradients(before_backward=True)
            return session.begin_backward()

        def after(begin: Any, result: Any) -> None:
            if begin is not None and session.active:
                session.finish_backward(begin)
                self._note_gradients(before_backward=False)
                if session.checks is not None:
                    session.checks.after_backward()
                self._after_backward()

        timed = wrap_call(original, before, after, session)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            depth = self._backward_depth
            try:
                return timed(*args, **kwargs)
            finally:
                self._backward_depth = depth

        patches.set_attribute(torch.autograd, "backward", backward)

    def _note_gradients(self, *, before_backward: bool) -> None:
        """Compare the gradients before a backward with those that the last backward left."""
        session = self._session
        if session.step >= _OBSERVED_STEPS or (before_backward and not session.microbatch):
            return
        # Outside of `no_sync`, FSDP1 has the gradients of its shards, too.
        found = set(self._find_gradients())
        if before_backward and self._gradients and session.gradients_between != "changed":
            is_kept = self._gradients <= found
            session.gradients_between = "kept" if is_kept else "changed"
        self._gradients = found

    def _find_gradients(self) -> Iterator[tuple[int, int, int]]:
        with torch.no_grad():
            for unit in self._units:
                for gradient in (*unit.reduced_gradients, *unit.full_gradients):
                    local = strided_parts(local_part(gradient))[-1]
                    yield storage_key(local.untyped_storage()), *versions_of(gradient)

    def _after_backward(self) -> None:
        """Adjust an optimizer step that contains this backward or ended inside it."""
        session = self._session
        if self._optimizer_start is not None:
            # The optimizer's closure computed the loss, so the optimizer's own time begins here.
            session.phase = Phase.OPTIMIZER
            self._optimizer_start = session.clock.mark()
        elif not self._has_updated:
            self._joined = session.clock.mark()
        if self._stepped_in_backward is not None:
            optimizer, self._stepped_in_backward = self._stepped_in_backward, None
            self._on_optimizer_step(optimizer)

    # --- optimizer

    def _hook_optimizer(self, patches: Patches) -> None:
        if self._optimizers is not None:
            handles = [
                handle
                for optimizer in self._optimizers
                for handle in (
                    optimizer.register_step_pre_hook(self._before_optimizer),
                    optimizer.register_step_post_hook(self._after_optimizer),
                )
            ]
            handles += [
                register_optimizer_step_pre_hook(self._before_other),
                register_optimizer_step_post_hook(self._after_other),
            ]
        else:
            handles = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]
        for handle in handles:
            patches.on_undo(handle.remove)

    # [Note: nested updates] The update is the outermost step (`torch_api.optimizers`): it is timed,
    # and ends. An optimizer that another one steps is checked, but not the outer one. A step of the
    # same optimizer within its own is a part of it.

    def _steps_around(self, optimizer: Any) -> list[Any]:
        """The optimizers whose step encloses the current one."""
        if self._session.in_backward:  # one optimizer for each parameter: too many to look at
            return []
        return self._nesting.find_around(optimizer)

    def _named(self, optimizers: list[Any]) -> list[Any]:
        """Those whose steps are hooked."""
        named = self._optimizers
        if named is None:
            return optimizers
        return [each for each in optimizers if any(each is one for one in named)]

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session
        if not session.active:
            return
        around = [] if session.in_outer_optimizer else self._named(self._steps_around(optimizer))
        if any(each is optimizer for each in around):
            return
        self._has_updated = True
        if self._before_update is not None:
            self._before_update()
        if session.in_outer_optimizer:
            return
        try:
            session.phase = Phase.OPTIMIZER
            steps_others = self._nesting.steps_others(optimizer)
            if session.checks is not None:
                session.checks.before_update(optimizer, steps_others=steps_others)
            if session.numerics is not None:
                session.numerics.before_update(optimizer)
            if not around:
                self._optimizer_start = session.clock.mark()
        except Exception as error:
            session.fail(error)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session
        if session.active and session.in_outer_optimizer:
            self._on_optimizer_step(optimizer)
            return
        if not self._has_updated and not session.in_backward:
            self._has_updated, self._optimizer_start = True, self._joined
        if not session.active or self._optimizer_start is None:
            return
        around = self._named(self._steps_around(optimizer))
        if any(each is optimizer for each in around):
            return
        self._nesting.note_end(optimizer)
        try:
            if not around:
                start, self._optimizer_start = self._optimizer_start, None
                end = session.clock.mark()
                session.add(EventKind.OPTIMIZER, start, end, phase=Phase.OPTIMIZER)
            self._check_update(optimizer)
            if around:
                return
            session.phase = Phase.BACKWARD if session.in_backward else Phase.OUTSIDE
            if session.in_backward:
                self._stepped_in_backward = optimizer
            self._on_optimizer_step(optimizer)
        except Exception as error:
            session.fail(error)

    def _check_update(self, optimizer: Any) -> None:
        session = self._session
        if session.numerics is not None:
            session.numerics.after_update(optimizer)
        if session.checks is not None and not self._nesting.steps_others(optimizer):
            session.checks.after_update(optimizer)

    def _checks_of(self, optimizer: Any) -> TrainingChecks | None:
        """The checks, if an optimizer steps that the user did not name."""
        session = self._session
        if not session.active or session.in_outer_optimizer:
            return None
        others = *(self._optimizers or ()), *self._steps_around(optimizer)
        return None if any(optimizer is each for each in others) else session.checks

    def _before_other(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check an update that is no step of the recording."""
        if (checks := self._checks_of(optimizer)) is not None:
            checks.before_update(optimizer, steps_others=self._nesting.steps_others(optimizer))

    def _after_other(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (checks := self._checks_of(optimizer)) is None:
            return
        self._nesting.note_end(optimizer)
        if self._session.numerics is not None and self._optimizer_start is not None:
            self._session.numerics.after_update(optimizer)  # a part of a named one
        if not self._nesting.steps_others(optimizer):
            checks.after_update(optimizer)

    def _wrap_outer(self, outer: Any, inner: torch.optim.Optimizer, patches: Patches) -> None:
        """Time a step that communicates and then steps a torch optimizer once or several times."""
        session = self._session

        def before(*args: Any, **kwargs: Any) -> Any:
            session.in_outer_optimizer = True
            session.phase = Phase.OPTIMIZER
            return session.clock.mark()

        def after(start: Any, result: Any) -> None:
            end, session.in_outer_optimizer = session.clock.mark(), False
            if start is None:
                return
            session.add(EventKind.OPTIMIZER, start, end, phase=Phase.OPTIMIZER)
            session.phase = Phase.OUTSIDE
            self._on_optimizer_step(inner)

        patches.set_attribute(outer, "step", wrap_call(outer.step, before, after, session))

    # --- data

    def _wrap_data_loader(self, patches: Patches) -> None:
        original = LoaderIterator.__next__
        session = self._session
        running = WeakSet[Any]()
        """Iterators of the passes that run."""

        def following(iterator: Any) -> Any:
            # Only the training thread counts, because compute does not wait for a thread that loads
            # ahead.
            if not session.active or threading.get_ident() != session.training_thread:
                return original(iterator)
            if iterator not in running:
                running.add(iterator)
                session.num_loader_passes += 1
            start = session.clock.mark()
            try:
                batch = original(iterator)
                session.num_batches += 1
                if session.checks is not None:
                    session.checks.note_batch(batch, iterator)
                return batch
            except StopIteration:
                running.discard(iterator)  # persistent workers use it again for the next pass
                if session.checks is not None:
                    session.checks.note_end_of_pass(iterator)
                session.last_ended_pass = session.num_loader_passes
                session.loader_ended_ns = session.clock.host_now()
                session.loader_ended_step = session.step
                raise
            finally:
                try:
                    session.add(EventKind.DATA, start, session.clock.mark(), phase=Phase.DATA)
                except Exception as error:
                    session.fail(error)

        patches.set_attribute(LoaderIterator, "__next__", following)

    # --- recomputation

    def _wrap_recomputation(self, patches: Patches) -> None:
        """Time the recompute of activation checkpointing in backward."""
        self._wrap_reentrant(patches)
        hook = recomputation_hook()
        if hook is None:
            self._session.problem(
                "This torch version has no torch.utils.checkpoint._recomputation_hook: recompute "
                "of non-reentrant checkpoints is part of backward and not shown separately."
            )
            return
        self._wrap_hook(hook, patches)

    def _wrap_hook(self, hook: Any, patches: Patches) -> None:
        """Time the recompute of non-reentrant checkpoints.

        torch 2.13, `torch/utils/checkpoint.py`: the repeated forward runs inside a
        `_recomputation_hook`, even if an exception stops it early.
        """
        session, starts = self._session, list[Any]()
        enter, leave = hook.__enter__, hook.__exit__

        def entered(self_: Any) -> Any:
            starts.append(self._begin_recompute())
            return enter(self_)

        def left(self_: Any, *error: Any) -> Any:
            begun = starts.pop() if starts else None
            if begun is not None and session.active:
                self._end_recompute(begun)
            return leave(self_, *error)

        patches.set_attribute(hook, "__enter__", entered)
        patches.set_attribute(hook, "__exit__", left)

    def _wrap_reentrant(self, patches: Patches) -> None:
        """Time the recompute of reentrant checkpoints, and note their first forward.

        `CheckpointFunction.apply` runs the first forward without gradients, and its `backward`
        calls `ctx.run_function` again. A forward without gradients is otherwise an evaluation.
        """
        session, function = self._session, torch.utils.checkpoint.CheckpointFunction
        apply: Callable[..., Any] = function.apply
        backward: Callable[..., Any] = function.backward

        def first(*args: Any, **kwargs: Any) -> Any:
            outer = session.will_repeat
            session.will_repeat = outer or torch.is_grad_enabled()
            try:
                return apply(*args, **kwargs)
            finally:
                session.will_repeat = outer

        def again(ctx: Any, *gradients: Any) -> Any:
            run = ctx.run_function

            def timed(*args: Any, **kwargs: Any) -> Any:
                begun = self._begin_recompute()
                try:
                    return run(*args, **kwargs)
                finally:
                    if begun is not None and session.active:
                        self._end_recompute(begun)

            ctx.run_function = timed
            try:
                return backward(ctx, *gradients)
            finally:
                ctx.run_function = run

        patches.set_attribute(function, "apply", first)
        patches.set_attribute(function, "backward", staticmethod(again))

    def _begin_recompute(self) -> tuple[Any, int] | None:
        """The start of a recompute and its unit; None: nothing is recorded."""
        session = self._session
        try:
            return (session.clock.mark(), session.repeating_unit()) if session.detail else None
        except Exception as error:
            session.fail(error)
            return None

    def _end_recompute(self, begun: tuple[Any, int]) -> None:
        session, (start, unit) = self._session, begun
        try:
            end = session.clock.mark()
            session.num_repeated += 1
            session.add(EventKind.RECOMPUTE, start, end, unit=unit, phase=Phase.BACKWARD)
        except Exception as error:
            session.fail(error)


def _start_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensors that a call of `torch.autograd.backward` starts from."""
    return args[0] if args else kwargs.get("tensors")


def _dtype_of(tensors: Any) -> str:
    """The dtype of the first tensor, such as `float32`; empty if there is none."""
    first = next(iter(tensors), None) if isinstance(tensors, list | tuple) else tensors
    return str(first.dtype).removeprefix("torch.") if torch.is_tensor(first) else ""


# --- Decide which optimizer ends a step when several optimizers train.
#
# A step is one round: every optimizer has stepped at least once. If the optimizers are not given,
# they are learned: an optimizer that steps for the first time joins the round and does not end it.

MOST_STEPS = 64
"""An optimizer that does not step while another one steps this often leaves the round."""


class OptimizerRound:
    """The optimizers of a training, and those that have stepped in this round.

    Args:
        optimizers: The optimizers of the training; None: learn them.
        note: Called with a sentence if an optimizer leaves the round.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        note: Callable[[str], None],
    ) -> None:
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet(optimizers or ())
        self._learns = optimizers is None
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The number of steps of each optimizer in this round."""
        self._note = note
        self.has_grown = False
        """Whether an optimizer joined in this round, which makes it longer than the others."""

    def is_complete(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step of an optimizer; True if it completes the round."""
        if optimizer not in self._known:
            is_first = not self._known
            if self._learns:
                self._known.add(optimizer)
            if not is_first:
                self._counts.clear()
                self.has_grown = True
                return False
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        missing = [each for each in self._known if each not in self._counts]
        if missing and self._counts[optimizer] >= MOST_STEPS:
            for each in missing:
                self._known.discard(each)
            self._note(
                f"{len(missing)} of the optimizers did not step while another one stepped "
                f"{MOST_STEPS} times: a step of the run ends without them."
            )
            missing = []
        if not missing:
            self._counts.clear()
        return not missing
