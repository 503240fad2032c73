"""The current position in the training, shared by all hooks.

The session stores the step, the microbatch, the phase and the running unit. It converts marks to
rows. It holds no reference to the model.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.recording.clocks import Clock
from fsdp_inspect.recording.code_places import CodePlaces
from fsdp_inspect.recording.journal import NOT_NEEDED, Journal, host_ns_of
from fsdp_inspect.recording.patches import describe_internal, warn
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    Method,
    Phase,
    Source,
    Stream,
)

if TYPE_CHECKING:
    from fsdp_inspect.recording.black_box import BlackBoxWriter
    from fsdp_inspect.recording.emulated_network import LinkModel, Transfer
    from fsdp_inspect.recording.host_stops import StopCounter
    from fsdp_inspect.recording.numerics import StepObserver
    from fsdp_inspect.recording.storage_tracker import StorageTracker
    from fsdp_inspect.recording.training_checks import TrainingChecks


# --- The current position in the training: step, microbatch, phase and running unit.


class Position:
    """The position, which the hooks of a recording keep and read.

    It has slots, because the hooks run with cold processor caches: see [Note: Cold code] in
    `unit_timing`.
    """

    __slots__ = (
        "backwards",
        "depths",
        "execution_known",
        "execution_order",
        "explicit_steps",
        "forward_ends",
        "graph_units",
        "has_issued",
        "hook_unit",
        "in_backward",
        "in_outer_optimizer",
        "in_step",
        "inputs",
        "is_memory_step",
        "last_ended_pass",
        "last_unit",
        "loader_ended_ns",
        "loader_ended_step",
        "loss_dtype",
        "microbatch",
        "num_batches",
        "num_collectives",
        "num_loader_passes",
        "num_repeated",
        "open_units",
        "opened_ns",
        "phase",
        "plain_ns",
        "running_units",
        "samples_boundaries",
        "skips_reduction",
        "step",
        "step_start",
        "stops",
        "times_plain",
        "training_thread",
        "unit_depths",
        "unit_of",
        "was_interrupted",
        "watches_memory",
        "will_repeat",
    )

    def __init__(self) -> None:  # noqa: PLR0915 - one statement a field
        self.training_thread = threading.get_ident()
        """The thread of the last forward of a unit; before that, the thread that attached."""
        self.step = self.microbatch = 0
        self.step_start: Any = None
        self.opened_ns: int | None = None
        """The host time at which step 0 began; None before it."""
        self.phase: Phase = Phase.OUTSIDE
        self.in_step = self.explicit_steps = self.in_backward = False
        """Whether `recorder.step()` is open. Whether the script uses it at all; otherwise steps end
        at the optimizer's step. Whether a backward runs."""
        self.in_outer_optimizer = False
        """Whether an outer optimizer is in its step, which contains steps of a torch optimizer."""
        self.will_repeat = False
        """Whether the first forward of a reentrant checkpoint runs, which has no gradients."""
        self.hook_unit = NO_UNIT
        """The unit whose FSDP hook is on the host's stack; -1: none."""
        self.open_units: list[int] = []
        """Units whose forward or backward is open, outermost first. In backward, a unit around
        the last one opens after it."""
        self.unit_depths: Sequence[int] = ()
        """The depth of each unit's first module in the model."""
        self.unit_of: dict[int, int] = {}
        """The unit of each module that is one, by its `id`."""
        self.running_units: Callable[[], Sequence[int]] = lambda: ()
        """The units whose pass runs now, as the sharder knows them without hooks; from any thread.
        """
        self.execution_order: list[int] = []
        """Units in the order of the first recorded forward."""
        self.graph_units = set[int]()
        """The units of this order whose forward kept a graph."""
        self.execution_known = False
        self.forward_ends = set[int]()
        """Units that began or ended a forward of the model, and outermost units of forwards without
        gradients: plain steps need their hooks."""
        self.last_unit = NO_UNIT
        """The unit whose forward ended last."""
        self.has_issued = False
        """Whether a collective of a unit was noted in this plain step: a unit has run."""
        self.depths: dict[int, int] = {}
        """The recorded collectives that each thread is inside of, by its identifier."""
        self.num_collectives = 0
        """The recorded collectives, whose number connects the rows of each."""
        self.is_memory_step = False
        """Whether the times of this step do not count."""
        self.samples_boundaries = False
        """Whether this step reads the allocator's counters at unit boundaries."""
        self.watches_memory = False
        """Whether this step records any memory data at unit boundaries."""
        self.was_interrupted = False
        """Whether this step contains an evaluation or a checkpoint."""
        self.times_plain, self.plain_ns = False, 0
        """Whether the notes of this plain step are timed, and the sum of these times."""
        self.loader_ended_ns, self.loader_ended_step = 0, -1
        self.backwards = Counter[int]()
        """The steps that have ended, by the number of their backwards."""
        self.num_repeated = 0
        """Forwards that activation checkpointing repeated in detailed steps."""
        self.num_batches = self.num_loader_passes = self.last_ended_pass = 0
        """Batches that data loaders gave to the training thread; passes over them that began, and
        their number when a pass last ended."""
        """The time at which the training's data loader last ended, and its step; 0: never."""
        self.loss_dtype = ""
        """Dtype of the tensor of the first backward: `float32`; empty before it."""
        self.inputs = ""
        self.stops: StopCounter | None = None
        """The tensors that the first unit received in the last memory step: `4 x 2048 int64`."""
        self.skips_reduction = False
        """Whether a backward left gradients unreduced (`set_requires_gradient_sync(False)`)."""

    @property
    def collective_depth(self) -> int:
        """Above 0 inside a recorded collective of this thread."""
        return self.depths.get(threading.get_ident(), 0)

    def is_background(self) -> bool:
        """Whether this is a thread of the script other than the training and autograd threads."""
        if threading.get_ident() == self.training_thread:
            return False
        return not isinstance(threading.current_thread(), threading._DummyThread)

    def issuing_unit(self) -> int:
        """The unit whose hook is issuing now; -1 means the training script."""
        if self.hook_unit != NO_UNIT:
            return self.hook_unit
        return self.open_units[-1] if self.open_units else NO_UNIT

    def repeating_unit(self) -> int:
        """The innermost open unit by its depth in the model; -1: none."""
        depths = self.unit_depths
        return max(
            reversed(self.open_units),
            key=lambda unit: depths[unit] if unit < len(depths) else 0,
            default=NO_UNIT,
        )

    def close_unit(self, unit: int) -> None:
        """Take a unit off the stack; backward does not close units strictly in nested order."""
        opened = self.open_units
        if opened and opened[-1] == unit:
            opened.pop()
            return
        for place in range(len(opened) - 1, -1, -1):
            if opened[place] == unit:
                del opened[place]
                return

    def note_execution(self, unit: int) -> None:
        """Record that a unit runs in the first forward."""
        if torch.is_grad_enabled():
            self.graph_units.add(unit)
        if unit not in self.execution_order:
            self.execution_order.append(unit)


logger = logging.getLogger("fsdp_inspect")


# Plain integers: in Python 3.11 an attribute of an Enum class costs 0.2 µs, and arithmetic of
# flags 2 µs, on each access.
_MEASURED = int(Method.MEASURED)
_MEMORY_STEP, _PLAIN_STEP = int(EventFlag.MEMORY_STEP), int(EventFlag.PLAIN_STEP)
_BETWEEN_STEPS = int(EventKind.BETWEEN_STEPS)
_OUTSIDE, _FORWARD, _EVALUATION = Phase.OUTSIDE, Phase.FORWARD, Phase.EVALUATION


class Session(Position):
    """The recording's position in the training, and the conversion of marks to rows."""

    __slots__ = (
        "_evaluated",
        "_evaluation",
        "_forward_start",
        "_has_reference",
        "_has_trained",
        "_is_paused",
        "_last_forward_end",
        "_reference_passes",
        "_unclear",
        "active",
        "append",
        "backward_place",
        "black_box",
        "checks",
        "clock",
        "compute_stream",
        "detail",
        "emulation",
        "gradients_between",
        "has_comm_hooks",
        "is_compared",
        "journal",
        "numerics",
        "on_host",
        "places",
        "problems",
        "process_groups",
        "source",
        "tracker",
        "wants_detail",
    )

    def __init__(  # noqa: PLR0915 - one statement a field
        self,
        clock: Clock,
        append: Callable[[tuple[int, ...]], None],
        process_groups: ProcessGroups,
        source: Source = Source.RECORDED,
        emulation: LinkModel | None = None,
        black_box: BlackBoxWriter | None = None,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.black_box = black_box
        """The last collectives; None under emulation, which cannot hang."""
        self.places = CodePlaces()
        self.append = append
        """Writes a row whose times are plain integers."""
        self.journal = Journal(clock, append, None if black_box is None else black_box.ended)
        self.process_groups = process_groups
        self.source = source
        self.emulation = emulation
        """The emulated network; None for a real network."""
        self.is_compared = True
        """Whether the order of collectives must be the same on all ranks; see `stop_comparing`."""
        self.gradients_between = ""
        """The gradients between two backwards of a step: `kept`, or `changed` if the loop cleared
        or changed them at least once; empty: unknown."""
        self.has_comm_hooks = False
        """Whether DDP waits at the end of backward for the futures of a communication hook."""
        self.active = True
        """False after detach, after an internal error and during a pause: hooks then only call
        the original functions."""
        self.detail = self.wants_detail = True
        """Whether rows of units and collectives are written, and whether they are in this step; see
        `choose_detail`."""
        self._is_paused = False
        self.problems: list[str] = []
        self.tracker: StorageTracker | None = None
        """The tracker of a memory step, or of all steps under a limit of memory; see
        `follow_storages`."""
        self.checks: TrainingChecks | None = None
        """Observes whether the training is right; None: it is not observed."""
        self.numerics: StepObserver | None = None
        """Observes the values of this step; None: it is not a numerics step."""
        self.on_host = clock.immediate
        self.compute_stream = int(Stream.HOST if clock.immediate else Stream.COMPUTE)
        """The stream of a unit's passes."""
        self._has_trained = self._has_reference = False
        """Whether a forward with gradients, and one without, ran since the last step ended."""
        self._forward_start = self._last_forward_end = None
        self._evaluation: tuple[Any, Any] | None = None
        self._evaluated: set[PassKey] = set()
        """The passes of the open evaluation."""
        self._unclear: list[tuple[Any, Any, frozenset[PassKey]]] = []
        """Evaluations of the first step, which may be the passes of a teacher."""
        self._reference_passes = ReferencePasses()
        self.backward_place = 0
        """The number in `places` of the line that called the running backward."""

    # --- the position

    def position(self, frames: Iterable[FrameType] = ()) -> tuple[int, int]:
        """The innermost unit on the host's stack, or -1, and the phase.

        Args:
            frames: Frames of functions that an error has ended, the innermost first. In a plain
                step, in which hooks do not note the units, they show the module that ran. Frames
                of running functions are not read: see `code_places.read_variables`.
        """
        if self.wants_detail:
            return self.issuing_unit(), int(self.phase)
        modules = (self.unit_of.get(id(frame.f_locals.get("self"))) for frame in frames)
        unit = next((unit for unit in modules if unit is not None), None)
        if unit is None:
            running = self.running_units()
            unit = max(running, key=self.unit_depths.__getitem__, default=NO_UNIT)
        return unit, int(self.phase)

    @property
    def logged_step(self) -> int:
        """The step of a number that is logged now. Between two steps it is the step that ended."""
        has_begun = self.in_step or self.microbatch > 0 or self._forward_start is not None
        return self.step if has_begun else max(self.step - 1, 0)

    def communication_phase(self) -> Phase:
        """The phase of a collective that is issued now.

        After a forward of an evaluation, a collective without gradients belongs to the evaluation.
        Examples are the gather of an `unshard()` call and the reduction of the evaluation's loss.
        """
        if self.phase == Phase.OUTSIDE and self._evaluation and not torch.is_grad_enabled():
            return Phase.EVALUATION
        return self.phase

    @property
    def has_trained(self) -> bool:
        """Whether a forward of the step keeps a graph."""
        return self._has_trained

    @property
    def ends_with_optimizer(self) -> bool:
        """Whether an optimizer that has just stepped ends the step.

        If several optimizers step in a row, the first one ends the step. If an optimizer steps
        during backward, the end of backward ends the step. An optimizer that steps inside the step
        of another optimizer does not end the step.
        """
        is_whole = not (self.in_backward or self.in_outer_optimizer)
        return not self.explicit_steps and self._has_trained and is_whole

    def take_transfer(self) -> Transfer | None:
        """The times of an emulated collective that was just issued; None: measure them."""
        return None if self.emulation is None else self.emulation.take_transfer()

    def follow_storages(self, tracker: StorageTracker | None, *, is_memory_step: bool) -> None:
        """Follow storages with a tracker; None stops it."""
        self.tracker = tracker
        self.is_memory_step = is_memory_step
        self.watch_memory()

    def watch_memory(self) -> None:
        """Update `watches_memory` after a change of `tracker` or `samples_boundaries`."""
        self.watches_memory = self.tracker is not None or self.samples_boundaries

    # --- the black box

    def note_issue(
        self,
        kind: int,
        unit: int,
        group: Any,
        message_bytes: int,
        dtype: int,
        *,
        is_background: bool = False,
    ) -> int:
        """Note a collective in the black box before it is issued; returns its number there.

        Its line of code is that of the caller. In backward it is the line that called `backward`.
        """
        box = self.black_box
        if box is None:
            return 0
        phase, place = self.phase, self.backward_place
        if is_background or not (self.in_backward and place):
            places = self.places
            place = places.find(sys._getframe(1)) if unit == NO_UNIT else places.find_again(unit)
            if places.new:
                box.add_places(places.new)
        if is_background:
            phase = _OUTSIDE
        elif phase is _OUTSIDE:
            phase = self.communication_phase()
        return box.issue(
            kind,
            unit,
            group,
            message_bytes,
            dtype,
            phase,
            self.step,
            self.microbatch,
            place,
            1 if is_background else 0 if self.is_compared else 2,
        )

    def stop_comparing(self) -> None:
        """Compare no collectives from now on: a rank without input shadows those of the others."""
        if self.is_compared:
            self.is_compared = False
            self.problem(
                "The script uses torch's Join for uneven inputs: from then on, the order of "
                "collectives is not compared between ranks."
            )

    # --- rows

    def add(  # noqa: PLR0913 - one argument a column of `EventTable`
        self,
        kind: int,
        start: Any,
        end: Any,
        step: int | None = None,
        microbatch: int | None = None,
        phase: int | None = None,
        unit: int = NO_UNIT,
        issued_by: int = NO_UNIT,
        stream: int | None = None,
        group: int = -1,
        dtype: int = 0,
        method: int = _MEASURED,
        flags: int = 0,
        sequence: int = -1,
        collective: int = -1,
        bytes: int = -1,
        issue_ns: int | None = None,
        need: Any = NOT_NEEDED,
    ) -> None:
        """Add one event row from its marks.

        Step, microbatch and phase default to the current ones, and the stream to the compute
        stream. The issue time is the host time at which the mark `start` was taken.
        """
        if unit != NO_UNIT and not self.detail and step is None:
            return
        if kind == _BETWEEN_STEPS:
            self.was_interrupted = True
        if self.is_memory_step or self.numerics is not None:
            flags |= _MEMORY_STEP
        is_known = type(start) is int and type(end) is int and type(need) is int
        (self.append if is_known else self.journal.add)(
            (
                self.step if step is None else step,
                self.microbatch if microbatch is None else microbatch,
                self.phase if phase is None else phase,
                kind,
                unit,
                issued_by,
                self.compute_stream if stream is None else stream,
                group,
                dtype,
                self.source,
                method,
                flags,
                sequence,
                collective,
                bytes,
                host_ns_of(start) if issue_ns is None else issue_ns,
                start,
                end,
                need,
            )
        )

    # --- the parts of a step

    def open_step(self) -> None:
        """Fix the start of step 0 at the first training event."""
        if self.step_start is None:
            self.opened_ns = self.clock.host_now()
            self.step_start = self.clock.mark()

    def end_step(self) -> None:
        """Close the current step now and begin the next one."""
        end = self.clock.mark()
        self.open_step()
        self._close_forward(self._last_forward_end)
        self._close_evaluation()
        flags = 0 if self.wants_detail else _PLAIN_STEP
        self.add(EventKind.STEP, self.step_start, end, phase=Phase.OUTSIDE, flags=flags)
        self.step_start = end
        self.step += 1
        self.backwards[self.microbatch] += 1
        self.microbatch = 0
        self.phase = Phase.OUTSIDE
        self.open_units.clear()
        self.hook_unit = NO_UNIT
        self.in_backward = self._has_trained = self.has_issued = self._has_reference = False
        self._reference_passes.end_step()
        if self._unclear and self._reference_passes.num_ended > 1:
            self._add_unclear()
        self.execution_known = self.execution_known or bool(self.execution_order)
        self.journal.drain()
        if self.black_box is not None:
            self.black_box.end_step(self.step)
        self.clock.advance()

    def enter_forward(
        self, mark: Any, *, grad_enabled: bool, key: PassKey = (NO_UNIT, True)
    ) -> Phase:
        """Begin a unit's forward, in training or in an evaluation pass outside a step.

        Args:
            mark: The moment.
            grad_enabled: Whether the forward keeps a graph.
            key: The unit and its mode; default: the whole model.
        """
        self.training_thread = threading.get_ident()
        if self.step_start is None:
            self.open_step()
        if not (grad_enabled or self.open_units):
            self.forward_ends.add(key[0])
            self._has_reference = True
        if not grad_enabled and not self._is_in_step(key):
            self.phase = _EVALUATION
            begin = self._evaluation[0] if self._evaluation else mark
            self._evaluation = (begin, mark)
            self._evaluated.add(key)
            return _EVALUATION
        if self._evaluation:
            self._close_evaluation()
        if self._forward_start is None:
            self._forward_start = mark
            self.forward_ends.add(key[0])
        self.phase = _FORWARD
        self._has_trained |= grad_enabled
        return _FORWARD

    def _is_in_step(self, key: PassKey) -> bool:
        """Whether a forward without gradients that begins now is part of the step."""
        if self.explicit_steps:
            return self.in_step
        is_inside_training = self.phase == Phase.FORWARD and bool(self.open_units)
        is_regular = self._reference_passes.note(key)
        return is_inside_training or (is_regular and self._evaluation is None)

    def leave_forward(self, mark: Any, unit: int = NO_UNIT) -> None:
        """End a unit's forward."""
        self.last_unit = unit
        if self._evaluation and self.phase is _EVALUATION:
            self._evaluation = (self._evaluation[0], mark)
            if not self.open_units:
                self.phase = Phase.OUTSIDE
        else:
            self._last_forward_end = mark

    def begin_backward(self) -> Any:
        """Note that autograd starts: the forward, including the loss, has ended."""
        mark = self.clock.mark()
        self._close_forward(mark)
        # Another unit than usual may begin a forward. The collectives of a forward without
        # gradients do not show that.
        self._has_trained |= self.has_issued and not self._has_reference
        self.backward_place = self.places.find(sys._getframe(1))
        if self.places.new and self.black_box is not None:
            self.black_box.add_places(self.places.new)
        self.phase = Phase.BACKWARD
        self.in_backward = True
        return mark

    def finish_backward(self, begin: Any) -> None:
        """Note that autograd has returned: one microbatch is complete."""
        self.add(EventKind.BACKWARD, begin, self.clock.mark(), phase=Phase.BACKWARD)
        self.microbatch += 1
        self.phase = Phase.OUTSIDE
        self.in_backward = False
        self.open_units.clear()

    def _close_forward(self, end: Any) -> None:
        if self._forward_start is not None and end is not None:
            self.forward_ends.add(self.last_unit)
            self.add(EventKind.FORWARD, self._forward_start, end, phase=Phase.FORWARD)
        self._forward_start = None
        self._last_forward_end = None

    def _close_evaluation(self) -> None:
        if self._evaluation is None:
            return
        (begin, end), keys = self._evaluation, frozenset(self._evaluated)
        self._evaluation = None
        self._evaluated.clear()
        if self.explicit_steps or self._reference_passes.num_ended:
            self.add(EventKind.BETWEEN_STEPS, begin, end, phase=Phase.EVALUATION)
        else:  # a teacher, if the next step runs it, too
            self.was_interrupted = True
            self._unclear.append((begin, end, keys))

    def _add_unclear(self) -> None:
        """Add the evaluations of step 0, without those whose passes the next step repeats."""
        passes, was_interrupted = self._reference_passes, self.was_interrupted
        repeated = passes.previous if passes.num_ended > 1 else frozenset()
        for begin, end, keys in self._unclear:
            if not keys <= repeated:
                self.add(EventKind.BETWEEN_STEPS, begin, end, step=0, phase=Phase.EVALUATION)
        self._unclear.clear()
        self.was_interrupted = was_interrupted  # the rows are those of another step

    def end_evaluation(self) -> None:
        """Write the evaluation that the end of the recording leaves open."""
        if self.active:
            self._close_evaluation()
            self._add_unclear()

    # --- plain steps and pauses

    def count_plain(self, begun_ns: int) -> None:
        """Add the time since `begun_ns` to the cost of a plain step that is timed; 0: it is not."""
        if begun_ns:
            self.plain_ns += self.clock.host_now() - begun_ns

    def take_interruption(self) -> bool:
        """Whether the last step contained an evaluation or a checkpoint, once."""
        was_interrupted, self.was_interrupted = self.was_interrupted, False
        return was_interrupted

    def choose_detail(self, is_detailed: bool) -> None:
        """Begin a detailed or a plain step.

        In a plain step, hooks follow the position in the training and note each collective in the
        black box. They write the rows of the parts of the step, but none of units or collectives.
        """
        self.wants_detail = is_detailed
        self.detail = is_detailed and self.active

    def stop(self) -> None:
        """Record nothing from now on."""
        self.active = self.detail = False

    @property
    def is_paused(self) -> bool:
        """Whether nothing is recorded until `resume`, because a CUDA graph is captured."""
        return self._is_paused

    def pause(self, reason: str) -> None:
        """Record nothing until `resume`; the reason is stored with the run."""
        if self.active:
            self.stop()
            self._is_paused = True
            self.problem(reason)

    def resume(self) -> None:
        """Continue after `pause`; does nothing if the recording has ended."""
        if self._is_paused:
            self.active, self._is_paused = True, False
            self.detail = self.wants_detail

    # --- internal errors

    def fail(self, error: BaseException) -> None:
        """Report an internal error once and stop the recording; the training continues.

        Raises:
            BaseException: `error`, if a signal handler of the training raised it.
        """
        raise_if_of_signal(error)
        if not self.active:
            return
        self.stop()
        described = describe_internal(error)
        self.problems.append(f"Recording stopped by {described}")
        logger.debug("recording stopped", exc_info=error)
        warn(
            f"recording stopped at step {self.step} by {described}. The training continues "
            "unchanged; everything recorded so far is kept."
        )

    def problem(self, sentence: str) -> None:
        """Store a limit of the recording in the run folder."""
        if sentence not in self.problems:
            self.problems.append(sentence)


# --- Distinguish reference passes, which belong to every step, from evaluations.
#
# A teacher, a reference model and a target network run forwards without gradients in each step. An
# evaluation runs them too, but not in each step. Without `recorder.step()`, only the regularity
# shows the difference: a forward without gradients belongs to the step if the same unit, in the
# same mode, ran one in each of the two steps before. In the second and third step, only the step
# before decides, because the launcher attaches within the first step.

PassKey = tuple[int, bool]
"""The unit, and whether its module is in training mode."""

_FIRST_STEPS = 3


class ReferencePasses:
    """The forwards without gradients of the current step and of the two steps before."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.previous: set[PassKey] = set()
        self._current: set[PassKey] = set()
        self._regular: set[PassKey] = set()

    def note(self, key: PassKey) -> bool:
        """Note a forward without gradients; returns whether it belongs to the step."""
        self._current.add(key)
        return key in self._regular

    def end_step(self) -> None:
        """Begin the next step."""
        self.num_ended += 1
        is_early = self.num_ended < _FIRST_STEPS
        self._regular = self._current if is_early else self._current & self.previous
        self.previous, self._current = self._current, set()
