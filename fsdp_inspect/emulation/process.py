"""Turn one process into rank 0 of N: a fake process group, emulated links, the environment."""

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

from fsdp_inspect.emulation.collectives import Collectives, SpinningDevice
from fsdp_inspect.emulation.network import EmulatedNetwork, Specification
from fsdp_inspect.emulation.unit_waits import UnitWaits
from fsdp_inspect.errors import EmulationError
from fsdp_inspect.recording import emulated_network
from fsdp_inspect.recording.emulated_network import Transfer, announce_emulation
from fsdp_inspect.recording.torch_api.attributes import set_attribute
from fsdp_inspect.recording.torch_api.c10d import ArgumentPicker


class Emulation:
    """The emulated network of this process; see `emulate`."""

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.undo = ExitStack()
        """Undoes every change when the emulation ends."""
        self.settings: dict[str, Any] = {}
        """Other settings to store with a recording, such as fixed compute times."""
        network = EmulatedNetwork(specification)
        self.waits = UnitWaits(network)
        self._collectives = Collectives(network, self.waits, self.spinning_device)
        self._spinning: dict[torch.device, SpinningDevice] = {}
        self.notes: list[str] = []
        """Limits of the emulation, one sentence each."""
        self._take_note: Callable[[str], None] | None = None

    def attach(self) -> None:
        """Replace torch's functions until the emulation ends."""
        self.waits.attach(self.undo)
        self._collectives.attach(self.undo)

    def take_transfer(self) -> Transfer | None:
        """The transfer of the last issued collective, once; None if its times are unknown.

        On CUDA they are unknown to the host: events on the device's streams measure them.
        """
        transfer, self._collectives.last_transfer = self._collectives.last_transfer, None
        return transfer

    def spinning_device(self, device: torch.device) -> SpinningDevice:
        """Return the object that keeps streams of a CUDA device busy. The first call creates it."""
        spinning = self._spinning.get(device)
        if spinning is None:
            spinning = self._spinning[device] = SpinningDevice(device, self.note)
        return spinning

    def note(self, sentence: str) -> None:
        """Report a limit of the emulation; a recording stores it in its run folder."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        if self._take_note is not None:
            self._take_note(sentence)

    def send_notes(self, take: Callable[[str], None]) -> None:
        """Send every note, earlier and later ones, to the attached recording."""
        self._take_note = take
        for sentence in self.notes:
            take(sentence)

    def describe(self) -> dict[str, Any]:
        """The representation in `run.json`."""
        return {**self.specification.to_dict(), **self.settings}


def active_emulation() -> Emulation | None:
    """The emulation of this process; None on a real rank."""
    found = emulated_network.announced_emulation()
    return found if isinstance(found, Emulation) else None


@contextmanager
def emulate(specification: Specification) -> Iterator[Emulation]:
    """Run the block as rank 0 of N ranks; the other ranks do not exist.

    `init_process_group` and `new_group` create torch's fake process group, whatever backend the
    script requests. `RANK`, `WORLD_SIZE` and related variables have the values of torchrun.

    Raises:
        EmulationError: This process already has a process group, or is one of several ranks.
    """
    _expect_alone(specification)
    emulation = Emulation(specification)
    with emulation.undo as undo:
        emulation.attach()
        _replace_process_groups(undo, specification)
        _set_environment(undo, specification)
        announce_emulation(emulation)
        undo.callback(announce_emulation, None)
        yield emulation


def _expect_alone(specification: Specification) -> None:
    if active_emulation() is not None or dist.is_initialized():
        raise EmulationError(
            "This process already has a process group. Expected none: emulation replaces it. "
            "Start the emulation before init_process_group."
        )
    real = int(os.environ.get("WORLD_SIZE", "1"))
    if real > 1:
        raise EmulationError(
            f"This process is one of {real} real ranks. Expected a single process, which runs as "
            f"rank 0 of {specification.world_size}. Start it with python, not with torchrun."
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
                f"The script requests a world size of {asked}, but {specification.world_size} "
                "ranks are emulated. Expected the same number, or none (WORLD_SIZE has it). "
                f"Emulate world_size={asked}."
            )
        from fsdp_inspect.recording.torch_api.fake_ranks import FakeStore

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
