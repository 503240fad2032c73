"""Run every loop with and without a planted mistake, and print the table of docs/figures.md.

python -m tests.distributed.correctness_table [FOLDER]

FOLDER keeps the runs; loops that it has already are not run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_inspect import open_run
from fsdp_inspect.analysis.correctness import TrainingCheck
from tests.distributed import (
    correctness_meshes,
    correctness_odd_loops,
    correctness_script,
    correctness_sharders,
    test_correctness,
)

NOT_FINITE = dict.fromkeys(("not-finite", "not-finite-at-the-end"), "Parameters are not finite.")


@dataclass(frozen=True)
class Suite:
    """A script with its loops, and the sentences that they must show."""

    script: str
    names: Iterable[str]
    expected: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 2


SUITES = (
    Suite(
        "correctness_script",
        correctness_script.LOOPS,
        {**test_correctness.MISTAKES, **NOT_FINITE, **test_correctness.NOTES},
    ),
    Suite(
        "correctness_sharders",
        correctness_sharders.LOOPS,
        {**correctness_sharders.MISTAKES, **correctness_sharders.NOTES},
    ),
    Suite("correctness_odd_loops", correctness_odd_loops.LOOPS),
    *(
        Suite(
            "correctness_meshes",
            names,
            {**correctness_meshes.MISTAKES, **correctness_meshes.NOTES},
            num_ranks=4,
        )
        for names in correctness_meshes.list_launches()
    ),
)


def run(suite: Suite, folder: Path) -> None:
    """Run the loops of a suite that the folder lacks."""
    missing = [name for name in suite.names if not (folder / name).exists()]
    if missing:
        script = Path(__file__).with_name(f"{suite.script}.py")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        subprocess.run(
            [*launch, str(suite.num_ranks), str(script), str(folder), *missing],
            check=True,
            env={
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def main(kept: str = "") -> None:
    """Print a row for each check, and one for the healthy loops of each script."""
    planted, named, healthy, alarms = (Counter[str]() for _ in range(4))
    with tempfile.TemporaryDirectory() as temporary:
        for suite in SUITES:
            folder = Path(kept or temporary) / suite.script
            run(suite, folder)
            for name in suite.names:
                seen = open_run(folder / name).correctness()
                found = [*seen.faults, *seen.notes]
                shown = " ".join(each.sentence for each in found)
                expected = suite.expected.get(name, "")
                if not expected:
                    healthy[suite.script] += 1
                    alarms[suite.script] += bool(found)
                else:
                    check = found[0].check.value if found else "not found"
                    planted[check] += 1
                    named[check] += shown == expected
                if shown != expected:
                    print(f"{suite.script}: {name}: {shown!r}, expected {expected!r}")
    print("| check | mistakes | named |\n|---|--:|--:|")
    for check in [*(each.value for each in TrainingCheck), "not found"]:
        if planted[check]:
            print(f"| {check} | {planted[check]} | {named[check]} |")
    print(f"| all | {planted.total()} | {named.total()} |")
    print("\n| healthy loops of | loops | false alarms |\n|---|--:|--:|")
    for script in dict.fromkeys(suite.script for suite in SUITES):
        count, wrong = healthy[script], alarms[script]
        print(f"| [{script}](../tests/distributed/{script}.py) | {count} | {wrong} |")
    print(f"| all | {healthy.total()} | {alarms.total()} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
