"""The predicted peak of another plan equals the peak of that plan's own run.

The runs are trainings under emulation on two nodes of four ranks each. Their memory equals that of
real ranks to the byte (`tests/distributed/test_emulated_memory.py`). The simulation assumes that
memory outside all units, such as positions, is alive during the whole step.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.reader import StoredRun, open_run
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import prepare, train
from tests.cases import mark_slow
from tests.studies.validation.grid import SPLIT

EMULATED = "world_size=8,gpus_per_node=4,bandwidth=10GB/s,inter_bandwidth=1GB/s"
MODEL = {
    "dim": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 96,
    "vocab_size": 256,
    "seq_len": 32,
    "batch_size": 2,
    "data": argparse.__file__,
    "steps": 5,
    "record_warmup": 1,
    "emulate": EMULATED,
}
OUTSIDE_OF_UNITS = 256
"""Bytes of the positions: 32 integers."""
IN_NODE: dict[str, Any] = {"reshard_after_forward": 4}
IN_PAIRS: dict[str, Any] = {"reshard_after_forward": 2}
FULL: dict[str, Any] = {"checkpointing": "full"}
PLANS: dict[str, tuple[dict[str, Any], Changes]] = {
    "in a node": (IN_NODE, Changes(**IN_NODE)),
    "in pairs": (IN_PAIRS, Changes(**IN_PAIRS)),
    "in pairs, by two": (IN_PAIRS | {"wrap": "every:2"}, Changes(**IN_PAIRS, wrap="every:2")),
    "checkpointed": (FULL, Changes(**FULL)),
    "checkpointed in a node": (FULL | IN_NODE, Changes(**FULL, **IN_NODE)),
    "checkpointed by two": (FULL | {"wrap": "every:2"}, Changes(**FULL, wrap="every:2")),
    "one unit": ({"wrap": "root"}, Changes(wrap="root")),
    "split": ({"wrap": SPLIT}, Changes(wrap="split")),
    "kept whole": ({"reshard_after_forward": "false"}, Changes(reshard_after_forward=False)),
}
WRAPS = {
    "with the rest in the root": "layers.*",
    "block": "block",
    "by two": "every:2",
    "split": SPLIT,
    "one unit": "root",
}
LARGE_VOCABULARY = {"vocab_size": 2048, "seq_len": 128}
"""With it, memory has its peak in the loss, outside of all units."""

Recorded = Callable[..., StoredRun]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The runs of some settings; each is trained once."""
    runs: dict[str, StoredRun] = {}

    def record(**settings: Any) -> StoredRun:
        key = str(settings)
        if key not in runs:
            runs[key] = _train(tmp_path_factory.mktemp("runs"), settings)
        return runs[key]

    return record


def _train(folder: Path, settings: dict[str, Any]) -> StoredRun:
    texts = {name: str(value) for name, value in settings.items()}
    config = check_settings({**MODEL, **texts, "runs_dir": str(folder)})
    runtime = read_runtime(EMULATED)
    with process_group(runtime):
        result = train(prepare(config, runtime))
    assert result.run_folder is not None
    return open_run(result.run_folder)


def predicted_peak(run: StoredRun, changes: Changes) -> int | None:
    plan = resolve_plan(observed_plan(run), run.manifest)
    wanted = apply_changes(plan, changes, shapes_of(run.manifest))
    return simulate_plan(run, wanted).predicted.peak_bytes


@pytest.mark.parametrize("name", mark_slow(PLANS, but=("in pairs, by two",)))
def test_the_peak_of_another_plan_is_predicted(recorded: Recorded, name: str):
    settings, changes = PLANS[name]
    measured = measure_work(recorded(**settings)).peak_bytes
    assert predicted_peak(recorded(), changes) == pytest.approx(measured, abs=OUTSIDE_OF_UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [*product(WRAPS, WRAPS)], ids="-".join)
def test_the_loss_and_the_code_between_units_hold_memory_too(
    recorded: Recorded, wraps: tuple[str, str]
):
    ran, planned = wraps
    run = recorded(**LARGE_VOCABULARY, wrap=WRAPS[ran])
    other = recorded(**LARGE_VOCABULARY, wrap=WRAPS[planned])
    found = simulate_plan(run, observed_plan(other)).predicted.peak_bytes
    assert found == pytest.approx(measure_work(other).peak_bytes, abs=OUTSIDE_OF_UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("planned", WRAPS)
def test_one_unit_tells_what_its_parts_hold(recorded: Recorded, planned: str):
    """The work of a norm before it uses its weight counts for the part before: inexact."""
    found = simulate_plan(recorded(wrap="root"), observed_plan(recorded(wrap=WRAPS[planned])))
    measured = measure_work(recorded(wrap=WRAPS[planned])).peak_bytes
    assert found.predicted.peak_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.slow
def test_a_run_in_smaller_groups_predicts_the_peak_without_them(recorded: Recorded):
    found = predicted_peak(recorded(**IN_NODE), Changes(reshard_after_forward=True))
    measured = measure_work(recorded()).peak_bytes
    assert found == pytest.approx(measured, abs=OUTSIDE_OF_UNITS)


@pytest.mark.slow
def test_a_run_with_checkpointing_does_not_tell_the_peak_without(recorded: Recorded):
    assert predicted_peak(recorded(**FULL), Changes(checkpointing="none")) is None


@pytest.mark.slow
def test_parameters_are_kept_between_the_microbatches_of_a_step_and_not_beyond(
    recorded: Recorded,
):
    """A loop reshards after the last microbatch, because the optimizer changes the weights."""
    base, kept = (
        recorded(microbatches=3, reshard_after_backward=reshards) for reshards in (True, False)
    )
    plan = observed_plan(kept)
    assert plan.accumulation.microbatches == 3
    assert [unit.reshard_after_backward for unit in plan.units if not unit.is_root] == [False] * 6
    measured = measure_summary(kept).communication_ns
    assert measured is not None
    assert measured < 0.8 * (measure_summary(base).communication_ns or 0)
    for run in (base, kept):
        found = simulate_plan(run, resolve_plan(plan, run.manifest))
        # The loss and the norm of the gradients are reduced outside of all units: 2% of the time.
        assert found.predicted.communication_ns == pytest.approx(measured, rel=0.03)
        assert found.predicted.peak_bytes == pytest.approx(
            measure_work(kept).peak_bytes, abs=OUTSIDE_OF_UNITS
        )
