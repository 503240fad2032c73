"""Observe the values of a model in the numerics steps: finite or not, norms, lost updates.

A numerics step only reads: outputs, gradients, optimizer states and parameters. Results stay on the
device until the end of the step, which then waits for it once. During the optimizer's update, the
rank holds a copy of its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.tensors import local_values, strided_parts, tensors_in
from fsdp_inspect.recording.torch_api.optimizers import updated_tensors
from fsdp_inspect.recording.torch_api.overrides import call_unseen
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.numerics import (
    NumericsStep,
    Observation,
    Place,
    Update,
    encode_step,
)

if TYPE_CHECKING:
    from fsdp_inspect.recording.units import UnitHandle
    from fsdp_inspect.trace.run import TableOrigin

_MASTER_KEYS = ("master", "param")
"""Parts of the names of optimizer states that keep a copy of the parameter in higher precision."""


@dataclass(slots=True)
class _Seen:
    """Values of one unit at one place, as tensors on the device."""

    order: int
    count: int = 0
    non_finite: list[torch.Tensor] = field(default_factory=list)
    largest: list[torch.Tensor] = field(default_factory=list)
    squared_norms: list[torch.Tensor] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)

    @property
    def numbers(self) -> tuple[list[torch.Tensor], ...]:
        """The tensors in the order of `Observation`."""
        return self.non_finite, self.largest, self.squared_norms


@dataclass(slots=True)
class _Changed:
    """The changes that the optimizer made in one unit, as tensors on the device."""

    meant: list[torch.Tensor] = field(default_factory=list)
    lost: list[torch.Tensor] = field(default_factory=list)
    squared_changes: list[torch.Tensor] = field(default_factory=list)

    @property
    def numbers(self) -> tuple[list[torch.Tensor], ...]:
        """The tensors in the order of `Update`."""
        return self.meant, self.lost, self.squared_changes


class StepObserver:
    """The observations of the numerics step that runs; one object per step.

    An error ends the observations, never the training: see `problem`.
    """

    def __init__(
        self, step: int, handles: Sequence[UnitHandle], *, keeps_copies: bool = True
    ) -> None:
        """Look at the parameters before the step's first forward.

        Without copies, lost updates are not counted.
        """
        self._step = step
        self._keeps_copies = keeps_copies
        self.problem: Exception | None = None
        self._seen: dict[tuple[int, Place], _Seen] = {}
        self._changed: dict[int, _Changed] = {}
        self._before: dict[int, torch.Tensor | None] = {}
        self._unit_of: dict[int, int] = {}
        for index, handle in enumerate(handles):
            parameters = handle.local_parameters
            self._unit_of |= {id(parameter): index for parameter in parameters}
            self._see(index, Place.PARAMETER, parameters)

    def outputs(self, output: Any, unit: int) -> None:
        """Look at the output of a unit's forward, a tree of tensors."""
        self._guarded(lambda: self._see(unit, Place.OUTPUT, tensors_in(output)))

    def gradients(self, handle: UnitHandle, unit: int) -> None:
        """Look at the unsharded gradients of a unit, before their reduction."""
        self._guarded(lambda: self._see(unit, Place.GRADIENT, handle.full_gradients))

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that an optimizer receives, and keep the parameters."""
        self._guarded(lambda: self._before_update(optimizer))

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the changes that an optimizer made, and at its states."""
        self._guarded(lambda: self._after_update(optimizer))

    def _guarded(self, look: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                call_unseen(look)
            except Exception as error:  # such as out of memory; the training continues
                raise_if_of_signal(error)
                self.problem = error
                self._before.clear()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in updated_tensors(optimizer):
            # An optimizer may step another one with the same tensors.
            if parameter.grad is not None and id(parameter) not in self._before:
                unit = self._unit_of.get(id(parameter), NO_UNIT)
                self._see(unit, Place.REDUCED_GRADIENT, [parameter.grad])
                copy = local_values(parameter).clone() if self._keeps_copies else None
                self._before[id(parameter)] = copy

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        frozen, decayed = _with(optimizer, "lr", 0.0), _with(optimizer, "weight_decay", 0.0)
        is_random = bool(getattr(optimizer, "bf16_stochastic_round", False))
        for parameter in updated_tensors(optimizer):
            if id(parameter) not in self._before:
                continue
            before = self._before.pop(id(parameter))
            unit = self._unit_of.get(id(parameter), NO_UNIT)
            states = optimizer.state.get(parameter, {})
            held = {
                key: each
                for key, each in states.items()
                if torch.is_tensor(each) and each.dim() > 0
            }
            self._see(unit, Place.STATE, held.values())
            self._see(unit, Place.UPDATED_PARAMETER, [parameter])
            has_master = any(part in str(key).lower() for key in held for part in _MASTER_KEYS)
            is_exact = has_master or is_random or id(parameter) in frozen
            if before is not None and not is_exact:
                decays = id(parameter) not in decayed
                gradient = parameter.grad
                sources = [gradient, *held.values(), before if decays else None]
                if gradient is not None and gradient.is_sparse:
                    sources = [gradient]  # optimizers update the rows with a gradient only
                known = [each for each in sources if each is not None]
                self._compare(unit, parameter, before, known)

    def encode(self, origin: TableOrigin | None) -> bytes:
        """The line of the step, with its recording; waits once for each device."""
        parts: list[_Seen | _Changed] = [*self._seen.values(), *self._changed.values()]
        values = iter(_read([numbers for part in parts for numbers in part.numbers]))
        observations = tuple(
            Observation(
                unit,
                place,
                one.order,
                one.count,
                int(sum(next(values))),
                _finite(next(values), max),
                _finite(next(values), math.fsum),
                tuple(sorted(one.dtypes)),
            )
            for (unit, place), one in self._seen.items()
        )
        updates = tuple(
            Update(
                unit,
                int(sum(next(values))),
                int(sum(next(values))),
                _finite(next(values), math.fsum),
            )
            for unit in self._changed
        )
        step = NumericsStep(self._step, observations, updates)
        return encode_step(step, None if origin is None else origin.model_dump())

    @torch.no_grad()
    def _see(self, unit: int, place: Place, tensors: Any) -> None:
        for tensor in tensors:
            local = strided_parts(local_values(tensor))[-1]
            if not local.is_floating_point() or local.numel() == 0:
                continue
            seen = self._seen.setdefault((unit, place), _Seen(order=len(self._seen)))
            seen.count += local.numel()
            seen.dtypes.add(str(local.dtype).removeprefix("torch."))
            seen.non_finite.append(local.numel() - torch.isfinite(local).sum())
            seen.largest.append(local.abs().max().float())
            seen.squared_norms.append(_squared_norm(local))

    @torch.no_grad()
    def _compare(
        self,
        unit: int,
        parameter: torch.Tensor,
        before: torch.Tensor,
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Count the intended updates of a parameter, and the lost ones.

        An update of an element is intended if a source of its update is not zero: the gradient, a
        state such as the momentum, or with weight decay the element itself.
        """
        after = local_values(parameter)
        meant = torch.zeros_like(after, dtype=torch.bool)
        for local in map(local_values, sources):
            local = local.to_dense() if local.is_sparse else local
            if local.shape == after.shape and local.is_floating_point():
                meant |= local != 0
        changed = self._changed.setdefault(unit, _Changed())
        changed.meant.append(meant.sum())
        changed.lost.append((meant & (after == before)).sum())
        changed.squared_changes.append(_squared_norm(after.float() - before.float()))


def _with(optimizer: torch.optim.Optimizer, setting: str, value: float) -> set[int]:
    """The parameters, by id, whose group has this value of a setting, or lacks the setting."""
    return {
        id(parameter)
        for group in optimizer.param_groups
        if float(group.get(setting, value)) == value
        for parameter in group["params"]
    }


def _squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm * norm


def _read(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[float]]:
    """The values of groups of 0-d tensors; waits once for each device."""
    flat = [tensor for group in groups for tensor in group]
    found: dict[int, float] = {}
    for device in {tensor.device for tensor in flat}:
        places = [at for at, tensor in enumerate(flat) if tensor.device == device]
        stacked = torch.stack([flat[at].double() for at in places])
        found |= dict(zip(places, stacked.tolist(), strict=True))
    values = (found[at] for at in range(len(flat)))
    return [[next(values) for _ in group] for group in groups]


def _finite(values: Sequence[float], combine: Callable[[Sequence[float]], float]) -> float | None:
    """The combined values; None if one is not finite."""
    combined = combine(values) if all(map(math.isfinite, values)) else math.nan
    return combined if math.isfinite(combined) else None
