"""Run torch's own FSDP2 on virtual streams, which gives the true times of a step without noise.

`play_with_torch` runs the real `fully_shard` code of the installed torch over the virtual device
of `tests.recording.virtual_device`; `workload_of` describes the same step to the simulator. Any
difference between the two is a difference in the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_inspect.simulation.workload import (
    Microbatch,
    Op,
    Pass,
    Piece,
    Tape,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    reversed_tape,
    tape_of,
)
from fsdp_inspect.trace.codes import Phase
from tests.recording.virtual_device import VirtualDevice, VirtualStream, fsdp_on

ROOT = 0


@dataclass(frozen=True)
class Layer:
    """One block of the model, and the unit around it. Times in ns."""

    forward_ns: int
    backward_ns: int
    work: UnitWork
    policy: UnitPolicy = field(default_factory=UnitPolicy)
    launch_ns: int = 0


@dataclass(frozen=True)
class Move:
    """One forward or backward of a program; a program is any sequence of them."""

    kind: str
    """`forward` of the model, `no_grad` (a forward of it without a graph), `layer` (a direct call
    of a block, like a chunked loss calls the output layer), or `backward`."""
    blocks: tuple[int, ...] = ()
    """The blocks that a forward runs, numbered from 1."""
    graph: int = 0
    """The forward of a backward, by its index among the forwards without a backward."""


@dataclass(frozen=True)
class Case:
    """A model of blocks in a row inside a root, with a timed head that belongs to the root."""

    head: Layer
    layers: Sequence[Layer]
    input_needs_grad: bool = False
    max_reduce_buffers: int = 1
    separate_reduce_group: bool = False
    microbatches: Sequence[Microbatch] = (Microbatch(),)
    program: Sequence[Move] = ()
    """The program that replaces the microbatches."""

    @property
    def all(self) -> list[Layer]:
        """The layers by unit: the root, then the blocks."""
        return [self.head, *self.layers]


def workload_of(case: Case) -> Workload:
    """The case in the form of the simulator."""
    deferred = set() if case.input_needs_grad else {ROOT, 1}
    pieces = [
        Piece(unit, layer.forward_ns, layer.backward_ns, 0, layer.launch_ns, layer.launch_ns)
        for unit, layer in [*enumerate(case.layers, start=1), (ROOT, case.head)]
    ]
    return Workload(
        units=[
            replace(layer.work, ends_with_backward=unit in deferred)
            for unit, layer in enumerate(case.all)
        ],
        policies=[layer.policy for layer in case.all],
        pieces=pieces,
        passes=_program(case) or passes_of(tape_of(pieces, root=ROOT), case.microbatches),
        max_reduce_buffers=case.max_reduce_buffers,
        separate_reduce_group=case.separate_reduce_group,
    )


def _program(case: Case) -> tuple[Pass, ...]:
    """The passes of the case's program."""
    passes: list[Pass] = []
    graphs: list[Tape] = []
    for move in case.program:
        number = sum(not each.is_forward for each in passes)
        if move.kind == "backward":
            tape = reversed_tape(graphs.pop(move.graph))
            reduced = frozenset(unit for op, unit in tape if op is Op.ENTER)
            passes.append(Pass(Phase.BACKWARD, tape, number, reduces=reduced))
            continue
        tape = tuple(entry for unit in move.blocks for entry in _run(unit, unit - 1))
        if move.kind != "layer":
            head = len(case.layers)
            tape = ((Op.ENTER, ROOT), *tape, (Op.RUN, head), (Op.LEAVE, ROOT))
        keeps_graph = move.kind != "no_grad"
        if keeps_graph:
            graphs.append(tape)
        passes.append(Pass(Phase.FORWARD, tape, number, keeps_graph=keeps_graph))
    return tuple(passes)


def _run(unit: int, piece: int) -> Tape:
    return ((Op.ENTER, unit), (Op.RUN, piece), (Op.LEAVE, unit))


class OracleDevice(VirtualDevice):
    """A virtual device with a second communicator and kernels that launch one by one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduce_link_free_ns: int | None = None
        self.replica_link_free_ns = 0
        self.smaller_links_free_ns: dict[str, int] = {}

    def launch(self, kind: str, unit: str, duration_ns: int, launch_ns: int) -> None:
        """Launch many kernels of one piece; see [Note: launching] in `simulation.machine`."""
        stream: VirtualStream = self.current
        start = max(stream.free_ns, self.now_ns)
        self.now_ns += launch_ns
        stream.free_ns = max(start + duration_ns, self.now_ns)
        self._note(kind, unit, start, stream.free_ns)

    def reduce(self, unit: str, duration_ns: int) -> None:
        """Run a reduce-scatter, on a separate communicator if there is one."""
        if self.reduce_link_free_ns is None:
            self.transfer("reduce_scatter", unit, duration_ns)
            return
        start, end = self.current.run(duration_ns, self.reduce_link_free_ns)
        self.reduce_link_free_ns = end
        self._note("reduce_scatter", unit, start, end)

    def gather_in_smaller_group(self, unit: str, duration_ns: int) -> None:
        """Run an all-gather of a smaller group, on the unit's communicator for it."""
        start, end = self.current.run(duration_ns, self.smaller_links_free_ns.get(unit, 0))
        self.smaller_links_free_ns[unit] = end
        self._note("all_gather", unit, start, end)

    def all_reduce(self, unit: str, duration_ns: int) -> None:
        """Run HSDP's all-reduce on the communicator of the replicas."""
        start, end = self.current.run(duration_ns, self.replica_link_free_ns)
        self.replica_link_free_ns = end
        self._note("all_reduce", unit, start, end)


class _Gather(DefaultAllGather):
    def __init__(
        self, device: OracleDevice, unit: str, work: UnitWork, group: FSDPParamGroup
    ) -> None:
        self.device, self.unit, self.work, self.group = device, unit, work, group

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.device.spend(self.work.gather_launch_ns)
        copy_in_ns = self.work.copy_in_ns
        if self.group.is_sharded_post_forward:
            copy_in_ns = self.work.copy_in_backward_ns or 0
        self.device.run("all_gather_copy_in", self.unit, copy_in_ns)
        return super().allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.group.is_sharded_post_forward:
            duration = self.work.gather_backward_ns or 0
            self.device.gather_in_smaller_group(self.unit, duration)
        else:
            self.device.transfer("all_gather", self.unit, self.work.gather_ns)
        return super().__call__(*args, **kwargs)


class _Scatter(DefaultReduceScatter):
    def __init__(self, device: OracleDevice, unit: str, work: UnitWork) -> None:
        self.device, self.unit, self.work = device, unit, work

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.current is self.device.compute:  # the input; the output comes later
            self.device.spend(self.work.reduce_launch_ns)
            self.device.run("reduce_scatter_copy_in", self.unit, self.work.reduce_copy_in_ns)
        return super().allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.device.reduce(self.unit, self.work.reduce_ns)
        return super().__call__(*args, **kwargs)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: _Block) -> torch.Tensor:
        ctx.block = block
        layer = block.layer
        block.device.launch("forward", block.unit, layer.forward_ns, layer.launch_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer = ctx.block.layer
        ctx.block.device.launch("backward", ctx.block.unit, layer.backward_ns, layer.launch_ns)
        return gradients[0], None


class _Block(nn.Module):
    def __init__(self, device: OracleDevice, unit: str, layer: Layer) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.device, self.unit, self.layer = device, unit, layer
        self.requires_grad_(layer.work.is_trainable)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(self.linear(x), self)


class _Model(nn.Module):
    def __init__(self, device: OracleDevice, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _Block(device, f"layers.{i}", layer) for i, layer in enumerate(case.layers)
        )
        self.head = _Block(device, "", case.head)

    def forward(self, x: torch.Tensor, blocks: Sequence[int] | None = None) -> torch.Tensor:
        for layer in self.layers if blocks is None else [self.layers[i - 1] for i in blocks]:
            x = layer(x)
        return self.head(x)


def play_with_torch(case: Case, mesh: DeviceMesh, *, steps: int = 2) -> tuple[int, OracleDevice]:
    """Run steps with torch's own code; returns the duration of the last one, and its log (ns)."""
    device = OracleDevice()
    duration = 0
    with fsdp_on(device):
        model = _shard(_Model(device, case), case, device, mesh)
        for _ in range(steps):
            device.log.clear()
            start = max(device.compute.free_ns, device.now_ns)
            _run_program(model, case.program)
            for microbatch in () if case.program else case.microbatches:
                model.set_requires_gradient_sync(microbatch.reduces)
                model.set_requires_all_reduce(microbatch.all_reduces)
                model.set_is_last_backward(microbatch.finishes)
                x = torch.ones(1, 4, requires_grad=case.input_needs_grad)
                model(x).sum().backward()
            model.zero_grad()
            duration = max(device.compute.free_ns, device.now_ns) - start
    return duration, device


def _run_program(model: Any, program: Sequence[Move]) -> None:
    losses: list[torch.Tensor] = []
    for move in program:
        x = torch.ones(1, 4, requires_grad=True)
        if move.kind == "backward":
            losses.pop(move.graph).backward()
        elif move.kind == "no_grad":
            with torch.no_grad():
                model(x, move.blocks)
        elif move.kind == "layer":
            losses.append(model.layers[move.blocks[0] - 1](x).sum())
        else:
            losses.append(model(x, move.blocks).sum())


def _shard(model: _Model, case: Case, device: OracleDevice, mesh: DeviceMesh) -> Any:
    modules: list[Any] = [model, *model.layers]
    for module, layer in [*zip(modules[1:], case.layers, strict=True), (model, case.head)]:
        reshard = layer.policy.smaller_group or layer.policy.reshard_after_forward
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    for number, (module, layer) in enumerate(zip(modules, case.all, strict=True)):
        unit = f"layers.{number - 1}" if number else ""
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        _time_copies_of_shares(device, unit, layer.work, group)
        module.set_custom_all_gather(_Gather(device, unit, layer.work, group))
        module.set_custom_reduce_scatter(_Scatter(device, unit, layer.work))
        policy = layer.policy
        if mesh.ndim == 2:
            module.set_all_reduce_hook(_all_reduce_hook(device, unit, layer.work.all_reduce_ns))
        module.set_modules_to_forward_prefetch([modules[i] for i in policy.forward_prefetch])
        if policy.backward_prefetch is not None:
            module.set_modules_to_backward_prefetch([modules[i] for i in policy.backward_prefetch])
        module.set_reshard_after_backward(policy.reshard_after_backward, recurse=False)
        module.set_unshard_in_backward(policy.unshard_in_backward)
        module.set_reduce_scatter_max_input_buffers(case.max_reduce_buffers)
    if case.separate_reduce_group:
        model.set_separate_reduce_scatter_group(recurse=True)
        device.reduce_link_free_ns = 0
    return model


def _time_copies_of_shares(
    device: OracleDevice, unit: str, work: UnitWork, group: FSDPParamGroup
) -> None:
    """Log the copy of a smaller group's share on the compute stream."""
    copy = group._to_sharded_post_forward

    def timed() -> None:
        copy()
        device.run("reshard", unit, work.reshard_ns)

    group._to_sharded_post_forward = timed


def _all_reduce_hook(device: OracleDevice, unit: str, duration_ns: int) -> Any:
    return lambda reduced: device.all_reduce(unit, duration_ns)
