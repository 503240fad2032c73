"""Units of flight recorder dumps are inferred from message sizes and a model, and never wrong."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fsdp_inspect.cli.diagnose import parts_of_model
from fsdp_inspect.importing.flight_recorder_file import Collective
from fsdp_inspect.importing.model_units import name_units
from fsdp_inspect.trace.codes import UNKNOWN_UNIT, EventKind, Phase
from tests.conftest import Torchrun

RANKS = 3
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
E, N, H = "model.embed_tokens", "model.norm", "lm_head"
BLOCKS = [f"model.layers.{index}" for index in range(5)]
BLOCK_ELEMENTS = 2 * 18 + 18 * 16 + 2 * 9 * 16 + 18 * 16 + 2 * 21 * 16 + 18 * 20
"""Norms, query, key and value, output, two of the feed-forward, the third; rows padded to 3."""
ELEMENTS = {
    **dict.fromkeys(BLOCKS, BLOCK_ELEMENTS),
    E: 51 * 16,
    f"{N}, {H}": 18 + 51 * 16,
    f"{E}, {N}, {H}": 18 + 2 * 51 * 16,
}


@pytest.fixture
def model(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return parts_of_model(str(tmp_path))


def steps(wrap: str, again: int, passes: int, *, accumulates: bool):
    """The collectives that FSDP2 issues, by kind and unit.

    Args:
        wrap: `ends`: the embedding, and norm with head, are units, as in torchtitan. `root`: the
            root holds them, as in Accelerate.
        again: The blocks that backward gathers again.
        passes: Microbatches of all steps.
        accumulates: Whether every second microbatch does not reduce.
    """
    gather, reduce = EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER
    root, head = f"{E}, {N}, {H}", f"{N}, {H}"
    for number in range(passes):
        reduces = not accumulates or number % 2 == 1
        yield gather, root if wrap == "root" else E
        yield from ((gather, block) for block in BLOCKS)
        if wrap == "ends":
            yield gather, head
        pending = [(gather, block) for block in reversed(BLOCKS[:again])]
        if wrap == "ends":
            pending.append((gather, E))
            yield from pending[:1]
            if reduces:
                yield reduce, head
            pending = pending[1:]
        else:
            yield from pending[:1]
            pending = pending[1:]
        for block in reversed(BLOCKS):
            yield from pending[:1]
            pending = pending[1:]
            if reduces:
                yield reduce, block
        yield from pending
        if reduces:
            yield reduce, root if wrap == "root" else E


def collectives(units):
    return [
        Collective(
            group="0",
            group_size=RANKS if kind is EventKind.ALL_GATHER else 0,
            sequence=at,
            kind=kind,
            unit=UNKNOWN_UNIT,
            bytes=4 * ELEMENTS[unit],
            dtype=1,
            time_ns=at,
            completed_ns=at + 1,
            phase=Phase.OUTSIDE,
            place=None,
            has_stack=False,
        )
        for at, (kind, unit) in enumerate(units)
    ]


def names_of(issued, model, differs=1 << 30):
    found = name_units({"0": (issued, RANKS, differs)}, model)
    units = [found.units.get(("0", each.sequence)) for each in issued]
    return ["" if unit is None else found.names[unit] for unit in units]


@pytest.mark.parametrize("wrap", ["ends", "root"])
@pytest.mark.parametrize("again", [5, 4])
def test_no_cut_of_a_dump_names_a_wrong_unit(model, wrap: str, again: int) -> None:
    num_named = num_blocks = 0
    for accumulates in (False, True):
        units = list(steps(wrap, again, 4, accumulates=accumulates))
        issued = collectives(units)
        for first, last in product(range(0, len(units), 3), range(2, len(units), 3)):
            if first >= last:
                continue
            names = names_of(issued[first:last], model)
            for (_, unit), name in zip(units[first:last], names, strict=True):
                if name not in ("model.layers.*", ""):
                    assert unit in name.split(" or ")
                num_blocks += unit in BLOCKS
                num_named += name == unit and unit in BLOCKS
        assert names_of(issued, model) == [unit for _, unit in units]
    assert num_named / num_blocks > 0.75


def test_blocks_from_a_difference_on_have_no_number(model) -> None:
    units = list(steps("ends", 5, 2, accumulates=False))
    names = names_of(collectives(units), model, differs=3)
    assert names[:4] == [E, "model.layers.0", "model.layers.1", "model.layers.*"]
    assert set(names[3:]) == {E, "model.layers.*", f"{N}, {H}"}


def test_a_block_of_the_size_of_another_unit_has_no_name(model) -> None:
    first = ("embed", model.block_shapes)
    issued = collectives(steps("root", 5, 1, accumulates=False))
    names = names_of(issued, replace(model, first=first))
    assert not any("layers" in name or name == "embed" for name in names)


def test_messages_of_another_model_have_no_name(model) -> None:
    issued = collectives(steps("ends", 5, 1, accumulates=False))
    other = [each for each in issued if each.bytes != 4 * BLOCK_ELEMENTS]
    assert "model.layers.*" not in names_of(other, model)


HANG = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank = dist.get_rank()
model = LlamaForCausalLM(LlamaConfig.from_pretrained("."))
blocks = model.model.layers
for block in blocks:
    fully_shard(block)
if sys.argv[1] == "ends":
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
fully_shard(model)

def stop(*_):
    open(f"at-{rank}", "w").close()
    if rank == 1:
        time.sleep(1000)

def dump():
    while not all(os.path.exists(f"at-{each}") for each in range(3)):
        time.sleep(0.05)
    time.sleep(3)
    text = _dump_fr_trace_json(True, False)
    folder = sys.argv[1]
    os.makedirs(f"{folder}-json", exist_ok=True)
    os.makedirs(folder, exist_ok=True)
    open(f"{folder}-json/fr_rank_{rank}.json", "wb").write(
        text if isinstance(text, bytes) else text.encode())
    open(f"{folder}/fr_rank_{rank}", "wb").write(_dump_fr_trace(True, True, False))
    os._exit(0)

threading.Thread(target=dump, daemon=True).start()
ids = torch.arange(8).view(1, 8)
for step in range(4):
    if step == 3 and sys.argv[1] == "ends":
        blocks[3].register_forward_pre_hook(stop, prepend=True)
    if step == 3 and sys.argv[1] == "root":
        blocks[1].register_full_backward_hook(stop)
    model(input_ids=ids, labels=ids).loss.backward()
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "absent"),
    [("ends", "all-gather of model.layers.3"), ("root", "all-reduce of model.layers.1")],
)
def test_a_hang_of_transformers_names_the_block(
    run_ranks: Torchrun, tmp_path: Path, invoke, wrap: str, absent: str
) -> None:
    """The block at which rank 1 stops is known from the script."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hang.py").write_text(HANG)

    run_ranks(
        "hang.py", wrap, cwd=tmp_path, environment={"TORCH_FR_BUFFER_SIZE": "2000"},
        check=False, num_ranks=3,
    )  # fmt: skip

    for form in (wrap, f"{wrap}-json"):
        ended = invoke("diagnose", tmp_path / form, "--model", tmp_path, "--brief")
        assert absent in " ".join(ended.out.split())
