"""Track the memory of one training step, unit by unit, as in a recorder's memory step.

The same hooks and the same storage tracker as in a recording follow one step. Nothing is timed and
nothing is written. The step before it is not tracked: in it torch computes its layouts on tensors
of the global shape, and the optimizer creates its state.
"""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from fsdp_inspect.emulation.forecast.allocation_history import build_history
from fsdp_inspect.emulation.forecast.target import ForecastTarget
from fsdp_inspect.emulation.process import active_emulation
from fsdp_inspect.errors import ForecastError, RecordingError
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.environment import observe_settings
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.memory_steps import MemorySteps
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.sharders.fsdp2 import Fsdp2
from fsdp_inspect.recording.storage_log import StorageLog
from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.dispatch import (
    DEVICE_QUERY,
    TorchDispatchMode,
    device_of_fake,
    schema_of,
)
from fsdp_inspect.recording.torch_api.observe import observe_plan
from fsdp_inspect.recording.units import ProcessGroups, describe_model
from fsdp_inspect.trace.allocations import AllocationHistory
from fsdp_inspect.trace.codes import MemoryPoint, Source
from fsdp_inspect.trace.live_memory import LiveHistory, LiveMoment
from fsdp_inspect.trace.run import HostMemory, ModelInfo, OperationCount, ProcessGroup, Unit

_OFFLOADED = (
    "Offloaded tensors are on the host and not counted, from the moment of their computation: the "
    "reduced shard of a unit on its way to the host is missing."
)
_OFFLOADED_ON_CPU = (
    "CPU offload moves nothing on a CPU: this is the memory without it. Its default, pin_memory, "
    "ends such a training on a machine without an accelerator."
)
TRACKED_STEP = 1
"""The index of the tracked step, from 0."""


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """The memory of one step, and a description of its model."""

    model: ModelInfo
    units: list[Unit]
    process_groups: list[ProcessGroup]
    mesh: dict[str, int]
    plan: dict[str, Any]
    observed: dict[str, str]
    """See `recording.environment`."""
    notes: tuple[str, ...]
    """Limits of the count, one sentence each."""
    rows: Sequence[tuple[int, ...]]
    """Rows in the column order of `MemoryTable`."""
    moments: Sequence[LiveMoment]
    """The live storages at the moments of highest memory."""
    history: AllocationHistory | None
    """The allocations of a training run; None: too many."""
    live_history: LiveHistory | None
    """Every change of the live memory; None: too many."""
    operations: Sequence[OperationCount]
    """The operations of the step before it, which is the same step."""
    host_memory: HostMemory | None
    """None: the host is the device."""


def other_sharder(found: str) -> RecordingError:
    """The refusal of a model with another sharder; `found` names both."""
    return RecordingError(
        f"{found}. A forecast requires a model that is sharded with "
        "torch.distributed.fsdp.fully_shard (FSDP2). Record a run instead."
    )


def track_step(  # noqa: PLR0915 - one pass over one step
    target: ForecastTarget, *, has_host: bool, report: Callable[[str], None]
) -> TrackedStep:
    """Run two steps of a target and follow every storage through the second.

    Args:
        target: The model and step to run.
        has_host: Whether the device differs from the host, so that offloaded tensors are on the
            host.
        report: Receives what runs now, in a few words.

    Raises:
        RecordingError: The model is not sharded with `fully_shard`.
        ForecastError: The step could not be tracked; the message has the reason.
    """
    sharder = find_sharder(target.model)
    if not isinstance(sharder, Fsdp2):
        raise other_sharder(f"{type(target.model).__name__} uses {sharder.title}")
    groups = ProcessGroups()
    sharder.register_groups(groups)
    session = Session(HostClock(), _forget, groups, Source.PREDICTED, active_emulation())
    session.explicit_steps = True
    rows: list[tuple[int, ...]] = []
    logs: list[StorageLog] = []
    kept: list[tuple[list[LiveMoment], LiveHistory | None]] = []
    probe = MemoryProbe(session, rows.append, None)
    offloaded = [
        index for index, handle in enumerate(sharder.units) if fsdp2.offloads_to_cpu(handle.group)
    ]
    memory_steps = MemorySteps(
        session,
        rows.append,
        target.model,
        sharder.units,
        (TRACKED_STEP,),
        device_type=sharder.device.type,
        host_units=offloaded if has_host else (),
        keep=lambda *known: kept.append(known),
        keep_log=logs.append,
    )
    memory_steps.plan(0)

    def optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
        memory_steps.name_optimizer_states(optimizer)
        probe.sample(MemoryPoint.OPTIMIZER_END)

    optimizers = None if target.optimizer is None else [target.optimizer]
    instruments = Instruments(session, sharder, probe, optimizers, optimizer_stepped)
    instruments.attach()
    counter = OperationCounter(lambda: (session.issuing_unit(), session.phase.label))
    try:
        for number in range(TRACKED_STEP + 1):
            report(f"step {number + 1} of {TRACKED_STEP + 1}")
            if number == TRACKED_STEP:
                gc.collect()  # garbage of the step before it does not count
            session.in_step = True
            session.open_step()
            memory_steps.begin()
            with counter if number < TRACKED_STEP else nullcontext():
                target.step()
            probe.sample(MemoryPoint.STEP_END)
            memory_steps.end()
            session.in_step = False
            session.end_step()
            instruments.end_step()
    finally:
        memory_steps.abandon()
        instruments.detach()
    if not rows:
        raise ForecastError(
            f"The step could not be tracked: {' '.join(session.problems) or 'it never ran'} "
            "Expected FSDP units that run a forward and a backward. Check the builder's step()."
        )
    order = {unit: place for place, unit in enumerate(session.execution_order)}
    units = [
        unit.model_copy(update={"execution_index": order.get(unit.index, -1)})
        for unit in sharder.describe_units(groups)
    ]
    return TrackedStep(
        model=describe_model(target.model, sharder.units),
        units=units,
        process_groups=groups.describe(),
        mesh=sharder.mesh(),
        plan=observe_plan(target.model).to_dict(),
        observed=observe_settings(
            target.model,
            memory_steps.optimizers,
            session.loss_dtype,
            session.inputs,
            skips_reduction=session.skips_reduction,
        ),
        notes=(
            *((_OFFLOADED if has_host else _OFFLOADED_ON_CPU,) if offloaded else ()),
            *counter.notes(),
        ),
        rows=rows,
        moments=[moment for moments, _ in kept for moment in moments],
        history=build_history(logs[0]),
        live_history=kept[-1][1] if kept else None,
        operations=list(counter.counts()),
        host_memory=count_host_memory(target.model, sharder, target.optimizer)
        if has_host
        else None,
    )


def _forget(row: tuple[int, ...]) -> None:
    """Drop a row of times, which mean nothing on fake tensors."""


# --- Count the tensors of a rank that a forecast expects on the host.


def count_host_memory(
    model: nn.Module, sharder: Fsdp2, optimizer: torch.optim.Optimizer | None
) -> HostMemory:
    """Count a rank's offloaded tensors after a step, and the model before it was sharded.

    Args:
        model: The sharded model.
        sharder: Its units.
        optimizer: After its first step; None: its state is not counted.
    """
    groups = [each.group for each in sharder.units if fsdp2.offloads_to_cpu(each.group)]
    whole = chain(model.parameters(), model.buffers())
    return HostMemory(
        offloaded_bytes=sum(
            numel * param.element_size()
            + (_num_bytes([local_part(param)]) if param.requires_grad else 0)
            + (0 if optimizer is None else _num_bytes(_states(optimizer, param)))
            for group in groups
            for param, numel in zip(
                fsdp2.sharded_parameters_of(group),
                fsdp2.padded_shard_numels(group),
                strict=True,
            )
        ),
        whole_model_bytes=_num_bytes(whole),  # a DTensor has the size of the whole parameter
    )


def _states(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Iterable[torch.Tensor]:
    values = optimizer.state.get(param, {}).values()
    return (local_part(value) for value in values if isinstance(value, torch.Tensor))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- Count the operations and the kernels of a step, by unit and phase, while it runs.
#
# `torch.utils.flop_counter` has a formula for each operator that multiplies matrices. It counts
# causal attention whole; here, the masked half is left out. Other operators count no operations. A
# formula that fails counts none either, and a note names the operator: torch 2.11's formula for
# attention rejects fewer key heads than query heads.

_LAUNCHES_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active."""

    supports_higher_order_operators = True

    def __init__(self, find_place: Callable[[], tuple[int, str]]) -> None:
        """`find_place` returns the running unit (-1: none) and the phase."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._find_place = find_place
        self._failed: dict[str, str] = {}
        self._counts: defaultdict[tuple[int, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let regions compile while operations are counted."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count it."""
        if func is DEVICE_QUERY:
            return device_of_fake(args[0])
        named = dict(kwargs or {})
        result = func(*args, **named)
        if not _is_kernel(func):
            return result
        unit, phase = self._find_place()
        whole = self._count_whole(func, args, named, result)
        run = whole // 2 if whole and _is_causal(func, args, named) else whole
        count = self._counts[unit, phase, _itemsize(result)]
        for place, amount in enumerate((run, whole, 1)):
            count[place] += amount
        return result

    def _count_whole(
        self, func: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any
    ) -> int:
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            return 0
        try:
            return int(formula(*args, **named, out_val=result))
        except Exception as error:  # a count is no reason to end the forecast
            self._failed.setdefault(func.overloadpacket.__name__, type(error).__name__)
            return 0

    def notes(self) -> list[str]:
        """A sentence for each operator whose operations are missing from the counts."""
        return [
            f"The operations of `{name}` are not counted: the formula of torch "
            f"{torch.__version__} failed with {error}. Its kernels are counted."
            for name, error in sorted(self._failed.items())
        ]

    def counts(self) -> Iterator[OperationCount]:
        """The counts so far, by unit, phase and width."""
        for (unit, phase, itemsize), (run, whole, kernels) in sorted(self._counts.items()):
            yield OperationCount(
                unit=unit, phase=phase, itemsize=itemsize, run=run, whole=whole, kernels=kernels
            )


@functools.cache
def _is_kernel(func: Any) -> bool:
    """Whether an operator computes: it is no view, and no allocation."""
    schema = schema_of(func)
    if schema is None or func.overloadpacket.__name__ in _LAUNCHES_NOTHING:
        return False
    aliases = [each.alias_info for each in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def _itemsize(result: Any) -> int:
    """Bytes of an element of the first result; 0: no tensor."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    return first.dtype.itemsize if isinstance(first, torch.Tensor) else 0
