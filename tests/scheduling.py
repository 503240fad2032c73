"""Share tests out to the workers of pytest-xdist, and keep the machine quiet for some of them.

Tests that use the same expensive fixture form a group, which one worker runs from start to end:
the tests of one file, all browser tests, and all tests that ask for a fixture of `SHARED_FIXTURES`.
Long groups start first. A test marked `serial` runs while no other worker runs a test.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SHARED_FIXTURES = ("tuned",)
"""Session fixtures that take long to make and that tests of several files use."""
_LONG_FIRST = ("browser", "distributed", "slow")
"""Markers of tests that take long. The groups of these tests start before all others."""
_INPUT = "fsdp_inspect_locks"


class Scheduling:
    """The hooks of one pytest process, which is the controller or one of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._locks: Path | None = None
        if hasattr(config, "workerinput"):
            self._locks = Path(config.workerinput[_INPUT])
        elif config.getoption("numprocesses", None):
            self._folder = tempfile.TemporaryDirectory(prefix="fsdp-inspect-tests-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where the locks are."""
        assert self._folder is not None
        node.workerinput[_INPUT] = self._folder.name

    @pytest.hookimpl(tryfirst=True)  # before xdist, which writes the group into the name
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Name the group of each test; start long groups first. Every worker sees one order."""
        if not config.pluginmanager.hasplugin("xdist"):
            return
        ranks: dict[str, int] = {}
        for item in items:
            group = group_of(item)
            item.add_marker(pytest.mark.xdist_group(group))
            ranks[group] = min(ranks.get(group, len(_LONG_FIRST)), _rank_of(item))
        if self._locks is not None:
            items.sort(key=lambda item: ranks[group_of(item)])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Hold the lock of a test, from its setup to its teardown."""
        if self._locks is None:
            return (yield)
        with locked(self._locks, alone=item.get_closest_marker("serial") is not None):
            return (yield)

    def pytest_unconfigure(self) -> None:
        """Remove the locks."""
        if self._folder is not None:
            self._folder.cleanup()


def group_of(item: pytest.Item) -> str:
    """The name of the tests that run in the same worker as this one."""
    if item.get_closest_marker("browser"):
        return "browser"
    for name in SHARED_FIXTURES:
        if name in getattr(item, "fixturenames", ()):
            return name
    return item.nodeid.split("::")[0]


def _rank_of(item: pytest.Item) -> int:
    """Index of the first of its markers in `_LONG_FIRST`; their number where it has none."""
    markers = {marker.name for marker in item.iter_markers()}
    return next(
        (rank for rank, name in enumerate(_LONG_FIRST) if name in markers), len(_LONG_FIRST)
    )


@contextmanager
def locked(folder: Path, *, alone: bool) -> Iterator[None]:
    """Share the machine with the other workers for a test, or have it alone.

    Each test holds `running`: exclusively to be alone, otherwise shared. Each worker waits for
    `running` behind `door`, so a test that must be alone is not overtaken by later ones.
    """
    with _opened(folder / "door") as door, _opened(folder / "running") as running:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file to lock. The lock is released even if a forked child still has the file open."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
