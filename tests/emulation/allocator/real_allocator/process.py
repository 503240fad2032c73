"""Talk to the program of `build.py`: torch's own allocator, which answers each event."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsdp_inspect.emulation.allocator.settings import AllocatorSettings
from tests.emulation.allocator.random_events import Event


class RealAllocator:
    """Torch's allocator with some settings, in a process of its own."""

    def __init__(self, program: Path, settings: AllocatorSettings) -> None:
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings.text}
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        environment["LD_LIBRARY_PATH"] = str(program.parent)
        if settings.device_bytes is not None:
            environment["FAKE_CUDA_BYTES"] = str(settings.device_bytes)
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def answers(self, events: Iterable[Event]) -> list[str]:
        """The answers to events, without the amount that expandable segments do not count."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        found = []
        for event in events:
            self._process.stdin.write(" ".join(map(str, event)) + "\n")
            self._process.stdin.flush()
            found.append(self._process.stdout.readline().strip().rpartition(" ")[0] or "full")
        return found

    def snapshot(self) -> dict[str, Any]:
        """The snapshot of all events so far, in torch's form."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("s\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found
