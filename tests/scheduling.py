"""Distribute tests to the workers of pytest-xdist.

Tests that use the same expensive fixture form a group, which one worker runs from start to end: the
tests of one file, and all tests with a fixture of `SHARED_FIXTURES`. The browser tests form two
groups: those on runs of every state, and the others. Long groups start first.

The groups do not use `--dist loadgroup`: xdist 3.8 writes the group into a private attribute of a
test that pytest 9.2 no longer reads. Instead, each worker writes the groups to a shared folder.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

SHARED_FIXTURES = ("tuned", "ask")
"""Slow session fixtures that tests of several files use."""
_STATES_FIXTURE = "states_server"
"""The fixture of the browser tests that form a separate group: about half of them."""
_LONG_FIRST = ("browser", "distributed", "slow")
"""Markers of slow tests. The groups of these tests start before all others."""
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
        """Pass the path of the shared folder to a worker."""
        assert self._made is not None
        node.workerinput[_INPUT] = self._made.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Distribute whole groups, in the order in which the workers collected them."""
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
        """Start long groups first, and give the controller the group of each test."""
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
        written.replace(self._shared / _GROUPS)  # all workers write the same content

    def pytest_unconfigure(self) -> None:
        """Remove the shared folder."""
        if self._made is not None:
            self._made.cleanup()


def group_of(item: pytest.Item) -> str:
    """The name of the tests that run in the same worker as this one."""
    fixtures = getattr(item, "fixturenames", ())
    if item.get_closest_marker("browser"):
        return "browser, every state" if _STATES_FIXTURE in fixtures else "browser"
    for name in SHARED_FIXTURES:
        if name in fixtures:
            return name
    return item.nodeid.split("::")[0]


def _rank_of(item: pytest.Item) -> int:
    """Index of the test's first marker in `_LONG_FIRST`, or the length of `_LONG_FIRST`."""
    markers = {marker.name for marker in item.iter_markers()}
    return next(
        (rank for rank, name in enumerate(_LONG_FIRST) if name in markers), len(_LONG_FIRST)
    )
