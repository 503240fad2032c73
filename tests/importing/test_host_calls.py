"""Calls of an imported trace that stop the host, by line."""

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


def with_driver_calls(folder):
    """Three steps of 1 ms; the second has work of the driver, and the device waits for it."""
    trace = TraceWriter()
    trace.collective("_allgather_base", 0, 2, issued=0)
    for step in range(3):
        begin = 1000 * step
        trace.annotate(f"ProfilerStep#{step}", begin, begin + 1000)
        trace.kernel("ampere_bf16_gemm", begin + 100, begin + 300, issued=begin + 10)
        if step == 1:
            calls = [
                ("cudaMalloc", 1310, 1400),
                ("cudaStreamBeginCapture", 1410, 1412),
                ("cudaStreamEndCapture", 1500, 1501),
                ("cudaFreeAsync", 1510, 1530),
                ("cudaStreamCreate", 1530, 1535),
            ]
            for number, (name, start, end) in enumerate(calls):
                trace.add("cuda_runtime", name, start, end, args={"correlation": 5000 + number})
            trace.add("overhead", "Runtime Triggered Module Loading", 1540, 1590, pid=-1, tid=0)
            trace.add("overhead", "Activity Buffer Request", 1590, 1600, pid=-1, tid=0)
            python = {"tid": MAIN, "args": {}}
            trace.add("python_function", "train.py(7): grow", 1300, 1405, **python)
        trace.kernel("ampere_bf16_gemm", begin + 700, begin + 950, issued=begin + 650)
    import_traces(trace.write(folder / "rank0.json"), folder / "run")
    return fsdp_inspect.open_run(folder / "run")


def test_work_of_the_driver_is_a_mark_a_share_and_a_filter(tmp_path):
    run = with_driver_calls(tmp_path)
    found = {stop.what: stop for stop in run.host_stops().stops}
    assert {what: stop.duration_ns for what, stop in found.items()} == {
        "device allocation": 90_000 // 3,
        "graph capture": 91_000 // 3,
        "kernel loading": 50_000 // 3,
    }
    assert found["device allocation"].place == "train.py:7"
    # The device is idle from 1300 to 1700 µs, and longer than the calls take.
    assert all(stop.idle_ns == stop.duration_ns for stop in found.values())
    assert not any(stop.is_cost for stop in found.values())
    steps = {point.step: point.contains for point in run.step_times().over_steps}
    assert steps == {
        0: (),
        1: ("graph capture", "device allocation", "kernel loading"),
        2: (),
    }
    ratios = run.breakdown().stop_ratios
    mean_ns = found["kernel loading"].mean_step_ns
    assert ratios["graph capture"] == 30_333 / mean_ns
    assert list(ratios) == ["graph capture", "device allocation", "kernel loading"]


def test_the_verdict_names_work_of_the_driver_that_leaves_the_device_idle(tmp_path):
    verdict = with_driver_calls(tmp_path).summary().verdict
    assert verdict.limit == "host"
    (named,) = (step for step in verdict.next_steps if "CUDA_MODULE_LOADING=EAGER" in step)
    assert "The device is idle for 16.7 µs a step during such calls" in named


def test_what_is_launched_in_a_capture_is_not_missing(tmp_path):
    trace = TraceWriter()
    trace.collective("_allgather_base", 0, 2, issued=0)
    trace.add("cuda_runtime", "cudaStreamBeginCapture", 10, 11, args={"correlation": 1})
    for number in range(50):
        launched = {"correlation": 5000 + number}
        trace.add("cuda_runtime", "cudaLaunchKernel", 12 + number, 12.5 + number, args=launched)
    trace.add("cuda_runtime", "cudaStreamEndCapture", 90, 91, args={"correlation": 2})
    trace.kernel("ampere_bf16_gemm", 100, 140, issued=95)
    import_traces(trace.write(tmp_path / "rank0.json"), tmp_path / "run")
    run = fsdp_inspect.open_run(tmp_path / "run")
    assert "lacks" not in run.summary().verdict.sentence
    (stop,) = run.host_stops().stops
    assert (stop.what, stop.duration_ns, stop.idle_ns) == ("graph capture", 81_000, 81_000)
