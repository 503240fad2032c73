"""Tokens per second, MFU and the utilisation of the device, each with its origin."""

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.throughput import measure_throughput
from fsdp_inspect.hardware import GPUS
from fsdp_inspect.report.text import render_summary
from fsdp_inspect.trace.kernels import KernelColumns, KernelRecord
from fsdp_inspect.trace.run import ModelInfo
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import RunBuilder
from tests.report.terminal_text import text_of

STEP_NS = 100_000_000
SETTINGS = {"seq_len": 128, "batch_size": 2, "microbatches": 3}
H100 = "NVIDIA H100 80GB HBM3"


def build(logged=(), *, num_steps=6, **manifest):
    """Two ranks with steps of 100 ms; `logged` maps the name of a number to its values by step."""
    builder = RunBuilder(world_size=2, warmup_steps=1, **manifest)
    for number in range(2):
        rank = builder.rank(number)
        rank.record = {"scalar_names": list(logged)}
        for step in range(num_steps):
            rank.step(step, step * STEP_NS, (step + 1) * STEP_NS)
            rank.forward("layers.0", step * STEP_NS, step * STEP_NS + 10)
            for index, name in enumerate(logged):
                value = logged[name][step]
                row = {"step": step, "name": index, "time_ns": 0, "value": value}
                rank.logged += [] if value is None else [row]
    return builder


def measure(*arguments, **manifest):
    return measure_throughput(build(*arguments, **manifest).build())


@pytest.mark.parametrize("name", ["num_input_tokens_seen", "num_tokens", "n_tokens_seen"])
def test_tokens_come_from_a_logged_total(name):
    # 500 tokens per step of 100 ms; logged at every second step.
    found = measure({name: [500, None, 1500, None, 2500, None]})
    assert found.tokens_per_s == pytest.approx(5_000)
    assert found.tokens_origin == f"logged as {name}"


def test_a_logged_rate_is_the_median_after_warm_up():
    found = measure({"tokens_per_s": [1, 700, 900, 800, float("nan"), 800]})
    assert (found.tokens_per_s, found.tokens_origin) == (800, "logged as tokens_per_s")


def test_the_rate_of_torchtitan_is_that_of_one_rank():
    found = measure({"throughput(tps)": [1.0, 300.0, 300.0, 300.0, 300.0, 300.0]})
    assert found.tokens_per_s == 600
    assert found.tokens_origin == "logged as throughput(tps) of each rank"


def test_tokens_come_from_settings_if_none_are_logged():
    found = measure(config=SETTINGS)
    assert found.tokens_per_s == pytest.approx(128 * 2 * 3 * 2 / 0.1)
    assert found.tokens_origin == "from the settings of the run"


@pytest.mark.parametrize(
    "manifest",
    [
        {"config": {"seq_len": 128, "batch_size": 2}},
        {"config": {**SETTINGS, "batch_size": "2"}},
        {"config": SETTINGS, "mesh": {"shard": 1, "tp": 2}},
    ],
    ids=["no microbatches", "text", "ranks that share tokens"],
)
def test_without_certain_settings_tokens_are_unknown(manifest):
    assert measure(**manifest) is None


def test_a_total_that_is_logged_once_is_no_rate():
    assert measure({"num_tokens": [500, *[None] * 5]}) is None


def decoder(**manifest):
    """A dense decoder in bfloat16 with 96 elements in matrices and 8 query channels."""
    known = {"config": SETTINGS, "device_name": H100, "device_type": "cuda"}
    model = ModelInfo(class_name="Decoder", num_parameters=200, num_trainable_parameters=200)
    builder = build(**{**known, "model": model, **manifest})
    shapes = {"wq.weight": [8, 4], "w1.weight": [16, 4], "norm.weight": [4]}
    builder.unit("layers.0", param_dtype="bfloat16", parameters=shapes)
    builder.unit("layers.1", param_dtype="bfloat16", parameters={"tok_embed.weight": [26, 4]})
    return builder


def test_mfu_of_a_dense_decoder_is_derived_from_its_shapes():
    found = measure_throughput(decoder().build())
    flops = 6 * (8 * 4 + 16 * 4 + 128 * 8)
    peak = GPUS["h100-nvlink"].bf16_flops * 2
    assert found.mfu_ratio == pytest.approx(found.tokens_per_s * flops / peak)
    assert found.mfu_origin == "of 989 TFLOP/s of H100 SXM, bfloat16"


@pytest.mark.parametrize(
    ("fqn", "changes"),
    [
        ("layers.0", {"param_dtype": "float32"}),
        ("layers.0", {"parameters": {"w1.weight": [16, 4]}}),
        ("layers.1", {"parameters": {"experts.w1": [4, 16, 4]}}),
        ("layers.1", {"parameters": {"router.weight": [4, 16]}}),
    ],
    ids=["float32", "no known attention", "grouped experts", "router"],
)
def test_mfu_is_unknown_if_the_operations_are_not_certain(fqn, changes):
    builder = decoder()
    builder.unit(fqn, **changes)
    found = measure_throughput(builder.build())
    assert (found.mfu_ratio, found.mfu_origin) == (None, "")


def test_mfu_is_unknown_on_another_device_or_with_frozen_parameters():
    frozen = ModelInfo(class_name="Lora", num_parameters=200, num_trainable_parameters=20)
    for manifest in ({"device_name": "NVIDIA H100 PCIe"}, {"model": frozen}):
        assert measure_throughput(decoder(**manifest).build()).mfu_ratio is None


def test_a_logged_mfu_counts_first():
    found = measure({"mfu(%)": [1, 40.0, 41.0, 42.0, 41.0, 41.0]}, device_name=H100)
    assert found.mfu_ratio == pytest.approx(0.41)
    assert found.mfu_origin == "logged as mfu(%)"


def devices(readings):
    rows = [
        dict.fromkeys(DeviceTable.DTYPES, -1) | {"time_ns": time, "gpu_utilisation_pct": percent}
        for time, percent in readings
    ]
    return DeviceTable.from_rows(rows)


def test_utilisation_is_the_mean_over_timed_steps():
    # The first reading is in the warm-up step, the last is after the last step.
    readings = [(50_000_000, 1), (150_000_000, 80), (350_000_000, 90), (700_000_000, 2)]
    run = build().build(device_tables={0: devices(readings), 1: devices([])})
    assert measure_throughput(run).device_utilisation_ratio == pytest.approx(0.85)


def test_the_energy_is_the_power_of_a_gpu_in_timed_steps():
    # 400 W in two timed steps of 100 ms on each of two GPUs; the first reading is in the warm-up.
    readings = [(50_000_000, 900_000), (150_000_000, 300_000), (350_000_000, 500_000)]
    rows = [
        dict.fromkeys(DeviceTable.DTYPES, -1) | {"time_ns": time, "gpu_power_mw": power}
        for time, power in readings
    ]
    table = DeviceTable.from_rows(rows)
    run = build(config=SETTINGS, device_name=H100).build(device_tables={0: table, 1: devices([])})
    found = measure_throughput(run)
    assert found.rank == 0
    assert found.planned_energy_j_per_step == pytest.approx(70)  # 700 W
    assert found.energy_j_per_step == pytest.approx(40)
    assert found.energy_j_per_token == pytest.approx(2 * 40 / (128 * 2 * 3 * 2))
    text = text_of(render_summary(measure_summary(run)), width=160)
    assert "if each takes the power" in text
    assert "a plan assumes 70 J, the GPU's limit" in text


def test_the_energy_of_the_cpus_is_the_rise_of_their_counter_in_timed_steps():
    # 120 W between the two readings in timed steps.
    readings = [(50_000_000, 0), (150_000_000, 5_000_000), (350_000_000, 29_000_000)]
    rows = [
        dict.fromkeys(DeviceTable.DTYPES, -1) | {"time_ns": time, "package_energy_uj": energy}
        for time, energy in readings
    ]
    run = build().build(device_tables={0: DeviceTable.from_rows(rows), 1: devices([])})
    assert measure_throughput(run).cpu_energy_j_per_step == pytest.approx(12)
    assert "CPU energy per step" in text_of(render_summary(measure_summary(run)), width=160)


def kernels_of(flops):
    columns = {name: [0] for name in KernelColumns.model_fields}
    columns |= {"unit": [0], "flops": [flops], "count": [1], "time_ns": [10]}
    return KernelRecord(
        steps=[3], step_ns=[2 * STEP_NS], names=["gemm"], columns=KernelColumns(**columns)
    )


def test_the_mfu_of_another_model_comes_from_the_operations_of_its_profiled_steps():
    half = GPUS["h100-nvlink"].bf16_flops * 0.5 * STEP_NS / 1e9
    builder = decoder(config={})
    found = measure_throughput(builder.build(kernel_records={0: kernels_of(round(half))}))
    assert found.mfu_ratio == pytest.approx(0.5)  # of a timed step, not of the profiled one
    assert found.mfu_origin.endswith("operations of profiled steps, with recomputation")
    without = measure_throughput(builder.build(kernel_records={0: kernels_of(0)}))
    assert without is None


def test_without_readings_nothing_is_known():
    run = build().build(device_tables={0: devices([(150_000_000, -1)]), 1: devices([])})
    assert measure_throughput(run) is None


def test_the_summary_lists_throughput_with_its_origin():
    text = text_of(render_summary(measure_summary(decoder().build())), width=160)
    assert "from the settings of the run" in text
    assert "of 989 TFLOP/s of H100 SXM, bfloat16" in text
