"""A calibrating run counts the same operations as the plans that use its rate."""

from pathlib import Path

import pytest

from fsdp_inspect.simulation.planning.machines import measure_calibration
from fsdp_inspect.simulation.planning.transformer import load_model
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.store.reader import open_run

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny-2-ranks"


def test_the_operations_of_a_run_are_those_of_the_formulas_with_attention() -> None:
    run = open_run(SAMPLE)
    model, _ = load_model(str(run.manifest.config["preset"]))
    seq_len, batch_size = (int(run.manifest.config[name]) for name in ("seq_len", "batch_size"))
    tokens = seq_len * batch_size
    forward = model.num_layers * model.block_flops(tokens, seq_len) + model.head_flops(tokens)

    pieces = measure_work(run).workload.pieces
    seconds = sum(piece.forward_ns + piece.backward_ns for piece in pieces) / 1e9

    assert measure_calibration(run).flops * seconds == pytest.approx(3 * forward)
