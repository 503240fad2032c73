"""The faults, with the class, the ranks, the unit and the line that a right diagnosis names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_inspect.diagnosis.diagnose import ProblemClass
from tests.faults.faulty_training import line_of

P = ProblemClass


@dataclass(frozen=True, slots=True)
class Expected:
    """What a right diagnosis says."""

    classes: tuple[ProblemClass, ...]
    line: str
    """Marker of the line of the culprit; empty: any, or none."""
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
        """What a right diagnosis says."""
        return EXPECTED[self.fault]

    @property
    def expected_line(self) -> int | None:
        """The line of the culprit; None: any."""
        marker = self.expected.line
        if self.model == "llama":
            marker = {"order": "llama", "batch": "tokens"}.get(marker, marker)
        return line_of(marker) if marker else None


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
    "stopped": Expected((P.RANK_LATE,), ""),
    "uneven": Expected((P.UNEVEN_BATCHES,), ""),
    "exception": Expected((P.RANK_DIED,), ""),
    "memory": Expected((P.OUT_OF_MEMORY,), ""),
    "memory-hoard": Expected((P.OUT_OF_MEMORY,), "hoard"),
    "memory-batch": Expected((P.OUT_OF_MEMORY,), "batch"),
    "segmentation": Expected((P.RANK_DIED,), "segmentation"),
    "abort": Expected((P.RANK_DIED,), "abort"),
    "vanish": Expected((P.RANK_DIED,), ""),
    "killed": Expected((P.RANK_DIED,), ""),
    "leave": Expected((P.RANK_EXITED_EARLY,), ""),
    "all-slow": Expected((P.SLOW_BUT_ALIVE,), "slow", has_culprit=False),
    "all-lock": Expected((P.HOST_DEADLOCK,), "lock", has_culprit=False),
}


def make_cases(number: int, seed: int) -> Iterator[Case]:
    """Cases in a fixed order: each fault in turn, with other ranks, models and steps."""
    choose = random.Random(seed)
    names = list(EXPECTED)
    for at in range(number):
        num_ranks = choose.choice((2, 3, 3, 4, 4, 8))
        yield Case(
            fault=names[at % len(names)],
            model=choose.choice(("mlp", "mlp", "llama")),
            num_ranks=num_ranks,
            rank=choose.randrange(num_ranks),
            step=choose.randint(3, 6),
        )
