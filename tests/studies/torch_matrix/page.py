"""Write docs/versions.md from the results of `make torch-matrix`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.formatting import format_bytes
from tests.studies.torch_matrix.measure import Result
from tests.studies.torch_matrix.setups import NUM_RANKS, SETUPS

_MOST_FAILURES = 20
_HEADER = """\
# Versions of torch

`make torch-matrix` writes this page, and CI runs it every night. Each version has a virtual
environment of its own. Every cell is measured on CPU, with {ranks} gloo ranks on one machine
({machine}). Nothing on this page ran on a GPU, also where torch is a CUDA build.

## Recordings

Each set-up trains a small model of four units twice, without and with the recorder. A cell shows
the recorded collectives of all ranks and their bytes, in {steps} steps, or in {ddp_steps} steps of
DDP, which begin with the first and contain the two broadcasts of its new buckets. "equal" means:

- The losses of both trainings are identical to the last bit on every rank.
- torch.profiler saw in the same steps the same number of collectives, with the same bytes.
- The recorder named the units and noted no problem.

The last column states the comparison with torch.profiler. "unit": each unit, with the bytes of each
message. "kind": each kind of collective, because the trace names no units there. A trace of gloo
lacks the sizes of FSDP1's all-gathers, so only their number is compared.

"""
_TESTS = """
## Tests

The tests of the recorder, of its access to torch's private names, and of the forecast
(`tests/recording`, `tests/emulation/forecast`), without the exhaustive ones. A test that needs a
newer torch is skipped, with the version in its reason.

| torch | build | Python | passed | failed | skipped |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class CountedTests:
    """The outcome of a test run."""

    passed: int
    failed: tuple[str, ...]
    skipped: int


@dataclass(frozen=True)
class Version:
    """The results with one version of torch."""

    torch: str
    build: str
    python: str
    machine: str
    setups: tuple[Result, ...]
    tests: CountedTests

    @property
    def is_green(self) -> bool:
        """Whether every set-up is equal and no test failed."""
        return not self.tests.failed and not any(each.differences for each in self.setups)


def read_tests(path: Path) -> CountedTests:
    """Read pytest's JUnit file."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None]
    failed += [each for each in cases if each.find("error") is not None]
    skipped = sum(each.find("skipped") is not None for each in cases)
    names = tuple(f"{each.get('classname')}.{each.get('name')}".lstrip(".") for each in failed)
    return CountedTests(len(cases) - len(failed) - skipped, names, skipped)


def read_version(folder: Path) -> Version:
    """Read the results of one version."""
    facts = json.loads((folder / "facts.json").read_text())
    setups = json.loads((folder / "setups.json").read_text())
    return Version(
        **facts,
        setups=tuple(Result(**each) for each in setups),
        tests=read_tests(folder / "tests.xml"),
    )


def render(versions: list[Version]) -> str:
    """The page, in Markdown."""
    text = _HEADER.format(
        ranks=NUM_RANKS,
        machine="; ".join(dict.fromkeys(each.machine for each in versions)),
        steps=len(SETUPS["plain"].profiled_steps),
        ddp_steps=len(SETUPS["ddp"].profiled_steps),
    )
    text += f"| set-up | {' | '.join(f'torch {each.torch}' for each in versions)} | compared by |\n"
    text += f"|---|{'---|' * len(versions)}---|\n"
    for place, setup in enumerate(SETUPS.values()):
        cells = " | ".join(_cell(each.setups[place]) for each in versions)
        text += f"| {setup.title} | {cells} | {setup.compared_by} |\n"
    text += _TESTS
    for each in versions:
        tests = each.tests
        counts = f"{tests.passed:,} | {len(tests.failed):,} | {tests.skipped:,}"
        text += f"| {each.torch} | {each.build} | {each.python} | {counts} |\n"
    return text + "".join(map(_details, versions))


def _cell(result: Result) -> str:
    state = "**differs**" if result.differences else "equal"
    return f"{result.num_collectives:,}, {format_bytes(result.num_bytes)}: {state}"


def _details(version: Version) -> str:
    if version.is_green:
        return ""
    lines = [f"- {each.name}: {text}" for each in version.setups for text in each.differences]
    lines += [f"- {name} failed" for name in version.tests.failed]
    rest = len(lines) - _MOST_FAILURES
    more = [f"- and {rest:,} more"] if rest > 0 else []
    return "\n".join(
        [f"\n## What differs with torch {version.torch}\n", *lines[:_MOST_FAILURES], *more, ""]
    )
