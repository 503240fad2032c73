"""Published trainings get the right answer: fits or does not fit."""

from dataclasses import replace

import pytest

from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.simulation.planning.candidates import Candidate
from fsdp_inspect.simulation.planning.machines import make_machine
from fsdp_inspect.simulation.planning.prediction import predict_memory
from fsdp_inspect.simulation.planning.transformer import Transformer
from tests.simulation.planning.jobs import make_job

GIB = 1 << 30
LLAMA_7B = Transformer(
    name="llama-7b", dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11_008,
    vocab_size=32_000, head_dim=128,
)  # fmt: skip
LLAMA2_70B = Transformer(
    name="llama-2-70b", dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672,
    vocab_size=32_000, head_dim=128,
)  # fmt: skip
TITAN = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
PHIL = "gist.github.com/bigsnarfdude/47684d7afc4941c118ad8c0a2d764ca5 (Phil Schmid's notebook)"

CASES = [
    # model, GPUs, memory and host memory in GiB, sequence, settings, fits, source. None: the
    # training fits, and the budget may be inside our interval.
    pytest.param("llama-8b", 8, 96, None, 8192, {"batch_size": 2, "checkpointing": "selective"},
                 None, TITAN, id="torchtitan-8b-on-8-of-96"),
    pytest.param("llama-70b", 32, 131, None, 4096, {"checkpointing": "full", "tensor_parallel": 4},
                 True, "kempnerinstitute.github.io/KempnerForge/reference/benchmarks.html",
                 id="kempner-70b-on-32-of-141-GB"),
    pytest.param("llama-8b", 128, 96, None, 8192, {"batch_size": 2, "checkpointing": "selective"},
                 True, TITAN, id="torchtitan-8b-on-128-of-96"),
    pytest.param("llama-70b", 256, 96, None, 8192,
                 {"batch_size": 16, "checkpointing": "full", "tensor_parallel": 8},
                 True, TITAN, id="torchtitan-70b-on-256-of-96"),
    pytest.param(LLAMA2_70B, 16, 80, 1024, 2048, {"checkpointing": "full"},
                 None, "huggingface.co/blog/ram-efficient-pytorch-fsdp", id="hf-70b-on-16-of-80"),
    pytest.param("llama-70b", 8, 80, None, 2048, {"checkpointing": "full"},
                 False, PHIL, id="full-70b-on-8-of-80"),
    pytest.param("llama-70b", 8, 192, None, 4096, {"checkpointing": "full"},
                 None, "TraceLens, llama_70b_fsdp on 8 MI300X (RULES.md, G)", id="70b-on-8-of-192"),
    pytest.param(LLAMA_7B, 1, 80, None, 2048, {"checkpointing": "full"},
                 False, "github.com/meta-llama/llama-cookbook/issues/413", id="7b-on-one-of-80"),
    pytest.param(LLAMA_7B, 8, 40, None, 512,
                 {"batch_size": 3, "checkpointing": "full", "offload": True},
                 True, "github.com/tatsu-lab/stanford_alpaca/issues/280", id="7b-offload-8-of-40"),
    pytest.param("llama-70b", 4, 24, 127, 3072, {"checkpointing": "full", "offload": True},
                 False, PHIL, id="full-70b-offload-on-4-of-24"),
    pytest.param("llama-8b", 4, 24, None, 2048, {"checkpointing": "full"},
                 False, "16 bytes a parameter / 4 > 24 GiB", id="8b-on-4-of-24"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpus", "memory", "host", "seq_len", "settings", "fits", "source"), CASES
)
def test_the_verdict_agrees_with_the_published_run(
    model, gpus, memory, host, seq_len, settings, fits, source
):
    job = make_job("llama-8b" if isinstance(model, Transformer) else model, gpus=gpus)
    job = replace(job, seq_len=seq_len, gpus_per_node=min(gpus, 8))
    if isinstance(model, Transformer):
        job = replace(job, model=model)
    machine = make_machine(
        "h200-ib400",
        gpus_per_node=job.gpus_per_node,
        memory_bytes=memory * GIB,
        host_bytes=None if host is None else host * GIB,
    )

    memory_of = predict_memory(job, machine, Candidate(**settings))

    if fits is None:
        assert memory_of.verdict in (FitVerdict.FITS, FitVerdict.UNKNOWN), memory_of.reason
    elif fits:
        assert memory_of.verdict is FitVerdict.FITS, memory_of.reason
    else:
        assert memory_of.verdict in (FitVerdict.DEVICE, FitVerdict.HOST), memory_of.reason
