"""List the faults with the class, ranks, unit and line of a right diagnosis."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.diagnosis.diagnose import ProblemClass
from tests.studies.faults.faulty_setups import EPOCH

P = ProblemClass
SCRIPTS = {"mlp": "faulty_training", "llama": "faulty_training"}
"""The script of each model or loop; the others are loops of `faulty_loops`, or set-ups."""
LOOPS = ("trainer", "torchtitan")
MODELS = (*SCRIPTS, *LOOPS)
SHARDED = ("fsdp2", "fsdp1", "hsdp", "tp", "accumulation", "moe")
SETUPS = (*SHARDED, "ddp", "accelerate", "lightning")
"""The set-ups of `faulty_setups`."""
EVEN_SETUPS = ("hsdp", "tp")
"""Set-ups that need an even number of ranks, 4 or more."""
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
    setups: tuple[str, ...] = ()
    """The set-ups of `faulty_setups` with this fault; empty: the fault is one of another script."""
    options: tuple[str, ...] = ()
    """Further options of the recorder's launcher."""
    steps: int | None = None
    """The number of steps; None: that of the script."""
    continues_s: float = 1.0
    """The time that the ranks continue after the report, which the other ranks print too."""
    limit_s: float = 400.0
    """The time after which the ranks are ended; a standstill before the first step prints nothing.
    """
    has_agent: bool = False
    """Whether a real `torchrun` starts, restarts and ends the ranks."""


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
        return (IN_SETUPS if self.model in SETUPS else EXPECTED)[self.fault]

    @property
    def script(self) -> Path:
        """The training script."""
        name = SCRIPTS.get(self.model, "faulty_loops")
        if self.model in SETUPS:
            name = "faulty_setups"
        elif self.fault in IN_STEPS:
            name = "faulty_steps"
        return Path(__file__).with_name(f"{name}.py")

    @property
    def expected_line(self) -> int | None:
        """The line of the culprit; None: any."""
        marker = self.expected.line
        if self.model == "moe" and marker == "order":
            marker = "expert"
        elif self.model == "llama":
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
    "not-a-number": Expected((P.ORDER_DIVERGED,), "backward"),
    "no-sync": Expected((P.ORDER_DIVERGED,), "backward"),
    "clip": Expected((P.ORDER_DIVERGED,), "clip"),
    "update": Expected((P.ORDER_DIVERGED,), "forward"),
    "two-groups": Expected((P.FOREIGN_COLLECTIVE, P.ORDER_DIVERGED), ""),
    "full": Expected((P.ORDER_DIVERGED,), "full"),
    "evaluate": Expected((P.ORDER_DIVERGED,), "evaluate"),
    "save": Expected((P.ORDER_DIVERGED, P.SIZE_MISMATCH), "", has_culprit=False),
    "worker-killed": Expected((P.RANK_DIED,), ""),
    "memory-first": Expected((P.OUT_OF_MEMORY,), "batch"),
    "memory-optimizer": Expected((P.OUT_OF_MEMORY,), "optimizer"),
    "memory-evaluation": Expected((P.OUT_OF_MEMORY,), "batch"),
    "all-slow": Expected((P.SLOW_BUT_ALIVE,), "slow", has_culprit=False),
    "all-lock": Expected((P.HOST_DEADLOCK,), "lock", has_culprit=False),
}


def _everywhere(
    classes: tuple[ProblemClass, ...], line: str = "", setups: Sequence[str] = SETUPS, **rest: Any
) -> Expected:
    return Expected(classes, line, setups=tuple(setups), **rest)


_OWN_LOOPS = tuple(name for name in SETUPS if name != "lightning")
_LATE = (P.RANK_LATE, P.RANK_DIED)
_AGENT = {
    "has_agent": True,
    "setups": ("fsdp2", "ddp", "hsdp"),
    "continues_s": 30.0,
    "limit_s": 120.0,
}
STANDS_S = 20.0
_TO_THE_END = {"steps": 12}
IN_SETUPS: dict[str, Expected] = {
    # the faults of every loop, in other set-ups
    "lock": _everywhere((P.HOST_DEADLOCK,), "lock"),
    "exception": _everywhere((P.RANK_DIED,), "exception"),
    "killed": _everywhere((P.RANK_DIED,)),
    "segmentation": _everywhere((P.RANK_DIED,), "segmentation"),
    "checkpoint": _everywhere((P.RANK_LATE,), "checkpoint"),
    "uneven": _everywhere((P.UNEVEN_BATCHES,), setups=_OWN_LOOPS, steps=EPOCH),
    "skip-equal": _everywhere((P.ORDER_DIVERGED,), "order", SHARDED),
    "swap-equal": _everywhere((P.ORDER_DIVERGED,), "order", SHARDED, continues_s=5.0),
    "nan-skip": _everywhere((P.ORDER_DIVERGED,), "nan-skip", SHARDED),
    "critic": _everywhere((P.ORDER_DIVERGED,), "critic", SHARDED),
    # two errors, and errors whose text is that of a lost peer
    "own-refused": _everywhere((P.RANK_DIED,), "refused"),
    "own-pipe": _everywhere((P.RANK_DIED,), "pipe"),
    "own-loader": _everywhere((P.RANK_DIED,), "loader"),
    # late, and then dead
    "late-dies": _everywhere((P.RANK_DIED,), "gave-up", continues_s=20.0),
    "late-memory": _everywhere((P.OUT_OF_MEMORY, P.RANK_DIED), "index", continues_s=20.0),
    "late-killed": _everywhere(_LATE, "killed-later", continues_s=20.0),
    "stop-killed": _everywhere(_LATE, continues_s=20.0),
    # ends of epochs
    "epoch-hang": _everywhere((P.RANK_LATE,), "open"),
    "epoch-evaluation": _everywhere((P.RANK_LATE,), "evaluation"),
    "skip-batch": _everywhere(
        (P.ORDER_DIVERGED, P.RANK_EXITED_EARLY, P.RANK_LATE, P.FOREIGN_COLLECTIVE),
        setups=_OWN_LOOPS,
        **_TO_THE_END,
    ),
    # values
    "nan-between": _everywhere(
        (P.NOT_FINITE,), setups=_OWN_LOOPS, options=("--numerics-every", "5"), **_TO_THE_END
    ),
    # before the first step
    "start-fails": _everywhere((P.RANK_DIED,), "start-fails"),
    "start-stands": _everywhere((P.RANK_LATE,), "open", limit_s=STANDS_S),
    "start-killed": _everywhere((P.RANK_DIED,), continues_s=20.0),
    "start-model": _everywhere((P.RANK_DIED,), "start-model"),
    "start-mesh": _everywhere(
        (P.RANK_LATE, P.ORDER_DIVERGED, P.FOREIGN_COLLECTIVE, P.SIZE_MISMATCH),
        setups=("fsdp2", "hsdp", "accumulation", "moe"),
        limit_s=STANDS_S,
    ),
    # ends from outside, and restarts
    "interrupt-all": _everywhere((P.STOPPED,), has_culprit=False),
    "terminate-all": _everywhere((P.STOPPED,), has_culprit=False),
    "restart-exception": Expected((P.RANK_DIED,), "exception", **_AGENT),
    "restart-killed": Expected((P.RANK_DIED,), "", **_AGENT),
    "restart-lock": Expected((P.HOST_DEADLOCK,), "lock", **_AGENT),
    "restart-completes": Expected((), "", has_culprit=False, **_AGENT, **_TO_THE_END),
    # healthy
    "exit-quick": _everywhere((), has_culprit=False, **_TO_THE_END),
    "epochs": _everywhere((), has_culprit=False, setups=_OWN_LOOPS, steps=60),
    "slow-once": _everywhere((), has_culprit=False, options=("--hang-after", "15"), steps=300),
    "join": Expected((), "", has_culprit=False, setups=("ddp",)),
}
"""The faults of `faulty_setups`; those without a class are healthy trainings."""
FAULTS_FILE = Path(__file__).with_name("faulty_training.py")


def make_cases(
    number: int, seed: int, models: Sequence[str], faults: Collection[str] = ()
) -> Iterator[Case]:
    """Cases in a fixed order: each fault in turn, with other ranks, models and steps.

    Args:
        number: The number of cases.
        seed: The seed of the choices.
        models: The models and loops to choose from, of `MODELS`.
        faults: The faults; empty: all of them.
    """
    choose = random.Random(seed)
    in_loops = [name for name in EXPECTED if set(models) - set(LOOPS) or name not in NOT_IN_LOOPS]
    known = [(name, False) for name in in_loops] + [(name, True) for name in IN_SETUPS]
    known = [each for each in known if not faults or each[0] in faults]
    for at in range(number):
        fault, in_setups = known[at % len(known)]
        num_ranks = choose.choice((2, 3, 3, 4, 4, 8))
        if in_setups:
            setups = IN_SETUPS[fault].setups
            model = setups[(at % len(known) + at // len(known)) % len(setups)]
            is_even = model in EVEN_SETUPS or fault == "start-mesh"
            num_ranks = 4 if is_even else min(num_ranks, 4)
        else:
            model = choose.choice(
                [name for name in models if name not in LOOPS or fault not in NOT_IN_LOOPS]
            )
        yield Case(fault, model, num_ranks, choose.randrange(num_ranks), choose.randint(3, 5))


def line_of(marker: str, script: Path) -> int | None:
    """The number of the line with the comment `# fault: MARKER`; None if it is missing."""
    lines = script.read_text().split("\n")
    return next(
        (at for at, line in enumerate(lines, 1) if line.endswith(f"# fault: {marker}")), None
    )
