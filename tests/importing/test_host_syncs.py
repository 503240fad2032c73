"""Calls of an imported trace in which the host waits for the device, by line."""

import fsdp_inspect
from fsdp_inspect.importing.kernel_names import user_line
from fsdp_inspect.importing.kineto import import_traces
from tests.importing.kineto_traces import MAIN, TraceWriter


def traced(folder, *, with_stack=True):
    """Four kernels of 40 µs; after each the host reads a value and launches 30 µs later."""
    trace = TraceWriter()
    trace.annotate("FSDP::pre_forward (layers.0)", 0, 1)
    trace.annotate("FSDP::post_forward (layers.0)", 299, 300)
    trace.annotate("Optimizer.step#AdamW.step", 305, 306)
    trace.collective("_allgather_base", 0, 2, issued=0)
    for at in range(0, 280, 70):
        trace.kernel("ampere_bf16_gemm", at, at + 40, issued=at)
        trace.operator("aten::item", at + 10, at + 42)
        sync = {"tid": MAIN, "args": {"correlation": 1000 + at}}
        trace.add("cuda_runtime", "cudaStreamSynchronize", at + 11, at + 41, **sync)
        if with_stack:
            python = {"tid": MAIN, "args": {}}
            trace.add("python_function", "train.py(12): main", at + 5, at + 60, **python)
            trace.add("python_function", "router.py(31): route", at + 8, at + 50, **python)
            trace.add("python_function", "torch/nn/modules/module.py(9): _call", at + 9, at + 49,
                      **python)  # fmt: skip
    import_traces(trace.write(folder / "rank0.json"), folder / "run")
    return fsdp_inspect.open_run(folder / "run")


def test_reads_have_their_line_unit_and_idle_time(tmp_path):
    found = traced(tmp_path).host_stops()
    (stop,) = found.stops
    assert (stop.what, stop.place) == (".item()", "router.py:31")
    assert (stop.fqn, stop.phase) == ("layers.0", "forward")
    assert stop.count == 3  # no work follows the fourth
    assert stop.idle_ns == 3 * 30_000
    assert stop.duration_ns == 3 * 30_000
    assert not stop.is_cost


def test_the_verdict_names_the_line_with_the_idle_time(tmp_path):
    verdict = traced(tmp_path).summary().verdict
    assert verdict.limit == "host"
    assert any(".item() at router.py:31 (3 a step, 90.0 µs idle)" in step
               for step in verdict.next_steps)  # fmt: skip


def test_without_stacks_the_line_is_unknown(tmp_path):
    (stop,) = traced(tmp_path, with_stack=False).host_stops().stops
    assert (stop.place, stop.idle_ns) == ("", 3 * 30_000)


def test_a_device_that_works_on_another_stream_is_not_idle(tmp_path):
    trace = TraceWriter()
    trace.kernel("ampere_bf16_gemm", 0, 40, issued=0)
    trace.kernel("ampere_bf16_gemm", 10, 90, issued=1, stream=9)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 20, 41, tid=MAIN, args={"correlation": 99})
    trace.kernel("ampere_bf16_gemm", 120, 130, issued=60)
    trace.collective("_allgather_base", 0, 2, issued=0)
    import_traces(trace.write(tmp_path / "rank0.json"), tmp_path / "run")
    (stop,) = fsdp_inspect.open_run(tmp_path / "run").host_stops().stops
    assert stop.idle_ns == 0


def test_lines_of_libraries_are_not_the_users():
    assert user_line("train.py(12): main") == "train.py:12"
    assert user_line("/home/me/models/llama.py(7): forward") == "/home/me/models/llama.py:7"
    for name in (
        "torch/nn/modules/module.py(1): _call_impl",
        "threading.py(3): run",
        "/usr/lib/python3.12/site-packages/transformers/a.py(3): forward",
        "<built-in method item of Tensor object at 0x7>",
    ):
        assert user_line(name) == ""
