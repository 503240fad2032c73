"""What is advice asked for, and which commands ask for it again, run its plan and verify it?"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_inspect.simulation.network import NodeLink
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN
from fsdp_inspect.trace.run import RunManifest

_SHARDING_FLAGS = frozenset(
    f"--{no}{name.replace('_', '-')}" for name in DECIDED_BY_PLAN for no in ("", "no-")
)
"""The trainer's flags that a plan says already, and that it refuses beside one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """What the advice is for."""

    memory_limit: int | None = None
    """Bytes that the predicted peak must not exceed; None: the device's memory, and no limit on
    CPU."""
    time_limit_ns: int | None = None
    """The longest step of the smallest plan; None: the recorded one."""
    allow_dtypes: bool = False
    """Whether messages may become bfloat16."""
    bus_bytes_per_s: float | None = None
    """Of another network that plans are for; None: the run's own."""
    latency_ns: float | None = None
    """The same."""
    node: NodeLink | None = None
    """The link within a node; None: as far as the run tells."""
    run_name: str = "RUN"
    """How commands name the run."""
    plan_file: str = "plan.toml"
    """How commands name the written plan."""


def how_to_apply(plan_file: str) -> str:
    """Lines that shard a model by a plan file."""
    return (
        "import fsdp_inspect\n"
        f"plan = fsdp_inspect.Plan.load({plan_file!r})\n"
        "fsdp_inspect.apply_plan(model, plan, mesh)  # no fully_shard calls of your own"
    )


def how_to_verify(
    manifest: RunManifest, wishes: AdviceRequest, *, take: int | None = None
) -> tuple[str, ...]:
    """How to record the new plan, and to compare.

    Args:
        manifest: Of the recorded run.
        wishes: What the advice is for.
        take: Only the first so many changes: how to write their plan comes first then.
    """
    write: tuple[str, ...] = ()
    if take is not None:
        file = shlex.quote(wishes.plan_file)
        write = (f"{_advise_command(wishes)} --take {take} --write {file}",)
    prediction = wishes.plan_file.removesuffix(".toml") + ".prediction.json"
    hold = (
        f"fsdp-inspect verify {shlex.quote(prediction)} NEW_RUN "
        f"--baseline {shlex.quote(wishes.run_name)}"
    )
    if "instrumented_trainer" not in manifest.command:
        again = "Record the script with these lines, as the first run was recorded; then:"
        return *write, again, hold
    again = f"{shlex.join(_renamed(manifest.command))} --plan {shlex.quote(wishes.plan_file)}"
    flags = [word for word in manifest.command if word.split("=")[0] in _SHARDING_FLAGS]
    if flags:
        again = f"{again}  # without {', '.join(flags)}: the plan says it"
    return *write, again, hold


def _renamed(command: Sequence[str]) -> list[str]:
    """A command of the trainer whose run has another name than the recorded one."""
    words = list(command)
    for at, word in enumerate(words):
        if word.startswith("--name="):
            words[at] = f"{word}-advised"
        elif word == "--name" and at + 1 < len(words):
            words[at + 1] = f"{words[at + 1]}-advised"
    return words


def _advise_command(wishes: AdviceRequest) -> str:
    """The command that gives this advice again."""
    words = ["fsdp-inspect", "advise", wishes.run_name]
    if wishes.memory_limit is not None:
        words += ["--memory-limit", str(wishes.memory_limit)]
    if wishes.time_limit_ns is not None:
        words += ["--time-limit", f"{wishes.time_limit_ns}ns"]
    words += ["--allow-dtypes"] if wishes.allow_dtypes else []
    if wishes.bus_bytes_per_s is not None:
        words += ["--bandwidth", f"{wishes.bus_bytes_per_s:.0f}B/s"]
    if wishes.latency_ns is not None:
        words += ["--latency", f"{wishes.latency_ns:.0f}ns"]
    return shlex.join([*words, *_words_of_node(wishes.node or NodeLink())])


def _words_of_node(node: NodeLink) -> Iterator[str]:
    if node.bus_bytes_per_s is not None:
        yield from ("--node-bandwidth", f"{node.bus_bytes_per_s:.0f}B/s")
    if node.latency_ns is not None:
        yield from ("--node-latency", f"{node.latency_ns:.0f}ns")
