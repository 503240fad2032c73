"""Judge predictions of other units: each wrap from each recorded wrap, on virtual time.

A model is recorded as one unit with the rest in the root, in blocks, or in halves of blocks. A
memory step records when each parameter is used. The times and memory of the new units follow from
this. The vocabulary is large, so with few activations the peak is in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from tests.studies.validation.emulated import VIRTUAL_STEPS, EmulationBench
from tests.studies.validation.grid import BASELINE_LINK, SHAPES, Trial
from tests.studies.validation.outcomes import Outcome, compare, predict

WRAPS = ("root", "layers.*", "block", "every:2", "split")
"""The wraps; `layers.*` leaves the embedding and the output to the root."""
_VOCABULARY = ("vocab-size", "2048")


def judge_rewrapped(folder: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Run every wrap once for each shape, and predict each wrap from each."""
    bench = EmulationBench(folder, VIRTUAL_STEPS, say, on_virtual_time=True)
    outcomes = []
    for shape, ran, planned in product(SHAPES, WRAPS, WRAPS):
        start, wanted = (
            bench.baseline_at(Trial(shape, BASELINE_LINK, (("wrap", wrap), _VOCABULARY)))
            for wrap in (ran, planned)
        )
        simulation = predict(start, observed_plan(wanted), {})
        recorded, actual = measure_work(start), measure_work(wanted)
        name = f"{shape}: {planned}, from {ran}"
        outcome = compare(name, simulation, actual, recorded)
        say(f"{name}: {outcome.step_error:+.1%}")
        outcomes.append(outcome)
    return outcomes
