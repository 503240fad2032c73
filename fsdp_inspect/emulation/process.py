"""How does one process become rank 0 of N? A fake process group, links, the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.emulation.collectives import Collectives
from fsdp_inspect.emulation.network import EmulatedNetwork, Transfer
from fsdp_inspect.emulation.specification import Specification
from fsdp_inspect.emulation.unit_waits import UnitWaits
from fsdp_inspect.emulation.wires import SpinningDevice
from fsdp_inspect.errors import EmulationError
from fsdp_inspect.sharding.attributes import set_attribute
from fsdp_inspect.sharding.torch_collectives import ArgumentPicker

_active: Emulation | None = None


class Emulation:
    """What runs in this process in place of a network; see `emulate`."""

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.undo = ExitStack()
        """What is taken back when the emulation ends."""
        self.settings: dict[str, Any] = {}
        """What else a reader of the recording must know, such as fixed computing times."""
        network = EmulatedNetwork(specification)
        self.waits = UnitWaits(network)
        self._collectives = Collectives(network, self.waits, self.spinning_device)
        self._spinning: dict[torch.device, SpinningDevice] = {}
        self.notes: list[str] = []
        """What limits the emulation, one sentence each."""
        self._take_note: Callable[[str], None] | None = None

    def attach(self) -> None:
        """Replace what torch has, until the emulation ends."""
        self.waits.attach(self.undo)
        self._collectives.attach(self.undo)

    def take_transfer(self) -> Transfer | None:
        """The transfer of the collective that was issued last, once; None: its times are unknown.

        On CUDA they are: the device keeps them, and events on its streams measure them.
        """
        transfer, self._collectives.last_transfer = self._collectives.last_transfer, None
        return transfer

    def spinning_device(self, device: torch.device) -> SpinningDevice:
        """Keeps streams of a CUDA device busy; made at the first call for the device."""
        spinning = self._spinning.get(device)
        if spinning is None:
            spinning = self._spinning[device] = SpinningDevice(device, self.note)
        return spinning

    def note(self, sentence: str) -> None:
        """Say what limits the emulation; a recording puts it into its run folder."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        if self._take_note is not None:
            self._take_note(sentence)

    def send_notes(self, take: Callable[[str], None]) -> None:
        """Send every note, earlier and later ones, to the recording that is attached now."""
        self._take_note = take
        for sentence in self.notes:
            take(sentence)

    def describe(self) -> dict[str, Any]:
        """As `run.json` keeps it."""
        return {**self.specification.to_dict(), **self.settings}


def active_emulation() -> Emulation | None:
    """The emulation that this process runs under; None: it is a real rank."""
    return _active


@contextmanager
def emulate(specification: Specification) -> Iterator[Emulation]:
    """The block runs as rank 0 of N ranks, of which the others do not exist.

    `init_process_group` makes torch's fake process group whatever backend it is asked for, and so
    does `new_group`; `RANK`, `WORLD_SIZE` and their kin say what torchrun would.

    Raises:
        EmulationError: This process has a process group already, or is one of several ranks.
    """
    global _active
    _expect_alone(specification)
    emulation = Emulation(specification)
    with emulation.undo as undo:
        emulation.attach()
        _replace_process_groups(undo, specification)
        _set_environment(undo, specification)
        _active = emulation
        undo.callback(_deactivate)
        yield emulation


def _deactivate() -> None:
    global _active
    _active = None


def _expect_alone(specification: Specification) -> None:
    if _active is not None or dist.is_initialized():
        raise EmulationError(
            "This process has a process group already. Expected none: emulation replaces it. "
            "Begin to emulate before init_process_group."
        )
    real = int(os.environ.get("WORLD_SIZE", "1"))
    if real > 1:
        raise EmulationError(
            f"This process is one of {real} real ranks. Expected a single process, which stands "
            f"for rank 0 of {specification.world_size}. Start it with python, not with torchrun."
        )


def _replace_process_groups(undo: ExitStack, specification: Specification) -> None:
    initialise, create = c10d.init_process_group, c10d.new_group
    for module in (dist, c10d, device_mesh):
        undo.callback(
            set_attribute(module, "init_process_group", _fake_init(initialise, specification))
        )
        undo.callback(set_attribute(module, "new_group", _fake_new_group(create)))


def _fake_init(original: Callable[..., Any], specification: Specification) -> Callable[..., Any]:
    pick = ArgumentPicker(original).pick

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        asked = pick("world_size", args, kwargs)
        if asked not in (None, -1, specification.world_size):
            raise EmulationError(
                f"The script asks for a world size of {asked}, and {specification.world_size} "
                "ranks are emulated. Expected the same number, or none (it is in WORLD_SIZE). "
                f"Emulate world_size={asked}."
            )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        original("fake", store=FakeStore(), rank=0, world_size=specification.world_size)

    return init_process_group


def _fake_new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    pick = ArgumentPicker(original).pick

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return original(
            ranks=pick("ranks", args, kwargs), group_desc=pick("group_desc", args, kwargs)
        )

    return new_group


def _set_environment(undo: ExitStack, specification: Specification) -> None:
    world_size = specification.world_size
    on_node = min(specification.gpus_per_node, world_size)
    values = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": on_node,
        "GROUP_WORLD_SIZE": -(-world_size // on_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    before = {name: os.environ.get(name) for name in values}

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    os.environ.update({name: str(value) for name, value in values.items()})
    undo.callback(restore)
