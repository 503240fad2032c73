"""The request for advice, and the commands that repeat it, run its plan and verify it."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_inspect.simulation.network import NodeLink


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """The limits, the network and the file names of a request for advice."""

    memory_limit: int | None = None
    """Bytes that the peak must not exceed; None: the memory of the device without the CUDA context
    and libraries, or no limit on CPU."""
    allow_dtypes: bool = False
    """Whether messages may become bfloat16."""
    bus_bytes_per_s: float | None = None
    """Bandwidth of another network; None: the run's own."""
    latency_ns: float | None = None
    """Latency of another network; None: the run's own."""
    node: NodeLink | None = None
    """The link within a node; None: as measured in the run."""
    run_name: str = "RUN"
    """The name of the run in commands."""
    plan_file: str = "plan.toml"
    """The name of the written plan in commands."""
    is_written: bool = False
    """Whether the plan file and its prediction are written with this advice."""
    take: int | None = None
    """The number of changes in the written plan; None: all."""


def how_to_apply(plan_file: str) -> str:
    """Lines of Python that shard a model by a plan file."""
    return (
        "import fsdp_inspect\n"
        f"plan = fsdp_inspect.Plan.load({plan_file!r})\n"
        "fsdp_inspect.apply_plan(model, plan)  # instead of fully_shard"
    )


def how_to_verify(
    request: AdviceRequest, launch: str, *, take: int | None = None
) -> tuple[str, ...]:
    """Commands that record the new plan and compare it with the baseline.

    Args:
        request: The request for advice.
        launch: The recorded launch line with the change applied.
        take: Only the first `take` changes.

    Returns:
        One line each. The first one writes the plan, unless it is written with this advice.
    """
    write: tuple[str, ...] = ()
    if not request.is_written or take != request.take:
        part = "" if take is None else f" --take {take}"
        write = (f"{_advise_command(request)}{part} --write {shlex.quote(request.plan_file)}",)
    prediction = request.plan_file.removesuffix(".toml") + ".prediction.json"
    hold = (
        f"fsdp-inspect verify {shlex.quote(prediction)} NEW_RUN "
        f"--baseline {shlex.quote(request.run_name)}"
    )
    return *write, launch, hold


def _advise_command(request: AdviceRequest) -> str:
    """The command that repeats this advice."""
    words = ["fsdp-inspect", "advise", request.run_name]
    if request.memory_limit is not None:
        words += ["--memory-limit", f"{request.memory_limit}B"]
    words += ["--allow-dtypes"] if request.allow_dtypes else []
    if request.bus_bytes_per_s is not None:
        words += ["--bandwidth", f"{request.bus_bytes_per_s:.0f}B/s"]
    if request.latency_ns is not None:
        words += ["--latency", f"{request.latency_ns:.0f}ns"]
    return shlex.join([*words, *_words_of_node(request.node or NodeLink())])


def _words_of_node(node: NodeLink) -> Iterator[str]:
    if node.bus_bytes_per_s is not None:
        yield from ("--node-bandwidth", f"{node.bus_bytes_per_s:.0f}B/s")
    if node.latency_ns is not None:
        yield from ("--node-latency", f"{node.latency_ns:.0f}ns")
