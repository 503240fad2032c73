"""Sample a few parameters and their gradients around the updates, without waiting for the device.

Samples show whether replicas agree, whether the gradients of all ranks were combined, by what
factor a rank scaled them before its update, and whether the update changed what is stored. Sampled
are the updates of the first steps, and of the steps that look at all parameters.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.accumulation_watch import rate_on_host
from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.recording.torch_api.optimizers import updated_tensors
from fsdp_inspect.recording.value_watch import EVERY, Recording
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.correctness import BufferSeen, ParameterSeen, UpdateSeen

_PARAMETERS = 8
_OUTSIDE = 3
"""Of these, at most so many parameters of no unit, if there are others."""
_VALUES = 64
"""Values of each parameter, evenly spaced."""
_UPDATES = 8
_BACKWARDS = 16
"""Without an update until then, the parameters are sampled all the same."""
_BUFFERS = 8
_LATER = 3
"""The sampled update before which the buffers are read again."""
_LOOKS = 4
"""Further updates, in steps that look at all parameters: the last ones are kept."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCE = 0.02
"""Factors of one rank's gradients that differ by less are one factor, in bfloat16 too."""
_EXACT_KEYS = ("master", "param", "comp", "shift")
"""Parts of the names of optimizer states that keep what rounding takes from a parameter."""


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """The unit of a parameter, and this rank's place among the ranks that hold it."""

    unit: int = NO_UNIT
    part: tuple[int, ...] = ()
    is_replica: bool = False
    divide_factor: float | None = None
    """See `ParameterSeen.divide_factor`."""


class ParameterSamples:
    """The samples of one rank.

    Args:
        session: The recording.
        model: The recorded model, or models.
        late: Hands over values of the device.
        places: Returns the place of each parameter of a unit, by the parameter's id.
    """

    def __init__(
        self,
        session: Recording,
        model: nn.Module,
        late: LateValues,
        places: Callable[[], Mapping[int, ShardPlace]],
    ) -> None:
        self._session = session
        self._model = model
        self._late = late
        self._places = places
        self._chosen: list[nn.Parameter] = []
        self._buffers: list[tuple[str, torch.Tensor]] = []
        self._changed: set[str] = set()
        """The buffers that have changed."""
        self.parameters: list[ParameterSeen] = []
        self.updates: list[UpdateSeen] = []
        self.buffers: list[BufferSeen] = []
        self.backward_place = ""
        self.num_noted = 0
        """The updates that were noted."""
        self.last_digests: list[int] = []
        """See `LateSeen.digests`."""
        self.began_digests: list[int] = []
        """See `LateSeen.began`."""
        self._num_updates = self._num_backwards = 0
        self._last: list[torch.Tensor | None] = []
        """The gradients after the last backward, as far as they have arrived."""
        self._first: Sequence[NDArray[np.float64] | None] = ()
        """The sampled values before the first sampled update. A memory step would count tensors."""
        self._finish: Callable[[list[torch.Tensor | None]], None] | None = None
        """Takes the parameters after the sampled update that runs."""
        self._keep: Callable[[list[torch.Tensor | None]], None] | None = None
        """Takes the gradients of that update."""

    @property
    def have_changed(self) -> bool:
        """Whether the sampled values differ between updates."""
        return len({tuple(each.digests) for each in self.updates}) > 1

    def is_sampled(self) -> bool:
        """Whether the values around the next update are sampled."""
        session = self._session
        # In backward, an optimizer of one parameter finds other units gathered.
        if session.tracker is not None or session.in_backward:
            return False
        return self._num_updates < _UPDATES or (session.step > 0 and session.step % EVERY == 0)

    def after_backward(self) -> None:
        """Sample the gradients that a backward left.

        A closure of the optimizer runs it inside the update, which uses these gradients.
        """
        if self._finish is not None and self._keep is not None:
            self._last = []  # what scales them before they are used is not seen
            self._read([each.grad for each in self._chosen], self._keep)
        elif self._num_updates and self._chosen and self.is_sampled():
            self.backward_place = find_calling_line(sys._getframe(1))
            self._read([each.grad for each in self._chosen], self._keep_gradients)
        elif self._num_updates == 0 and self._session.tracker is None:
            self._num_backwards += 1
            if self._num_backwards == _BACKWARDS:
                self._begin_without_update()

    def _begin_without_update(self) -> None:
        """Sample the parameters of a training that has updated none until now."""
        self._choose()

        def keep(values: list[torch.Tensor | None]) -> None:
            self.began_digests = [0 if each is None else _digest(each) for each in values]

        self._read(self._chosen, keep)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Sample the gradients that an optimizer receives, and the parameters."""
        if not self.is_sampled():
            return
        if not self._chosen:
            self._choose()
        if not self._chosen:
            return
        self._num_updates += 1
        if self._num_updates in (1, 1 + _LATER) or self._num_updates > _UPDATES:
            self._see_buffers(is_first=self._num_updates == 1)
        step, chosen = self._session.step, {id(each) for each in self._chosen}
        rate = _rate_of(optimizer, chosen)
        own = {id(each) for each in updated_tensors(optimizer)}
        updated = [id(each) in own for each in self._chosen]
        held: dict[str, list[torch.Tensor | None]] = {}

        def keep_gradients(gradients: list[torch.Tensor | None]) -> None:
            held["gradients"] = gradients

        def keep_values(values: list[torch.Tensor | None]) -> None:
            held["values"] = values

        def finish(after: list[torch.Tensor | None]) -> None:
            new = [each if is_own else None for each, is_own in zip(after, updated, strict=True)]
            self._note(step, rate, held["gradients"], held["values"], new)

        self._finish, self._keep = finish, keep_gradients
        self._read([each.grad for each in self._chosen], keep_gradients)
        self._read(self._chosen, keep_values)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Sample the parameters that an optimizer has updated."""
        finish, self._finish, self._keep = self._finish, None, None
        if finish is None:
            return
        if not any(each.keeps_copy for each in self.parameters):
            self._note_copies(optimizer)
        self._read(self._chosen, finish)

    def look_again(self) -> None:
        """Sample the values at the end."""

        def keep(values: list[torch.Tensor | None]) -> None:
            self.last_digests = [0 if each is None else _digest(each) for each in values]

        if self._num_updates > _LATER:
            self._see_buffers(is_first=False)
        self._read(self._chosen, keep)

    # --- the choice

    def _choose(self) -> None:
        """Choose parameters with a gradient: a few of no unit, then of different units."""
        names: dict[int, str] = {}
        by_unit: dict[int, list[nn.Parameter]] = {}
        places = self._places()
        for name, each in self._model.named_parameters():
            if each.requires_grad and each.grad is not None and each.dtype in _DTYPES:
                names[id(each)] = name
                place = places.get(id(each))
                by_unit.setdefault(NO_UNIT if place is None else place.unit, []).append(each)
        outside = by_unit.pop(NO_UNIT, [])
        of_units = [max(each, key=torch.Tensor.numel) for each in by_unit.values()]
        of_units += [each[0] for each in by_unit.values() if len(each) > 1]
        chosen = _spread(outside, _OUTSIDE if of_units else _PARAMETERS)
        chosen += _spread(of_units, _PARAMETERS - len(chosen))
        self._chosen = list({id(each): each for each in chosen}.values())
        for each in self._chosen:
            place = places.get(id(each)) or ShardPlace()
            part, is_replica = place.part, place.is_replica
            if isinstance(each, DTensor):
                part, is_replica = _place_in_mesh(each)
            self.parameters.append(
                ParameterSeen(
                    name=names[id(each)],
                    unit=place.unit,
                    part=list(part),
                    is_replica=is_replica,
                    dtype=str(each.dtype).removeprefix("torch."),
                    divide_factor=place.divide_factor,
                )
            )

    def _note_copies(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters of which the optimizer keeps more than is stored."""
        is_random = bool(getattr(optimizer, "bf16_stochastic_round", False))
        for at, each in enumerate(self._chosen):
            keys = [str(key).lower() for key in optimizer.state.get(each, {})]
            if is_random or any(part in key for key in keys for part in _EXACT_KEYS):
                known = {"keeps_copy": True}
                self.parameters[at] = self.parameters[at].model_copy(update=known)

    # --- the buffers

    def _see_buffers(self, *, is_first: bool) -> None:
        """Sample the buffers, which may differ between ranks if a loop changes them."""
        if is_first:
            found = [
                (name, each)
                for name, each in self._model.named_buffers()
                if each.dtype in _DTYPES and each.numel() > 1
            ]
            self._buffers = found[:_BUFFERS]

        def keep(values: list[torch.Tensor | None]) -> None:
            digests = [0 if each is None else _digest(each) for each in values]
            if is_first:
                names = [name for name, _ in self._buffers]
                self.buffers = [
                    BufferSeen(name=name, digest=digest)
                    for name, digest in zip(names, digests, strict=True)
                ]
                return
            for at, (each, digest) in enumerate(zip(self.buffers, digests, strict=True)):
                if each.digest != digest or not digest:
                    self._changed.add(each.name)
                known = {"is_constant": each.name not in self._changed}
                self.buffers[at] = each.model_copy(update=known)

        if self._buffers:
            self._read([each for _, each in self._buffers], keep)

    # --- the samples

    @torch.no_grad()
    def _read(
        self,
        tensors: Sequence[torch.Tensor | None],
        keep: Callable[[list[torch.Tensor | None]], None],
    ) -> None:
        parts = [None if each is None else _sample(each) for each in tensors]
        known = [each for each in parts if each is not None]
        if not known:
            keep([None] * len(parts))
            return
        sizes = [0 if each is None else each.numel() for each in parts]

        def split(values: torch.Tensor) -> None:
            pieces = iter(torch.split(values.double(), [size for size in sizes if size]))
            keep([next(pieces) if size else None for size in sizes])

        self._late.read(torch.cat(known), split)

    def _keep_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        self._last = gradients

    def _note(
        self,
        step: int,
        rate: float,
        gradients: Sequence[torch.Tensor | None],
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
    ) -> None:
        lost = meant = still = 0
        self._first = self._first or [
            each if each is None else each.numpy().copy() for each in before
        ]
        for gradient, first, old, new in zip(gradients, self._first, before, after, strict=True):
            if gradient is not None and old is not None and new is not None:
                is_meant = (gradient != 0) & torch.isfinite(gradient)
                meant += int(is_meant.sum())
                lost += int((is_meant & (old == new)).sum())
                still += (
                    0 if first is None else int((is_meant & (torch.from_numpy(first) == new)).sum())
                )
        seen = UpdateSeen(
            step=step,
            rate=rate,
            factor=_factor(self._last, gradients),
            gradients=[_norm(each) for each in gradients],
            values=[_norm(each) for each in before],
            weighted=[_weigh(each) for each in gradients],
            weighted_before=[_weigh(each) for each in self._last],
            digests=[0 if each is None else _digest(each) for each in before],
            num_meant=meant,
            num_lost=lost,
            num_still=still,
        )
        self._last = []
        self.num_noted += 1
        self.updates.append(seen)
        del self.updates[_UPDATES : max(_UPDATES, len(self.updates) - _LOOKS)]


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Values at even distances, as float32; None if reading them would copy the whole tensor."""
    local = local_part(tensor).detach()
    is_readable = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    if not is_readable or not local.is_contiguous():
        return None
    size = local.numel()
    return local.view(-1)[:: max(size // _VALUES, 1)][:_VALUES].float() if size else None


def _spread(found: Sequence[nn.Parameter], most: int) -> list[nn.Parameter]:
    """At most so many of them, from the whole sequence."""
    if len(found) <= most:
        return list(found)
    return [found[at * (len(found) - 1) // max(most - 1, 1)] for at in range(most)]


def _place_in_mesh(parameter: DTensor) -> tuple[tuple[int, ...], bool]:
    """The coordinates that decide which part a rank holds, and whether others hold it too."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    part, is_replica = [], False
    for at, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            is_replica |= mesh.size(at) > 1
        else:
            part.append(coordinate[at])
    return tuple(part), is_replica


def _rate_of(optimizer: torch.optim.Optimizer, chosen: set[int]) -> float:
    """The largest learning rate of the groups with a sampled parameter; 0: not known on the host.

    Args:
        optimizer: The optimizer.
        chosen: The sampled parameters, by their id.
    """
    rates = [
        group.get("lr")
        for group in optimizer.param_groups
        if any(id(each) in chosen for each in group["params"])
    ]
    known = [rate_on_host(rate) for rate in rates]
    return max((rate for rate in known if rate is not None), default=0.0)


def _norm(values: torch.Tensor | None) -> float | None:
    """The norm of a sample; None: without one, or not finite."""
    norm = math.nan if values is None else float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else None


def _weigh(values: torch.Tensor | None) -> float | None:
    """A weighted sum of a sample; None: without one, or not finite.

    The weights differ, because the plain sum of some gradients is 0.
    """
    if values is None:
        return None
    weights = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
    found = float(values @ weights)
    return found if math.isfinite(found) else None


def _digest(values: torch.Tensor) -> int:
    return zlib.crc32(values.numpy().tobytes())


def _factor(
    before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
) -> float | None:
    """The one factor between two samples of the gradients; None: there is none."""
    ratios = list(_ratios(before, after))
    if not ratios:
        return None
    every = torch.cat(ratios)
    middle = float(every.median())
    is_one = bool(((every - middle).abs() <= _TOLERANCE * abs(middle)).all())
    return middle if is_one and math.isfinite(middle) else None


def _ratios(
    before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    for one, other in zip(before, after, strict=False):
        if one is not None and other is not None and one.shape == other.shape:
            is_known = one != 0
            if bool(is_known.any()):
                yield other[is_known] / one[is_known]


def places_of(
    units: Sequence[Any], handles: Sequence[Any], ranks_of: Mapping[int, Sequence[int]], rank: int
) -> dict[int, ShardPlace]:
    """The place of each parameter of the units, by the parameter's id.

    Args:
        units: The descriptions of the units.
        handles: The units, in the same order.
        ranks_of: The ranks of this rank's process groups, by index.
        rank: This rank.
    """
    found: dict[int, ShardPlace] = {}
    for index, (unit, handle) in enumerate(zip(units, handles, strict=True)):
        group = ranks_of.get(unit.shard_group, ())
        place = ShardPlace(
            index,
            (list(group).index(rank),) if rank in group else (),
            is_replica=len(ranks_of.get(unit.replicate_group, ())) > 1,
            divide_factor=getattr(handle.key, "gradient_divide_factor", None),  # of FSDP2
        )
        found |= {id(each): place for each in handle.local_parameters}
    return found
