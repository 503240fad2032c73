"""Share tests out to the workers of pytest-xdist, and keep the machine quiet for some of them.

Tests that use the same expensive fixture form a group, which one worker runs from start to end:
the tests of one file, all browser tests, and all tests that ask for a fixture of `SHARED_FIXTURES`.
Long groups start first. A test marked `serial` runs while no other worker runs a test.

The groups do not use `--dist loadgroup`: xdist 3.8 writes the group into a private attribute of a
test that pytest 9.2 no longer reads. Instead, each worker writes the groups to a shared folder.
"""

import fcntl
import json
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
_INPUT = "fsdp_inspect_shared"
_GROUPS = "groups.json"


class Scheduling:
    """The hooks of one pytest process, which is the controller or one of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._shared: Path | None = None
        if hasattr(config, "workerinput"):
            self._shared = Path(config.workerinput[_INPUT])
        elif config.getoption("numprocesses", None):
            self._made = tempfile.TemporaryDirectory(prefix="fsdp-inspect-tests-")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Reject a path that does not exist before workers start, as pytest does without xdist."""
        config = session.config
        if self._made is None or config.option.pyargs:
            return
        for argument in config.args:
            if not (config.invocation_params.dir / argument.split("::")[0]).exists():
                raise pytest.UsageError(f"file or directory not found: {argument}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where the shared folder is."""
        assert self._made is not None
        node.workerinput[_INPUT] = self._made.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Hand out whole groups, in the order in which the workers collected them."""
        from xdist.scheduler import LoadScopeScheduling

        assert self._made is not None
        groups_file = Path(self._made.name) / _GROUPS

        class GroupScheduling(LoadScopeScheduling):
            def schedule(self) -> None:
                self.groups = json.loads(groups_file.read_text())
                super().schedule()

            def _split_scope(self, nodeid: str) -> str:
                return str(self.groups[nodeid])

        config.option.loadscopereorder = False
        return GroupScheduling(config, log)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Start long groups first, and tell the controller the group of each test."""
        if self._shared is None:
            return
        groups = {item.nodeid: group_of(item) for item in items}
        ranks: dict[str, int] = {}
        for item in items:
            group = groups[item.nodeid]
            ranks[group] = min(ranks.get(group, len(_LONG_FIRST)), _rank_of(item))
        items.sort(key=lambda item: ranks[groups[item.nodeid]])
        written = self._shared / f"{_GROUPS}.{os.getpid()}"
        written.write_text(json.dumps(groups))
        written.replace(self._shared / _GROUPS)  # all workers write the same

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Hold the lock of a test, from its setup to its teardown."""
        if self._shared is None:
            return (yield)
        with locked(self._shared, alone=item.get_closest_marker("serial") is not None):
            return (yield)

    def pytest_unconfigure(self) -> None:
        """Remove the shared folder."""
        if self._made is not None:
            self._made.cleanup()


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
