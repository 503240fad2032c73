"""An fsspec file system in memory that works, fails, hangs or is slow, as a test demands."""

import threading
import time
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

URL = "faulty://bucket/runs"


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """Its state is the class's, because fsspec creates the instances."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    mode: ClassVar[str] = "works"
    released: ClassVar[threading.Event] = threading.Event()
    num_writes: ClassVar[int] = 0

    @classmethod
    def reset(cls) -> None:
        """An empty store that works. Hanging requests end."""
        cls.released.set()
        cls.released = threading.Event()
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.mode, cls.num_writes = "works", 0

    @classmethod
    def set_mode(cls, mode: str) -> None:
        """Set the mode: works, fails, hangs, slow, or denied."""
        cls.mode = mode
        cls.released.set()
        cls.released = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("faulty://").strip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        released = FaultyStore.released
        if FaultyStore.mode == "hangs":
            released.wait()
            raise ConnectionError("the connection was lost")
        if FaultyStore.mode == "fails":
            raise ConnectionError("cannot connect")
        if FaultyStore.mode == "denied":
            raise PermissionError("Access Denied")
        if FaultyStore.mode == "full":
            raise OSError(28, "No space left on device")
        if FaultyStore.mode == "slow":
            time.sleep(0.05)
        FaultyStore.num_writes += 1
        super().pipe_file(path, value, mode=mode, **options)


def register() -> None:
    """Make `faulty://` known to fsspec in this process."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.reset()
