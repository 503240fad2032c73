"""`fsdp-inspect plan`: its answer, its JSON, its files and its exit codes."""

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fsdp_inspect import Plan
from fsdp_inspect.cli import forecast_maker as forecaster
from fsdp_inspect.simulation.planning import search
from instrumented_trainer.command_line import check_settings, read_file
from tests.cases import mark_slow
from tests.forked_process import ForkedProcess

ISSUE_FIELDS = (
    *("step_time_ns", "tokens_per_s", "mfu", "gpu_hours", "peak_allocated_bytes"),
    *("peak_reserved_bytes", "host_bytes", "days", "energy_kwh"),
)
TINY = ("--model", "tiny", "--gpus", "2", "--preset", "h100-nvlink", "--seq-len", "64")
SMALL = (*TINY, "--no-forecast")


@pytest.fixture(scope="module")
def written(tmp_path_factory, run_python) -> tuple[dict, Path]:
    """The JSON of a plan and the folder of its files."""
    folder = tmp_path_factory.mktemp("plan") / "out"
    done = run_python("-m", "fsdp_inspect", "plan", *SMALL, "--json", "--out", folder)
    return json.loads(done.stdout), folder


def test_json_has_each_value_of_each_plan_with_its_interval_and_assumption(written):
    plan, _ = written
    assert plan["best"]
    assert len(plan["runners_up"]) == 2
    assert plan["rejected"]
    for each in (plan["best"], *plan["runners_up"], *plan["rejected"]):
        for name in ISSUE_FIELDS:
            estimate = each[name]
            assert set(estimate) == {"value", "low", "high", "origin", "assumption"}
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert all(each["reason"] and each["count"] for each in plan["rejected"])


def test_the_written_files_are_read_by_their_readers(written):
    from accelerate.commands.config.config_args import ClusterConfig

    plan, folder = written
    best = plan["best"]["candidate"]

    loaded = Plan.load(folder / "plan.toml")
    assert loaded.world_size == 2
    assert bool(loaded.checkpointing.full) == (best["checkpointing"] == "full")

    trainer = check_settings(read_file(folder / "trainer.toml"))
    assert (trainer.preset, trainer.batch_size) == ("tiny", best["batch_size"])

    accelerate = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert set(accelerate) <= {
        *(field.name for field in fields(ClusterConfig)),
        *("compute_environment", "mixed_precision", "distributed_type"),
    }
    assert accelerate["fsdp_config"]["fsdp_version"] == 2


def test_an_existing_folder_is_refused_before_the_search(invoke, tmp_path, monkeypatch):
    (tmp_path / "earlier.toml").touch()
    monkeypatch.setattr(search, "make_capacity_plan", None)
    done = invoke("plan", *SMALL, "--out", tmp_path)

    assert done.code == 2
    assert "already exists: it is a folder" in " ".join(done.err.split())


def test_the_text_fits_80_columns_and_states_its_assumptions(invoke):
    done = invoke("plan", *SMALL)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.startswith("Fits: ")
    for words in (
        "\nBest plan and runners-up\n",
        "Rejected",
        "80% interval",
        "Nothing here is measured.",
    ):
        assert words in done.out


@pytest.mark.slow
def test_a_shortfall_names_the_memory_of_the_host_and_the_smallest_change_that_fits(invoke):
    four = ("--model", "llama-70b", "--gpus", "4", "--preset", "rtx4090-pcie", "--seq-len", "2048",
            "--no-forecast")  # fmt: skip
    refused = invoke("plan", *four)
    assert refused.code == 2
    assert "set --gpus-per-node" in " ".join(refused.err.split())

    done = invoke("plan", *four, "--gpus-per-node", "4", "--host-memory", "1TiB")

    assert done.code == 1
    words = " ".join(done.out.split())
    assert re.search(r"With 1\.\d+ TiB of host memory, a plan with offload fits", words)
    assert "On 4 GPUs and 1.00 TiB of host memory a plan fits with" in words
    assert "The smallest change that fits: checkpointing full, batch 1, QLoRA" in words
    long = invoke(
        "plan", *four, "--gpus-per-node", "4", "--host-memory", "1TiB", "--seq-len", "8192"
    )
    assert "batch 1, TP 4, QLoRA of rank 16" in " ".join(long.out.split())
    settings = re.findall(r"--set \w+=[\w.]+", " ".join(long.out.split()))
    given = [word for option in settings for word in option.split()]
    named = invoke("plan", *four, "--gpus-per-node", "4", "--seq-len", "8192", "--fixed", *given)
    assert named.code == 0
    fitting = invoke("plan", *four, "--gpus-per-node", "4", "--host-memory", "2TiB")
    assert fitting.code == 0


@pytest.mark.slow
def test_without_a_fitting_plan_the_exit_code_is_1_and_the_missing_memory_is_stated(invoke):
    memory = ("--memory", "2GiB", "--host-memory", "64GiB")
    done = invoke("plan", "--model", "llama-70b", "--gpus", "4", *memory, "--no-forecast")
    assert done.code == 1
    assert done.out.startswith("No plan fits into 2.00 GiB.")
    assert "a plan fits with" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--model", "lama-8b", "--gpus", "8"], "Unknown model", id="model"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--set", "a=1"], "Unknown setting",
                     id="set"),
        pytest.param(["--model", "tiny", "--gpus", "0"], "not a valid number", id="gpus"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--preset", "b2"], "preset", id="preset"),
        pytest.param(["--model", "tiny", "--gpus", "16", "--preset", "h100-nvlink"], "one node",
                     id="network"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--tokens", "x"], "tokens", id="tokens"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--batch-tokens", "7"], "batch-tokens",
                     id="batch"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--calibrate", "none"], "No run",
                     id="calibrate"),
        pytest.param(["--model", "a.b:build", "--gpus", "8", "--fixed"], "is a builder",
                     id="fixed-builder"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--set", "prefetch=1", "--set",
                      "prefetch=2"], "prefetch is both 1 and 2", id="twice"),
        pytest.param(["--model", "tiny", "--gpus", "64", "--gpus-per-node", "48"],
                     "Expected a divisor of 64", id="nodes"),
        pytest.param(["--model", "a.b:build", "--gpus", "8", "--seq-len", "64", "--set",
                      "seq_len=32"], "--set seq_len is 32", id="lengths"),
        pytest.param(["--model", "tiny", "--gpus", "8", "--fixed", "--batch-tokens", "4M", "--set",
                      "microbatches=3"], "Expected --batch-tokens 4000000", id="batches"),
    ],
)  # fmt: skip
def test_invalid_input_has_exit_code_2_and_no_traceback(words, message, invoke):
    done = invoke("plan", *words)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_a_calibrating_run_replaces_the_roofline(invoke):
    run = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"
    done = invoke("plan", *SMALL, "--json", "--calibrate", run)
    assert done.code == 0, done.err
    step = json.loads(done.out)["best"]["step_time_ns"]
    assert step["origin"] == "calibrated simulation"
    assert "as in run" in step["assumption"]
    assert "without the run it is -7% to +8%" in step["assumption"]
    assert "That device is not known to be a" in step["assumption"]  # a CPU run


FIXED = ("plan", "--model", "llama-8b", "--gpus", "8", "--preset", "h100-ib400", "--no-forecast",
         "--fixed")  # fmt: skip


def test_a_given_plan_is_evaluated_with_all_its_settings(invoke):
    settings = ("--set", "batch_size=2", "--set", "checkpointing=full", "--set", "loss=fused",
                "--set", "compiled=true")  # fmt: skip
    done = invoke(*FIXED, *settings, "--batch-tokens", "524288", "--json")

    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["num_candidates"] == 1
    given = plan["best"]["candidate"]
    assert (given["batch_size"], given["loss"], given["compiled"]) == (2, "fused", True)
    assert given["microbatches"] == 4
    assert "80% interval" in plan["best"]["step_time_ns"]["assumption"]


@pytest.mark.parametrize("sync", ["every", "last"])
def test_the_written_files_accumulate_as_the_priced_plan_does(sync, invoke, tmp_path):
    folder = tmp_path / "out"
    settings = ("--set", f"accumulation_sync={sync}", "--set", "microbatches=4")
    done = invoke(*FIXED, *settings, "--memory", "160GiB", "--out", folder)

    assert done.code == 0, done.err
    accelerate = (folder / "accelerate.yaml").read_text()
    assert f"num_steps=4, sync_each_batch={sync == 'every'}" in accelerate
    assert "reduces gradients in bfloat16" in accelerate
    assert yaml.safe_load(accelerate)["mixed_precision"] == "bf16"
    assert Plan.load(folder / "plan.toml").accumulation.sync == sync
    trainer = check_settings(read_file(folder / "trainer.toml"))
    assert (trainer.microbatches, trainer.accumulation_sync) == (4, sync)
    titan = (folder / "torchtitan.toml").read_text()
    assert ("torchtitan reduces gradients in each microbatch" in titan) == (sync == "last")


@pytest.mark.slow
def test_accumulation_without_reduction_holds_unsharded_gradients(invoke):
    def peak(*words):
        settings = ("--set", "microbatches=4", "--set", "checkpointing=full", *words)
        plan = json.loads(invoke(*FIXED, *settings, "--memory", "160GiB", "--json").out)
        return plan["best"]["peak_allocated_bytes"]["value"]

    more = peak("--set", "accumulation_sync=last") - peak()
    parameters = 8.03e9
    assert 2 * parameters * 0.7 < more < 2 * parameters * 1.1


def test_a_given_plan_that_does_not_fit_shows_its_values_and_what_the_loss_costs(invoke):
    done = invoke(*FIXED, "--set", "batch_size=8", "--memory", "40GiB")

    assert done.code == 1
    words = " ".join(done.out.split())
    assert words.startswith("Does not fit: A device needs at least")
    assert "The loss is computed with float32 copies of all logits" in words
    assert "--set loss=linear" in words
    assert "On 8 GPUs this plan fits with" in words
    assert "no larger number of GPUs was found on which this plan fits" in words
    assert "tokens/s" in words


def test_settings_narrow_the_search(invoke):
    done = invoke("plan", *SMALL, "--set", "checkpointing=full", "--set", "loss=fused", "--json")

    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["num_candidates"] > 1
    for each in (plan["best"], *plan["runners_up"]):
        assert each["candidate"]["checkpointing"] == "full"
        assert each["candidate"]["loss"] == "fused"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss=half", "Expected whole or compiled"),
        ("compiled=1", "Expected true or false"),
        ("batch_size=0", "Expected a whole number from 1"),
        ("tensor_parallel=3", "do not divide 8 GPUs"),
        ("is_quantized=true", "cannot be trained"),
        ("expert_parallel=8", "has 0 experts"),
        ("products=nvfp4", "no rate of it on H100"),
    ],
)
def test_an_invalid_setting_is_refused(setting, message, invoke):
    done = invoke(*FIXED, "--set", setting)

    assert done.code == 2
    assert message in " ".join(done.err.split())


def test_an_unsupported_architecture_is_refused(tmp_path, invoke):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    done = invoke("plan", "--model", tmp_path, "--gpus", "8")
    assert done.code == 2
    assert "Unsupported architecture 't5'" in " ".join(done.err.split())


@pytest.mark.parametrize(
    "kind", mark_slow(["gpt2", "gpt_neox", "bert", "mixtral", "qwen3_moe"], but=["mixtral"])
)
def test_the_parameters_of_a_hugging_face_config_are_those_of_the_model(kind, tmp_path, invoke):
    import transformers

    small = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 512, "vocab_size": 512,
             "max_position_embeddings": 64}  # fmt: skip
    of_gpt2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    experts = {
        "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                      "num_key_value_heads": 2, "head_dim": 32},
    }.get(kind, {})  # fmt: skip
    settings = of_gpt2 if kind == "gpt2" else {**small, **experts}
    config = transformers.AutoConfig.for_model(kind, **settings)
    config.save_pretrained(tmp_path)
    make = transformers.AutoModelForCausalLM if kind != "bert" else transformers.BertForMaskedLM
    model = make.from_config(config) if kind != "bert" else make(config)
    counted = sum(each.numel() for each in model.parameters())

    done = invoke("plan", "--model", tmp_path, "--gpus", "2", "--preset", "h100-nvlink",
                  "--seq-len", "64", "--no-forecast", "--fixed", "--json")  # fmt: skip

    assert done.code == 0, done.err
    assert json.loads(done.out)["num_parameters"] == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov2 with SwiGLU"])
def test_an_image_encoder_is_planned_in_patches(kind, tmp_path, invoke):
    import transformers

    kind, _, gated = kind.partition(" with ")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, image_size=64,
        patch_size=8, num_labels=10, **({"use_swiglu_ffn": True} if gated else {}),
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForImageClassification.from_config(config)
    counted = sum(each.numel() for each in model.parameters())

    plans = {}
    for labels in (10, 1000):
        written = json.loads((tmp_path / "config.json").read_text())
        written["id2label"] = {str(number): str(number) for number in range(labels)}
        (tmp_path / "config.json").write_text(json.dumps(written))
        done = invoke("plan", "--model", tmp_path, "--gpus", "2", "--preset", "h100-nvlink",
                      "--no-forecast", "--fixed", "--set", "batch_size=32", "--json")  # fmt: skip
        assert done.code == 0, done.err
        plans[labels] = json.loads(done.out)

    assert plans[10]["num_parameters"] == pytest.approx(counted, rel=0.03)
    assert plans[10]["seq_len"] == 8 * 8 + 1
    # An image has one label: the logits of 1,000 labels take little memory.
    peaks = [plans[labels]["best"]["peak_allocated_bytes"]["value"] for labels in (10, 1000)]
    added = plans[1000]["num_parameters"] - plans[10]["num_parameters"]
    assert 0 < peaks[1] - peaks[0] < 16 * added + 3 * 32 * 1000 * 4


@pytest.fixture
def forked(monkeypatch):
    """Forecasts run in a child that does not import torch again."""
    popen = SimpleNamespace(Popen=ForkedProcess, PIPE=subprocess.PIPE)
    monkeypatch.setattr(forecaster, "subprocess", popen)


@pytest.mark.slow
def test_the_reported_plans_are_forecast_and_say_so(forked, invoke):
    done = invoke("plan", *TINY, "--json")

    assert done.code == 0, done.err
    plan = json.loads(done.out)
    reported = (plan["best"], *plan["runners_up"])
    for each in (one for one in reported if one["candidate"]["tensor_parallel"] == 1):
        assert each["peak_allocated_bytes"]["origin"] == "forecast"
        assert each["peak_reserved_bytes"]["origin"] == "allocator model"
        assert each["peak_reserved_bytes"]["value"] >= each["peak_allocated_bytes"]["value"]
    assert "forecasting tiny on 2 ranks" in done.err
    assert plan["notes"] == []


@pytest.mark.slow
def test_a_builder_is_planned_with_its_own_keywords(forked, invoke, tmp_path):
    words = ("plan", "--model", "tests.simulation.planning.gpt_builder:build", "--gpus", "4",
             "--preset", "h100-nvlink", "--set", "checkpointing=full", "--set", "offload=none",
             "--seq-len", "128", "--out", tmp_path / "out")  # fmt: skip
    done = invoke(*words)

    assert done.code == 0, done.err
    assert "small-gpt (8.9" in done.out.replace("\n", " ") or "small-gpt (" in done.out
    assert "sequences of 128 tokens" in done.out
    assert "Plan: batch_size=" in done.out
    assert "All operations together run at 54%" in " ".join(done.out.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.toml"]
    assert Plan.load(tmp_path / "out" / "plan.toml").world_size == 4


def test_a_builder_that_is_not_found_is_invalid_input(forked, invoke):
    done = invoke("plan", "--model", "nowhere:build", "--gpus", "8", "--preset", "h100-nvlink")

    assert done.code == 2
    assert "Module 'nowhere' cannot be imported" in " ".join(done.err.split())
