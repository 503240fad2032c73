"""List the faults with the class, ranks, unit and line of a right diagnosis."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.diagnosis.diagnose import ProblemClass

P = ProblemClass
SCRIPTS = {"mlp": "faulty_training", "llama": "faulty_training"}
"""The script of each model or loop; the others are loops of `faulty_loops`."""
LOOPS = ("trainer", "torchtitan")
MODELS = (*SCRIPTS, *LOOPS)
IN_STEPS = frozenset(
    {
        *("swallowed", "hook", "frozen", "accumulation", "not-a-number", "no-sync", "clip"),
        *("healthy", "two-groups", "full", "update", "evaluate", "save", "worker-killed"),
        *("memory-first", "memory-optimizer", "memory-evaluation"),
    }
)
"""Faults of the loop in `faulty_steps`."""
NOT_IN_LOOPS = IN_STEPS | {"data", "data-worker", "uneven", "memory-hoard", "memory-batch", "dtype"}
"""Faults of the data, the batch or the loop, which a hook of a module does not reach."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of a right diagnosis."""

    classes: tuple[ProblemClass, ...]
    line: str
    """The marker of the culprit's line; empty: any line, or none."""
    unit: str | None = None
    """Name of the unit; None: any."""
    has_culprit: bool = True
    """Whether the faulty rank is the culprit; False: no rank is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one training."""

    fault: str
    model: str
    num_ranks: int
    rank: int
    step: int

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.fault}, {self.model}, rank {self.rank} of {self.num_ranks}, step {self.step}"

    @property
    def expected(self) -> Expected:
        """The content of a right diagnosis."""
        return EXPECTED[self.fault]

    @property
    def script(self) -> Path:
        """The training script."""
        name = SCRIPTS.get(self.model, "faulty_loops")
        if self.fault in IN_STEPS:
            name = "faulty_steps"
        return Path(__file__).with_name(f"{name}.py")

    @property
    def expected_line(self) -> int | None:
        """The line of the culprit; None: any."""
        marker = self.expected.line
        if self.model == "llama":
            marker = {"order": "llama", "batch": "tokens", "forward": "call"}.get(marker, marker)
        elif marker == "forward":
            marker = "order"
        if not marker or (self.model in LOOPS and marker == "order"):
            return None
        own, shared = line_of(marker, self.script), line_of(marker, FAULTS_FILE)
        return own if own is not None else shared


_ORDER = Expected((P.ORDER_DIVERGED,), "order")
EXPECTED: dict[str, Expected] = {
    "skip-equal": _ORDER,
    "skip-other": _ORDER,
    "repeat": _ORDER,
    "swap-equal": _ORDER,
    "swap-other": _ORDER,
    "branch": _ORDER,
    "dtype": Expected((P.SIZE_MISMATCH,), ""),
    "user-size": Expected((P.SIZE_MISMATCH, P.ORDER_DIVERGED), "user"),
    "foreign": Expected((P.ORDER_DIVERGED,), "foreign"),
    "foreign-absent": Expected((P.FOREIGN_COLLECTIVE,), "absent"),
    "foreign-hidden": Expected((P.FOREIGN_COLLECTIVE,), "hidden", has_culprit=False),
    "data": Expected((P.RANK_LATE,), "data"),
    "data-worker": Expected((P.RANK_LATE,), "loop"),
    "checkpoint": Expected((P.RANK_LATE,), "checkpoint"),
    "evaluation": Expected((P.RANK_LATE,), "evaluation"),
    "breakpoint": Expected((P.RANK_LATE,), "breakpoint"),
    "handler": Expected((P.RANK_LATE,), "handler"),
    "child": Expected((P.RANK_LATE,), "child"),
    "lock": Expected((P.HOST_DEADLOCK,), "lock"),
    "native": Expected((P.RANK_LATE,), ""),
    "native-thread": Expected((P.RANK_LATE,), ""),
    "stopped": Expected((P.RANK_LATE,), ""),
    "uneven": Expected((P.UNEVEN_BATCHES,), ""),
    "exception": Expected((P.RANK_DIED,), ""),
    "exception-late": Expected((P.RANK_DIED, P.RANK_LATE), ""),
    "exception-own": Expected((P.RANK_DIED,), "own"),
    "memory": Expected((P.OUT_OF_MEMORY,), ""),
    "memory-hoard": Expected((P.OUT_OF_MEMORY,), "hoard"),
    "memory-batch": Expected((P.OUT_OF_MEMORY,), "batch"),
    "segmentation": Expected((P.RANK_DIED,), "segmentation"),
    "abort": Expected((P.RANK_DIED,), "abort"),
    "vanish": Expected((P.RANK_DIED,), ""),
    "killed": Expected((P.RANK_DIED,), ""),
    "leave": Expected((P.RANK_EXITED_EARLY,), ""),
    "garbage": Expected((P.RANK_LATE,), "garbage"),
    "pages": Expected((P.RANK_LATE,), "pages"),
    "barrier": Expected((P.ORDER_DIVERGED,), "barrier"),
    "object": Expected((P.ORDER_DIVERGED,), "object"),
    "queue": Expected((P.HOST_DEADLOCK,), "queue"),
    "file": Expected((P.RANK_LATE,), "file"),
    "interrupt": Expected((P.RANK_DIED,), ""),
    "swallowed": _ORDER,
    "hook": Expected((P.RANK_LATE,), "hook"),
    "frozen": Expected((P.ORDER_DIVERGED,), "backward"),
    "accumulation": Expected((P.ORDER_DIVERGED,), "forward"),
    "not-a-number": _ORDER,
    "no-sync": Expected((P.ORDER_DIVERGED,), "backward"),
    "clip": Expected((P.ORDER_DIVERGED,), "clip"),
    "update": Expected((P.ORDER_DIVERGED,), "forward"),
    "two-groups": Expected((P.FOREIGN_COLLECTIVE, P.ORDER_DIVERGED), ""),
    "full": Expected((P.ORDER_DIVERGED,), "full"),
    "evaluate": _ORDER,
    "save": Expected((P.ORDER_DIVERGED, P.SIZE_MISMATCH), "", has_culprit=False),
    "worker-killed": Expected((P.RANK_DIED,), ""),
    "memory-first": Expected((P.OUT_OF_MEMORY,), "batch"),
    "memory-optimizer": Expected((P.OUT_OF_MEMORY,), "optimizer"),
    "memory-evaluation": Expected((P.OUT_OF_MEMORY,), "batch"),
    "all-slow": Expected((P.SLOW_BUT_ALIVE,), "slow", has_culprit=False),
    "all-lock": Expected((P.HOST_DEADLOCK,), "lock", has_culprit=False),
}


FAULTS_FILE = Path(__file__).with_name("faulty_training.py")


def make_cases(number: int, seed: int, models: Sequence[str]) -> Iterator[Case]:
    """Cases in a fixed order: each fault in turn, with other ranks, models and steps.

    Args:
        number: The number of cases.
        seed: The seed of the choices.
        models: The models and loops to choose from, of `MODELS`.
    """
    choose = random.Random(seed)
    known = [name for name in EXPECTED if set(models) - set(LOOPS) or name not in NOT_IN_LOOPS]
    for at in range(number):
        fault = known[at % len(known)]
        num_ranks = choose.choice((2, 3, 3, 4, 4, 8))
        yield Case(
            fault=fault,
            model=choose.choice(
                [name for name in models if name not in LOOPS or fault not in NOT_IN_LOOPS]
            ),
            num_ranks=num_ranks,
            rank=choose.randrange(num_ranks),
            step=choose.randint(3, 6),
        )


def line_of(marker: str, script: Path) -> int | None:
    """The number of the line with the comment `# fault: MARKER`; None if it is missing."""
    lines = script.read_text().split("\n")
    return next(
        (at for at, line in enumerate(lines, 1) if line.endswith(f"# fault: {marker}")), None
    )
