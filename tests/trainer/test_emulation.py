"""The trainer with `--emulate`: one process, marked emulated, without a loss."""

import argparse
import json
from pathlib import Path

import pytest

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from instrumented_trainer.__main__ import main
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.runtime import read_runtime
from instrumented_trainer.trainer import prepare

LINK = "world_size=8,gpus_per_node=4,bandwidth=10GB/s,inter_bandwidth=1GB/s"
SMALL = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 256,
    "seq_len": 16,
    "batch_size": 2,
    "data": argparse.__file__,
    "emulate": LINK,
}


def command(**settings: object) -> list[str]:
    values = {**SMALL, **settings}
    return [
        word
        for name, value in values.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def prepare_small(**settings: object) -> None:
    config = check_settings({**SMALL, **settings})
    prepare(config, read_runtime(config.emulate))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of a run with two links, fixed times and an evaluation, and its folder."""
    folder = tmp_path_factory.mktemp("runs")
    capture = pytest.MonkeyPatch()
    lines: list[str] = []
    capture.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
    settings = {"steps": 4, "eval_every": 2, "memory_steps": "none", "record_warmup": 1}
    times = {"mesh": "2x4", "fixed_compute": "forward=2ms,backward=4ms"}
    with capture.context():
        code = main(command(**settings, **times, runs_dir=folder))
    capture.undo()
    assert code == 0
    return "\n".join(lines), next(folder.iterdir())


def test_the_links_are_said_and_no_loss_is_shown(trained: tuple[str, Path]):
    text, _ = trained

    assert "emulated: 8 ranks, 10.0 GB/s" in text
    assert "No loss is shown" in text
    assert "evaluation after step 2: done" in text
    assert "step 4/4  lr" in text
    assert "grad norm" not in text


def test_the_run_says_how_it_was_emulated(trained: tuple[str, Path]):
    manifest = json.loads((trained[1] / "run.json").read_text())

    assert manifest["source"] == "emulated"
    assert manifest["world_size"] == 8
    assert manifest["mesh"] == {"replicate": 2, "shard": 4}
    assert manifest["emulation"]["inter"]["bandwidth_bytes_per_s"] == 1e9
    assert manifest["emulation"]["fixed_compute"]["forward"]["ns"] == 2e6
    assert manifest["config"]["emulate"] == LINK


def test_no_loss_is_recorded(trained: tuple[str, Path]):
    run = open_run(trained[1])

    assert run.ranks[0].scalar_names == []
    assert run.ranks[0].problems == []


def test_a_block_lasts_at_least_its_two_halves(trained: tuple[str, Path]):
    run = open_run(trained[1])
    block = next(unit.index for unit in run.manifest.units if unit.fqn == "layers.0")
    forwards = run.events(0, kinds=[EventKind.FORWARD])
    mine = (forwards.unit == block) & (forwards.phase == Phase.FORWARD)
    duration_ns = (forwards.end_ns - forwards.start_ns)[mine]

    assert len(duration_ns) == 4
    assert duration_ns.min() >= 4_000_000


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"emulate": "h100"}, ["unknown preset 'h100'", "h100-nvlink"]),
        ({"mesh": "4x4"}, ["16 ranks", "world size is 8"]),
        ({"checkpoint_dir": "x", "checkpoint_every": 1}, ["checkpoint_every", "no shards of the"]),
        ({"resume": "latest"}, ["resume", "unsupported under emulation"]),
        ({"emulate": None, "fixed_compute": "forward=1ms,backward=1ms"}, ["Add --emulate"]),
        ({"compile": True, "fixed_compute": "forward=1ms,backward=1ms"}, ["Remove --compile"]),
        ({"fixed_compute": "forward=1ms"}, ["key backward is missing"]),
    ],
)
def test_a_setting_that_cannot_be_emulated_is_refused(
    settings: dict[str, object], words: list[str]
):
    with pytest.raises(ConfigError) as refused:
        prepare_small(**settings)

    assert all(word in str(refused.value) for word in words)


def test_real_ranks_cannot_emulate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigError, match=r"2 real ranks.*without torchrun"):
        read_runtime(LINK)
