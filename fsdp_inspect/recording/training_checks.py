"""Observe in the first steps whether the training is right: optimizer, batches and loss.

Everything is read from values on the CPU, without a copy of a tensor and without a collective. What
is on a GPU, or compiled, is not observed. An error of an observation ends the observations, and
never the recording.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_inspect.recording.accumulation_watch import (
    AccumulationWatch,
    Mark,
    RateWatch,
    WindowWatch,
    state_of,
)
from fsdp_inspect.recording.batch_watch import BatchWatch, is_plain
from fsdp_inspect.recording.clip_watch import ClipWatch
from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.coverage_watch import CoverageWatch
from fsdp_inspect.recording.mode_watch import ModeWatch
from fsdp_inspect.recording.parameter_samples import ParameterSamples
from fsdp_inspect.recording.patches import Patches, describe_internal
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.stale_watch import StaleWatch
from fsdp_inspect.recording.torch_api.autograd import wrap_cross_entropy
from fsdp_inspect.recording.torch_api.optimizers import updated_tensors
from fsdp_inspect.recording.torch_api.overrides import call_unseen
from fsdp_inspect.recording.value_watch import Recording, ValueWatch
from fsdp_inspect.trace.correctness import LateSeen, LossSeen, OptimizerSeen, TrainingSeen

_STEPS = 8
_OPTIMIZERS = 16
"""With more optimizers, such as one for each parameter, none is observed."""
_LOSSES = 64
_ROUNDING = 0.02
"""The relative error of a loss, for example in bfloat16."""
_LEAST_ELSEWHERE = 3
"""Updates after the last step; a loop may end within a step."""
_STALE_AFTER = 3
"""The update before which an optimizer without the model's parameters is reported."""


@dataclass(frozen=True, slots=True)
class Watches:
    """The parts of the observations that look at parameters."""

    values: ValueWatch
    samples: ParameterSamples | None
    """None: the optimizer updates partitions."""
    coverage: CoverageWatch | None
    """None: this too."""
    stale: StaleWatch


class TrainingChecks:
    """The observations of one rank.

    Args:
        session: The recording.
        model: The recorded model, or models.
        shapes: The shape of each parameter before sharding.
        report: Called once with a sentence about a fault that is certain.
        watches: The parts that look at parameters.
    """

    def __init__(
        self,
        session: Recording,
        model: nn.Module,
        shapes: Iterable[tuple[int, ...]],
        report: Callable[[str], None],
        watches: Watches,
    ) -> None:
        self._session = session
        self._values = watches.values
        self._samples = watches.samples
        self._coverage = watches.coverage
        self._stale = watches.stale
        self._model = model
        self._shapes = Counter(shapes)
        self._report = report
        self._has_stale = False
        """Whether an optimizer without the model's parameters was reported."""
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, OptimizerSeen] = (
            WeakKeyDictionary()
        )
        self._others: WeakKeyDictionary[torch.optim.Optimizer, list[Mark]] = WeakKeyDictionary()
        """The tensors of optimizers without the model's parameters, before their first update."""
        self._accumulation = AccumulationWatch()
        self._seen = TrainingSeen()
        self._windows = WindowWatch()
        self._rates = RateWatch()
        self._modes = ModeWatch(model)
        self._clips = ClipWatch(self._quietly)
        self._batches = BatchWatch()
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._began_from: float | None = None
        """The value that the last backward began from; None: it is not on the CPU, or there are
        several."""
        self._num_noted = self._num_updates = self._num_backwards = 0
        self._num_elsewhere = self._backwards_before = 0
        """Updates with new gradients of the model since the end of the last step; the backwards
        before the last update."""
        self._is_over = self._has_failed = False
        self._has_news = False

    def take_news(self) -> TrainingSeen | None:
        """What was observed until now; None: nothing since the last call."""
        values = self._values.seen
        num_noted = 0 if self._samples is None else self._samples.num_noted
        units = self._stale.take_news()
        is_known = values is self._seen.values and num_noted == self._num_noted and units is None
        if is_known and not self._has_news:
            return None
        self._has_news, self._num_noted = False, num_noted
        known: dict[str, Any] = {
            "coverage": None if self._coverage is None else self._coverage.seen,
            "optimizers": list(self._optimizers.values()),
            "rounds": list(self._accumulation.rounds),
            "windows": self._windows.seen,
            "late": LateSeen(
                kept=self._accumulation.kept,
                unused=self._accumulation.unused,
                units_without={} if self._coverage is None else self._coverage.units_without,
                idle=self._rates.idle,
                rates=dict(self._rates.last),
                digests=[] if self._samples is None else self._samples.last_digests,
                began=[] if self._samples is None else self._samples.began_digests,
                num_updates=self._num_updates,
                num_backwards=self._num_backwards,
            ),
            "modes": list(self._modes.seen),
            "clips": self._clips.seen,
            "batches": list(self._batches.batches),
            "passes": list(self._batches.passes),
            "random": list(self._batches.random),
            "autocast": self._batches.autocast,
            "values": values,
            "units": units or self._seen.units,
        }
        if self._samples is not None:
            known |= {
                "backward_place": self._samples.backward_place,
                "parameters": list(self._samples.parameters),
                "updates": list(self._samples.updates),
                "buffers": list(self._samples.buffers),
            }
        self._seen = self._seen.model_copy(update=known)
        return self._seen

    @property
    def is_over(self) -> bool:
        """Whether nothing more is observed."""
        return self._is_over or self._session.step >= _STEPS

    def _observes(self) -> bool:
        return not self.is_over and self._session.active

    def _quietly(self, observe: Callable[[], None], *, is_early: bool = True) -> None:
        """Run an observation of the first steps, or of any step."""
        if not (self._observes() if is_early else self._session.active and not self._has_failed):
            return
        try:
            call_unseen(observe)
        except Exception as error:
            raise_if_of_signal(error)
            self._is_over = self._has_failed = True
            self._session.problem(f"The training is not checked: {describe_internal(error)}.")

    def note_end_of_step(self) -> None:
        """Note that a step of the recording has ended."""
        self._num_elsewhere = 0

    def look_again(self) -> None:
        """Look at what may have changed since the first steps."""
        if self._num_elsewhere >= _LEAST_ELSEWHERE and not self._session.has_trained:
            self._session.problem(
                "After the last recorded step, the model had new gradients in "
                f"{self._num_elsewhere} updates, without a forward that the recorder saw: another "
                "wrapper of the model may train it. Attach the recorder to that one."
            )
        self._stale.look_at_frozen()
        if not self._has_failed:
            call_unseen(self._look_at_others)
            if self._samples is not None:
                call_unseen(self._samples.look_again)
        self._has_news = True

    def _look_at_others(self) -> None:
        """Note whether the optimizers without the model's parameters changed anything."""
        for optimizer, before in self._others.items():
            if (seen := self._optimizers.get(optimizer)) is not None:
                has_moved = [state_of(each) for each in updated_tensors(optimizer)] != before
                self._optimizers[optimizer] = seen.model_copy(update={"has_moved": has_moved})

    # --- the optimizer

    def before_update(
        self, optimizer: torch.optim.Optimizer, *, steps_others: bool = False
    ) -> None:
        """Observe the tensors of an optimizer that is about to step.

        `steps_others`: others update its tensors, and may hold copies or a part of them.
        """
        if steps_others:
            self._optimizers.pop(optimizer, None)
            self._quietly(lambda: self._hold(optimizer), is_early=False)
            return
        if not self.is_over:
            self._quietly(lambda: self._see_optimizer(optimizer))
        if (coverage := self._coverage) is not None:
            is_early = not coverage.is_new(optimizer)  # an optimizer may step late
            self._quietly(lambda: self._cover(coverage, optimizer), is_early=is_early)
            self._quietly(
                lambda: coverage.look_at_units(
                    optimizer, self._session.step, is_early=not self.is_over
                ),
                is_early=False,
            )
        if (samples := self._samples) is not None:
            self._quietly(lambda: samples.before_update(optimizer), is_early=False)

    def _hold(self, optimizer: torch.optim.Optimizer) -> None:
        if self._coverage is not None:
            self._coverage.hold(optimizer)

    def _cover(self, coverage: CoverageWatch, optimizer: torch.optim.Optimizer) -> None:
        coverage.before_update(optimizer, is_late=self.is_over)
        self._has_news = True

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the parameters that an optimizer has updated."""
        seen = self._optimizers.get(optimizer)
        if seen is not None and seen.num_of_model:
            self._num_updates += 1
            self._quietly(self._count_elsewhere, is_early=False)
        if not self.is_over:
            if (coverage := self._coverage) is not None:
                self._quietly(lambda: coverage.after_update(optimizer))
            self._quietly(self._stale.after_update)
        self._quietly(lambda: self._close_window(optimizer), is_early=False)
        if (samples := self._samples) is not None:
            self._quietly(lambda: samples.after_update(optimizer), is_early=False)

    def _count_elsewhere(self) -> None:
        before, self._backwards_before = self._backwards_before, self._num_backwards
        if self._num_backwards > before and not self._session.has_trained:
            self._num_elsewhere += any(each.grad is not None for each in self._model.parameters())

    def _see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if len(self._optimizers) >= _OPTIMIZERS and optimizer not in self._optimizers:
            self._optimizers.clear()
            self._is_over = True
            return
        parameters = {id(each): each for each in self._model.parameters()}
        own = {key: each for key, each in parameters.items() if each.requires_grad}
        tensors = updated_tensors(optimizer)
        shapes = Counter(tuple(each.shape) for each in tensors)
        before = self._optimizers.get(optimizer)
        with_gradient = sum(each.grad is not None for each in tensors)
        seen = OptimizerSeen(
            place=find_calling_line(sys._getframe(1)),
            num_steps=1 + (before.num_steps if before else 0),
            num_tensors=len(tensors),
            num_of_model=sum(id(each) in own for each in tensors),
            num_frozen=sum(id(each) in parameters.keys() - own.keys() for each in tensors),
            num_with_gradient=max(with_gradient, before.num_with_gradient if before else 0),
            num_alike=sum((shapes & self._shapes).values()),
            began_with_state=before.began_with_state if before else bool(optimizer.state),
            keeps_state=before is not None and bool(optimizer.state),
        )
        self._optimizers[optimizer] = seen
        is_other = before is None and not seen.num_of_model
        if is_other and any(each.requires_grad for each in tensors):
            self._others[optimizer] = [state_of(each) for each in tensors]
        of_model = sum(each.grad is not None for each in own.values())
        known = {"num_trainable": len(own), "num_with_gradient": of_model}
        self._seen = self._seen.model_copy(update=known)
        self._has_news = True
        is_stale = not (seen.num_of_model or seen.num_with_gradient) and of_model
        is_stale = is_stale and seen.num_alike == seen.num_tensors
        # The optimizer may hold copies whose values it writes to the model.
        samples = self._samples
        is_time = seen.num_steps == (1 if samples is None else _STALE_AFTER)
        is_new = is_time and not self._has_stale
        if is_stale and is_new and (samples is None or not samples.have_changed):
            self._has_stale = True
            self._report(
                f"The optimizer updates no parameter of the model ({seen.place}): its "
                f"{seen.num_tensors} tensors "
                + (
                    f"include {seen.num_frozen} frozen parameters and no trainable one. Create the "
                    "optimizer from those that require gradients."
                    if seen.num_frozen
                    else "are others with the shapes of the model's. Create the optimizer from the "
                    "parameters that the model has now, after it is sharded."
                )
            )

    def _close_window(self, optimizer: torch.optim.Optimizer) -> None:
        step, is_early = self._session.step, not self.is_over
        self._accumulation.after_update(optimizer, step, is_early=is_early)
        self._rates.note_update(optimizer, step)
        self._clips.after_update()
        self._has_news |= self._windows.note_update(optimizer, step)
        self._has_news |= self._modes.note_update(step) or is_early

    # --- batches

    def note_batch(self, batch: Any, iterator: Any) -> None:
        """Observe a batch that a DataLoader's iterator gives to the training thread."""
        if torch.is_grad_enabled():  # otherwise an evaluation
            self._quietly(lambda: self._accumulation.note_batch(id(iterator)))
            self._quietly(lambda: self._see_batch(batch, iterator), is_early=False)

    def _see_batch(self, batch: Any, iterator: Any) -> None:
        self._windows.note_batch()
        is_early = not self.is_over
        self._has_news |= self._batches.note_batch(batch, iterator, is_early=is_early)

    def note_end_of_pass(self, iterator: Any) -> None:
        """Observe that a DataLoader's iterator has no batch left."""
        if torch.is_grad_enabled():
            self._quietly(lambda: self._see_end(iterator), is_early=False)

    def _see_end(self, iterator: Any) -> None:
        self._batches.note_end(iterator)
        self._windows.note_end_of_pass()
        self._has_news = True

    def note_inputs(self, *inputs: Any) -> None:
        """Observe what a model receives first after a batch."""
        if not torch.is_grad_enabled():  # an evaluation
            return
        is_early = not self._batches.is_waiting
        self._quietly(lambda: self._batches.note_inputs(inputs, self._device), is_early=is_early)

    def before_backward(self, tensors: Any) -> None:
        """Keep the last batch, which a backward uses, and look at the loss it starts from."""
        self._num_backwards += 1
        self._quietly(lambda: self._values.note_loss(tensors), is_early=False)
        if not self.is_over:
            if (coverage := self._coverage) is not None:
                self._quietly(coverage.before_backward)
            self._quietly(lambda: self._see_backward(tensors))
            self._quietly(self._stale.before_backward)
            self._quietly(self._clips.before_backward)
        self._quietly(self._begin_backward, is_early=False)
        self._batches.forget()

    def _begin_backward(self) -> None:
        self._accumulation.before_backward(may_read=self._session.tracker is None)
        self._windows.note_backward()

    def _see_backward(self, tensors: Any) -> None:
        session = self._session
        loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
        is_known = is_plain(loss) and loss.numel() == 1
        self._began_from = float(loss.detach()) if is_known else None
        self._has_news |= self._batches.before_backward(
            session.step, is_first=session.microbatch == 0
        )

    def after_backward(self) -> None:
        """Observe the gradients that a backward left."""
        self._quietly(self._accumulation.after_backward, is_early=False)
        if not self.is_over:
            self._quietly(self._clips.after_backward)
        if (samples := self._samples) is not None:
            self._quietly(samples.after_backward, is_early=False)

    # --- the loss

    def attach(self, patches: Patches) -> None:
        """Observe the means and sums of cross entropies, and the calls that clip gradients."""
        patches.on_undo(wrap_cross_entropy(self._note_mean))
        self._clips.attach(patches, self._session)

    def _note_mean(self, target: Any, ignored: int, result: Any, is_sum: bool) -> None:
        if not self.is_over:
            self._quietly(lambda: self._see_mean(target, ignored, result, is_sum))
        elif self._windows.is_open:
            self._quietly(lambda: self._see_scale(result, is_sum), is_early=False)

    def _has_other_terms(self, term: float) -> bool:
        """Whether the value that backward began from is known to differ from this term of it."""
        whole = self._began_from
        return whole is not None and abs(whole - term) > _ROUNDING * abs(whole)

    def _see_scale(self, result: Any, is_sum: bool) -> None:
        """Note the gradient of a mean, also after the first steps. That of a sum says nothing."""
        if is_sum:
            self._windows.stop()
        elif is_plain(result) and result.requires_grad and not self._session.in_backward:

            def see_gradient(gradient: torch.Tensor) -> None:
                note = self._windows.note_scale
                self._quietly(lambda: note(float(gradient)), is_early=False)

            result.register_hook(see_gradient)

    def _see_mean(self, target: Any, ignored: int, result: Any, is_sum: bool) -> None:
        session = self._session
        if session.in_backward:  # a repeated forward
            return
        if len(self._seen.losses) >= _LOSSES:
            self._see_scale(result, is_sum)
            return
        if not (is_plain(target) and is_plain(result) and result.requires_grad):
            return
        if target.is_floating_point():  # probabilities of classes
            return
        count = int((target.detach().numpy() != ignored).sum())
        if not count:
            known = {"num_unlabelled": self._seen.num_unlabelled + 1}
            self._seen = self._seen.model_copy(update=known)
            self._has_news = True
            return
        where = {"step": session.step, "microbatch": session.microbatch}
        place = find_calling_line(sys._getframe(1))
        dtype = str(result.dtype).removeprefix("torch.")
        value = float(result.detach())

        def see_gradient(gradient: torch.Tensor) -> None:
            def keep() -> None:
                scale = float(gradient) * (count if is_sum else 1)
                if math.isfinite(scale):
                    seen = LossSeen(
                        num_tokens=count,
                        scale=scale,
                        place=place,
                        dtype=dtype,
                        is_part=self._has_other_terms(value * float(gradient)),
                        is_sum=is_sum,
                        **where,
                    )
                    self._seen.losses.append(seen)
                    self._windows.note_scale(scale)
                    self._has_news = True

            self._quietly(keep)

        result.register_hook(see_gradient)
