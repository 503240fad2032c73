"""`fsdp-inspect simulate`: predict a step under another plan."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fsdp_inspect.cli.arguments import (
    BandwidthOption,
    JsonOption,
    LatencyOption,
    NodeBandwidthOption,
    NodeLatencyOption,
    RunArgument,
    open_run_argument,
    parse_bandwidth,
    parse_latency,
    parse_node_link,
    require_new_file,
    say_how_to_verify,
    show_result,
    whole_number,
)

_SEPARATE = "separate"


def _parse_wrap(text: str) -> str:
    from fsdp_inspect.simulation.changes import WRAPS, is_wrap

    if is_wrap(text):
        return text
    raise typer.BadParameter(f"invalid wrap policy {text!r}. Expected {WRAPS}.")


def _parse_reshard(text: str) -> bool | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise typer.BadParameter(
        f"invalid setting {text!r}. Expected true, false, or a number of ranks above 0."
    )


def _parse_bucket_cap(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (size := float(text)) < math.inf:
            return size
    raise typer.BadParameter(f"invalid size {text!r}. Expected MiB above 0, for example 25.")


def _parse_reduce_scatter_group(text: str) -> str:
    return _choose(text, (_SEPARATE, "shared"))


def _parse_sync(text: str) -> str:
    from fsdp_inspect.trace.plan import AccumulationSync

    return _choose(text, get_args(AccumulationSync))


def _parse_dtype(text: str) -> str:
    from fsdp_inspect.trace.plan import FloatDtype

    return _choose(text, get_args(FloatDtype))


def _parse_backward_prefetch(text: str) -> int | str:
    from fsdp_inspect.trace.plan import BackwardPrefetch

    return whole_number(0)(text) if text.isdecimal() else _choose(text, get_args(BackwardPrefetch))


def _parse_checkpointing(text: str) -> str:
    from fsdp_inspect.simulation.changes import CheckpointingMode

    hint = " For selective checkpointing, use fsdp-inspect plan memory."
    return _choose(text, get_args(CheckpointingMode), hint)


def _choose(text: str, choices: Sequence[str], hint: str = "") -> str:
    """Return one of the choices, whose types are imported when the option is used."""
    if text in choices:
        return text
    raise typer.BadParameter(f"invalid value {text!r}. Expected {', '.join(choices)}.{hint}")


def _elements(text: str) -> Any:
    """An option for a number of elements."""
    return typer.Option(help=text, parser=whole_number(0), metavar="N")


def simulate(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    plan: Annotated[
        Path | None,
        typer.Option(help="The plan to simulate; default the recorded plan.", metavar="FILE"),
    ] = None,
    wrap: Annotated[
        str | None,
        typer.Option(
            help="Wrap policy: root, block, every:N or split.", metavar="POLICY", parser=_parse_wrap
        ),
    ] = None,
    forward_prefetch: Annotated[
        int | None,
        typer.Option(help="Units to prefetch in forward.", parser=whole_number(0), metavar="N"),
    ] = None,
    backward_prefetch: Annotated[
        Any,
        typer.Option(
            help="Units to prefetch in backward. FSDP1: BACKWARD_PRE, BACKWARD_POST or none.",
            parser=_parse_backward_prefetch,
            metavar="N",
        ),
    ] = None,
    limit_all_gathers: Annotated[
        bool | None,
        typer.Option(
            "--limit-all-gathers/--no-limit-all-gathers",
            help="FSDP1: whether the host waits until at most two all-gathers are in flight.",
            show_default=False,
        ),
    ] = None,
    reshard_after_forward: Annotated[
        Any,
        typer.Option(
            help="Setting of all units except the root: true, false, or N to reshard to groups of "
            "N ranks.",
            metavar="VALUE",
            parser=_parse_reshard,
        ),
    ] = None,
    param_dtype: Annotated[
        Any,
        typer.Option(
            help="Dtype of all-gathers, for example bfloat16.", metavar="DTYPE", parser=_parse_dtype
        ),
    ] = None,
    reduce_dtype: Annotated[
        Any,
        typer.Option(help="Dtype of gradient reductions.", metavar="DTYPE", parser=_parse_dtype),
    ] = None,
    reduce_scatter_buffers: Annotated[
        int | None,
        typer.Option(
            help="Largest number of reduce-scatter inputs that exist at once.",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    reduce_scatter_group: Annotated[
        Any,
        typer.Option(
            help="Communicator of reduce-scatter: separate, or shared with all-gather.",
            metavar="KIND",
            parser=_parse_reduce_scatter_group,
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks.", parser=whole_number(1), metavar="N")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas of the model (HSDP); 1 means that all ranks shard.",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Microbatches per step.", parser=whole_number(1), metavar="N"),
    ] = None,
    accumulation_sync: Annotated[
        Any,
        typer.Option(
            help="Microbatches that reduce gradients: every, last, or all_reduce_last (HSDP).",
            metavar="WHEN",
            parser=_parse_sync,
        ),
    ] = None,
    checkpointing: Annotated[
        Any,
        typer.Option(
            help="Activation checkpointing of all blocks: none or full.",
            metavar="MODE",
            parser=_parse_checkpointing,
        ),
    ] = None,
    bucket_cap: Annotated[
        Any,
        typer.Option(
            "--bucket-cap",
            help="DDP: MiB at which a bucket is full (bucket_cap_mb).",
            metavar="MIB",
            parser=_parse_bucket_cap,
            show_default=False,
        ),
    ] = None,
    reduce_bucket_size: Annotated[
        int | None,
        typer.Option(
            help="ZeRO: the most elements of a bucket of gradients.",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    zero_stage: Annotated[
        int | None,
        typer.Option(
            help="Stage of a run with ZeRO-1 or ZeRO-2: 1 or 2.",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    prefetch_bucket_size: Annotated[
        int | None, _elements("ZeRO-3: the elements of a prefetch.")
    ] = None,
    max_live_parameters: Annotated[
        int | None, _elements("ZeRO-3: the gathered elements with which nothing is prefetched.")
    ] = None,
    max_reuse_distance: Annotated[
        int | None,
        _elements("ZeRO-3: the elements within which a reused parameter stays gathered."),
    ] = None,
    param_persistence_threshold: Annotated[
        int | None, _elements("ZeRO-3: the most elements of a parameter that stays gathered.")
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="DDP: whether all-reduces run while backward computes. ZeRO: overlap_comm.",
            show_default=False,
        ),
    ] = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    node_bandwidth: NodeBandwidthOption = None,
    node_latency: NodeLatencyOption = None,
    write_plan: Annotated[
        Path | None,
        typer.Option(help="Write the simulated plan to a new file.", metavar="FILE"),
    ] = None,
    write_prediction: Annotated[
        Path | None,
        typer.Option(
            help="Write the prediction to a new file, for `fsdp-inspect verify`.", metavar="FILE"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a step under another plan, from one recorded run.

    Options change the recorded plan, or the plan of `--plan`. The recorded plan is simulated first,
    as a self-check, and the error of its step time is shown with the prediction. After you run the
    plan, `fsdp-inspect verify` compares a written prediction with the run.

    A run of DDP has buckets instead of a plan: give --bucket-cap or --no-overlap. So has a run of
    ZeRO-1 or ZeRO-2: give --reduce-bucket-size (elements), --zero-stage, --overlap or --no-overlap.
    ZeRO-3 (on CPU): give --reduce-bucket-size, --prefetch-bucket-size, --max-live-parameters,
    --max-reuse-distance or --param-persistence-threshold.

    Example: `fsdp-inspect simulate runs/demo --wrap every:2 --forward-prefetch 1`
    """
    from fsdp_inspect.advice.prediction_creation import PredictionOrigin, make_prediction
    from fsdp_inspect.report.simulation import render_buckets, render_simulation
    from fsdp_inspect.simulation.predictions.ledger import write_prediction as store_prediction
    from fsdp_inspect.trace.plan import Plan

    require_new_file("--write-plan", write_plan)
    require_new_file("--write-prediction", write_prediction)
    network = (parse_bandwidth(bandwidth), parse_latency(latency))
    node = parse_node_link(node_bandwidth, node_latency)
    opened = open_run_argument(run)
    changes = {
        "wrap": wrap,
        "forward_prefetch": forward_prefetch,
        "backward_prefetch": backward_prefetch,
        "limit_all_gathers": limit_all_gathers,
        "reshard_after_forward": reshard_after_forward,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "reduce_scatter_buffers": reduce_scatter_buffers,
        "separate_reduce_scatter_group": (
            None if reduce_scatter_group is None else reduce_scatter_group == _SEPARATE
        ),
        "world_size": world_size,
        "replicas": replicas,
        "microbatches": microbatches,
        "accumulation_sync": accumulation_sync,
        "checkpointing": checkpointing,
    }
    of_messages = {
        "reduce_bucket_size": reduce_bucket_size,
        "zero_stage": zero_stage,
        "overlaps": overlap,
        "prefetch_bucket_size": prefetch_bucket_size,
        "max_live_parameters": max_live_parameters,
        "max_reuse_distance": max_reuse_distance,
        "param_persistence_threshold": param_persistence_threshold,
    }
    asked = (bucket_cap, *of_messages.values())
    if opened.manifest.sharder_traits.has_messages or any(each is not None for each in asked):
        of_plans = {"plan": plan, **changes, "node_bandwidth": node_bandwidth}
        of_plans |= {"node_latency": node_latency, "write_plan": write_plan}
        _expect_no_plan({**of_plans, "write_prediction": write_prediction})
        found = opened.simulate_buckets(
            bucket_cap, bandwidth=network[0], latency_ns=network[1], **of_messages
        )
        show_result(found, render_buckets, as_json=as_json, run=opened.source)
        return
    result = opened.simulate(
        None if plan is None else Plan.load(plan),
        bandwidth=network[0],
        latency_ns=network[1],
        node=node,
        **changes,
    )
    if write_plan is not None:
        result.plan.dump(write_plan)
    if write_prediction is not None:
        origin = PredictionOrigin(
            made_by="simulate", bus_bytes_per_s=network[0], latency_ns=network[1], node=node
        )
        store_prediction(make_prediction(opened.source, result, origin), write_prediction)
        say_how_to_verify(write_prediction)
    show_result(result, render_simulation, as_json=as_json, run=opened.source)


def _expect_no_plan(values: Mapping[str, Any]) -> None:
    """Check that no option of a sharding plan is given for buckets.

    Raises:
        BadParameter: Some are.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None]
    if given:
        raise typer.BadParameter(
            "Buckets of gradients have no sharding plan. Expected --bucket-cap (DDP), "
            "--reduce-bucket-size and --zero-stage (ZeRO), the settings of gathers (ZeRO-3), "
            f"--no-overlap, --bandwidth and --latency only. Omit {', '.join(given)}."
        )
