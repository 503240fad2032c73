"""`fsdp-inspect simulate`: what would a step take under another plan?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

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
    print_renderable,
    require_new_file,
    say_how_to_verify,
)

if TYPE_CHECKING:
    from fsdp_inspect.simulation.changes import CheckpointingMode
    from fsdp_inspect.trace.plan import AccumulationSync, FloatDtype


def simulate(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan file; the recorded plan unless given.", metavar="FILE"),
    ] = None,
    wrap: Annotated[
        str | None,
        typer.Option(help="Units of the blocks: root, block, every:N, or split.", metavar="POLICY"),
    ] = None,
    forward_prefetch: Annotated[
        int | None, typer.Option(help="Units gathered ahead in forward.", min=0, metavar="N")
    ] = None,
    backward_prefetch: Annotated[
        int | None, typer.Option(help="Units gathered ahead in backward.", min=0, metavar="N")
    ] = None,
    reshard_after_forward: Annotated[
        str | None,
        typer.Option(
            help="Of every unit but the root: true, false, or how many ranks keep a copy together "
            "until backward gathers it among them.",
            metavar="true|false|N",
        ),
    ] = None,
    param_dtype: Annotated[
        str | None, typer.Option(help="Of all-gathers: bfloat16, float32, ...", metavar="DTYPE")
    ] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Of gradient reduction.", metavar="DTYPE")
    ] = None,
    reduce_scatter_buffers: Annotated[
        int | None, typer.Option(help="Reduce-scatter inputs alive at once.", min=1, metavar="N")
    ] = None,
    separate_reduce_scatter_group: Annotated[
        bool | None,
        typer.Option(
            "--separate-reduce-scatter-group/--shared-reduce-scatter-group",
            help="Whether reduce-scatter has a communicator of its own.",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks; more of them shard.", min=1, metavar="N")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Copies of the model (HSDP); 1: all ranks shard.", min=1, metavar="N"),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Forward and backward passes of a step.", min=1, metavar="N"),
    ] = None,
    accumulation_sync: Annotated[
        str | None,
        typer.Option(
            help="Which of them reduce gradients: every, last, or all_reduce_last (HSDP).",
            metavar="WHEN",
        ),
    ] = None,
    checkpointing: Annotated[
        str | None,
        typer.Option(
            help="Of every block: none, or full (backward repeats its forward).", metavar="MODE"
        ),
    ] = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    node_bandwidth: NodeBandwidthOption = None,
    node_latency: NodeLatencyOption = None,
    write_plan: Annotated[
        Path | None,
        typer.Option(help="Write the simulated plan, to run it.", metavar="FILE"),
    ] = None,
    write_prediction: Annotated[
        Path | None,
        typer.Option(help="Write the prediction, to verify it once the plan ran.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a step under another plan, from one recorded run.

    First the recorded plan itself is played; how far that is off is shown beside the prediction.
    Single changes apply to the recorded plan, or to the one of `--plan`. A prediction that is
    written is held against the run of its plan by `fsdp-inspect verify`.

    Example: `fsdp-inspect simulate runs/demo --wrap every:2 --forward-prefetch 1`
    """
    from fsdp_inspect.predictions.creation import Origin, make_prediction
    from fsdp_inspect.predictions.files import write_prediction as store_prediction
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.simulation.changes import Changes, apply_changes
    from fsdp_inspect.simulation.recorded import observed_plan
    from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
    from fsdp_inspect.simulation.simulate import simulate_plan as simulate_run
    from fsdp_inspect.simulation.simulate import without_events
    from fsdp_inspect.trace.plan import Plan

    require_new_file("--write-plan", write_plan)
    require_new_file("--write-prediction", write_prediction)
    network = (parse_bandwidth(bandwidth), parse_latency(latency))
    node = parse_node_link(node_bandwidth, node_latency)
    source = open_run_argument(run)
    start = observed_plan(source) if plan is None else Plan.load(plan)
    changes = Changes(
        wrap=_check_wrap(wrap),
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        reshard_after_forward=_parse_reshard(reshard_after_forward),
        param_dtype=_parse_dtype(param_dtype, "--param-dtype"),
        reduce_dtype=_parse_dtype(reduce_dtype, "--reduce-dtype"),
        reduce_scatter_buffers=reduce_scatter_buffers,
        separate_reduce_scatter_group=separate_reduce_scatter_group,
        world_size=world_size,
        replicas=replicas,
        microbatches=microbatches,
        accumulation_sync=_parse_sync(accumulation_sync),
        checkpointing=_parse_checkpointing(checkpointing),
    )
    wanted = apply_changes(
        resolve_plan(start, source.manifest), changes, shapes_of(source.manifest)
    )
    result = simulate_run(
        source, wanted, bus_bytes_per_s=network[0], latency_ns=network[1], node=node
    )
    if write_plan is not None:
        result.plan.dump(write_plan)
    if write_prediction is not None:
        origin = Origin(
            made_by="simulate", bus_bytes_per_s=network[0], latency_ns=network[1], node=node
        )
        store_prediction(make_prediction(source, result, origin), write_prediction)
        say_how_to_verify(write_prediction)
    if as_json:
        print(render_run_json(source, without_events(result)))
        return
    from fsdp_inspect.report.simulation import render_simulation

    print_renderable(render_simulation(result))


def _check_wrap(policy: str | None) -> str | None:
    from fsdp_inspect.simulation.changes import WRAPS, is_wrap

    if policy is None or is_wrap(policy):
        return policy
    raise typer.BadParameter(
        f"{policy!r} is no wrap policy. Expected {WRAPS}.", param_hint="--wrap"
    )


def _parse_reshard(text: str | None) -> bool | int | None:
    if text is None:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise typer.BadParameter(
        f"{text!r} is no setting of it. Expected true, false, or a number of ranks from 1.",
        param_hint="--reshard-after-forward",
    )


def _parse_sync(text: str | None) -> "AccumulationSync | None":
    from fsdp_inspect.trace.plan import AccumulationSync

    if text is None:
        return None
    legal: dict[str, AccumulationSync] = {sync: sync for sync in get_args(AccumulationSync)}
    if text not in legal:
        raise typer.BadParameter(
            f"{text!r} is no such moment. Expected one of {', '.join(legal)}.",
            param_hint="--accumulation-sync",
        )
    return legal[text]


def _parse_checkpointing(text: str | None) -> "CheckpointingMode | None":
    from fsdp_inspect.simulation.changes import CheckpointingMode

    if text is None:
        return None
    legal: dict[str, CheckpointingMode] = {mode: mode for mode in get_args(CheckpointingMode)}
    if text not in legal:
        raise typer.BadParameter(
            f"{text!r} is not played. Expected one of {', '.join(legal)}. What selective "
            "checkpointing keeps a run does not tell: fsdp-inspect forecast does.",
            param_hint="--checkpointing",
        )
    return legal[text]


def _parse_dtype(text: str | None, option: str) -> "FloatDtype | None":
    from fsdp_inspect.trace.plan import FloatDtype

    if text is None:
        return None
    legal: dict[str, FloatDtype] = {dtype: dtype for dtype in get_args(FloatDtype)}
    if text not in legal:
        raise typer.BadParameter(
            f"{text!r} is no dtype of a plan. Expected one of {', '.join(legal)}.",
            param_hint=option,
        )
    return legal[text]
