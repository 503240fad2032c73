"""Read the process groups of device meshes, and the store of the default group."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed import ProcessGroup, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> Any:
    """The store of the default process group.

    Raises:
        ValueError: No process group is initialized.
    """
    return distributed_c10d._get_default_store()


def is_live_process_group(group: ProcessGroup) -> bool:
    """Whether a process group exists: `destroy_process_group` was not called since it was made."""
    return group in distributed_c10d._world.pg_map


def name_mesh_dimensions(
    meshes: Iterable[DeviceMesh],
) -> dict[str, tuple[ProcessGroup, str]]:
    """The process groups of named mesh dimensions, with the dimension's name.

    It covers all dimensions of the meshes that the given meshes were sliced from, and their
    flattened dimensions. Dimensions of one rank, and meshes without this rank, are left out. If
    dimensions share a process group, their names are joined. If meshes are equal, the first one
    counts, because DTensor keeps the mesh of an earlier model with the same layout.

    Args:
        meshes: In the same order on every rank.

    Returns:
        The groups by name, in the order of the meshes.
    """
    found: dict[str, tuple[ProcessGroup, str]] = {}
    for mesh in dict.fromkeys(mesh for held in meshes for mesh in _with_flattened(held)):
        if mesh.get_coordinate() is None:
            continue
        for place, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(place) > 1:
                group = mesh.get_group(place)
                before = found.get(group.group_name, (group, ""))[1]
                names = dict.fromkeys([*filter(None, before.split(", ")), name])
                found[group.group_name] = (group, ", ".join(names))
    return found


def _with_flattened(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The mesh that a mesh was sliced from, and its flattened dimensions."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
        flattened = getattr(root, "_flatten_mapping", {})
        return [root, *flattened.values()]
    # torch 2.9 keeps the relations of equal meshes in one object, also of destroyed process groups.
    relations: Any = device_mesh._mesh_resources
    root = relations.get_root_mesh(mesh)
    related = [root, *relations.root_to_flatten_mapping.get(root, {}).values()]
    existing = set(distributed_c10d._world.pg_names.values())
    return [*(each for each in related if existing.issuperset(each._dim_group_names)), mesh]


def mesh_dimension_of(group: ProcessGroup) -> str:
    """The name of a process group's dimension in its `DeviceMesh`; empty if it has none.

    `DeviceMesh` (torch 2.13) describes the group of its dimension `tp` as `mesh_tp`, and that of
    its second unnamed dimension as `mesh_dim_1`.
    """
    name = group.group_desc.removeprefix("mesh_")
    is_named = name != group.group_desc and name != "default" and not name.startswith("dim_")
    return name if is_named else ""


def release_process_groups() -> None:
    """Release every process group that a device mesh still holds; the groups are destroyed already.

    In torch 2.13 DTensor's caches keep the mesh of a sharded model, and with it the groups, after
    `destroy_process_group` and after the model and the optimizer are gone. A gloo group that exists
    at the interpreter's shutdown sometimes ends the process with SIGABRT: its threads then drop the
    tensors of the last collective (pytorch issue 190489). If nothing refers to a group, it waits
    for its threads and ends them. Models that still exist, for example in the frames of an error,
    keep their groups.
    """
    for mesh in [held for held in gc.get_objects() if type(held) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
    gc.collect()


# --- Call a key-value store whose server may not answer.

ANSWER_S = 5.0
"""The time that a call waits for its answer. With a thousand ranks on one server, a call takes less
than 1 s."""


class StoreClient:
    """Calls a process group's store in a thread; the caller waits for a limited time.

    One rank may be the server of the store. If that rank is stopped, a call of torch's store has
    no end and no timeout.
    """

    def __init__(self, store: Any, answer_s: float | None = None) -> None:
        """Start the thread of the calls.

        Args:
            store: A clone of the process group's store that only this object uses.
            answer_s: The time that a call waits, seconds; None: `ANSWER_S`.
        """
        self._store = store
        self._answer_s = ANSWER_S if answer_s is None else answer_s
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._is_lost = False
        threading.Thread(target=self._work, name="fsdp-inspect-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value. Raises as `get`."""
        value: int = self._call(lambda: self._store.add(key, amount))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist. Raises as `get`."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """The value of a key that exists.

        Raises:
            RuntimeError: The store does not answer, now or in an earlier call.
        """
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key. Raises as `get`."""
        self._call(lambda: self._store.set(key, value))

    def _call(self, call: Callable[[], Any]) -> Any:
        if self._is_lost:
            raise RuntimeError("an earlier call had no answer")
        self._calls.put(call)
        try:
            answer, error = self._answers.get(timeout=self._answer_s)
        except queue.Empty:
            self._is_lost = True
            raise RuntimeError(f"no answer within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return answer

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                answer, error = call(), None
            except Exception as raised:
                answer, error = None, raised
            self._answers.put((answer, error))
