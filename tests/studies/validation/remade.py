"""Judge predictions of plans that change the kept memory: a share in a node, or activations.

The plans run on two nodes of four ranks each: `reshard_after_forward` to a group within a node, on
and off, and activation checkpointing, on and off. The emulation states the link within a node. All
runs use virtual time (`virtual_time`), so every error is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.studies.validation.emulated import VIRTUAL_STEPS, EmulationBench
from tests.studies.validation.grid import SHAPES, TWO_NODES, Trial
from tests.studies.validation.outcomes import Outcome

_IN_NODE, _IN_PAIRS = ("reshard-after-forward", "4"), ("reshard-after-forward", "2")
_FULL = ("checkpointing", "full")
FROM_PLAIN = (
    (_IN_NODE,),
    (_IN_PAIRS,),
    (_IN_NODE, ("forward-prefetch", "2")),
    (("wrap", "every:2"), _IN_NODE),
    (_FULL,),
    (_FULL, _IN_NODE),
    (("wrap", "every:2"), _FULL),
)
"""The changes of the recorded plan."""
BACK = (
    ((_IN_NODE,), (("reshard-after-forward", "true"),)),
    ((_IN_NODE,), (_IN_PAIRS,)),
    ((_FULL,), (("checkpointing", "none"),)),
)
"""The settings of the recorded run, and the changes."""


def pairs() -> list[tuple[Trial, Trial]]:
    """The run from which each prediction starts, and the trial."""
    return [
        (Trial(shape, TWO_NODES, start), Trial(shape, TWO_NODES, settings))
        for shape in SHAPES
        for start, settings in [*(((), settings) for settings in FROM_PLAIN), *BACK]
    ]


def judge_remade(folder: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Judge the trials one by one."""
    bench = EmulationBench(folder, VIRTUAL_STEPS, say, on_virtual_time=True)
    return [bench.judge(trial, start) for start, trial in pairs()]
