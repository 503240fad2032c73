"""The arguments of each tool, with the descriptions that an assistant reads."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Part = Annotated[
    str,
    Field(
        description="Return only this part of the result, in full if it fits: a path such as "
        "'units[0].passes'. The answer's `left_out` lists the paths that were shortened."
    ),
]
Rank = Annotated[int | None, Field(description="The rank. Default: the median rank.", ge=0)]


class Arguments(BaseModel):
    """Arguments of a tool; unknown ones are an error."""

    model_config = ConfigDict(extra="forbid")


class ListArguments(Arguments):
    """The page of a list of runs."""

    search: Annotated[
        str, Field(description="Only runs whose name, run id, model or tags contain this text.")
    ] = ""
    limit: Annotated[int, Field(ge=1, le=100, description="The most runs to return.")] = 20
    offset: Annotated[int, Field(ge=0, description="The number of newer runs to skip.")] = 0


class RunArguments(Arguments):
    """A run and the part of its result."""

    run: Annotated[str, Field(description="The name of the run, as list_runs gives it.")]
    part: Part = ""


class RankArguments(RunArguments):
    """A run and one of its ranks."""

    rank: Rank = None


class StepArguments(RankArguments):
    """A run, one of its ranks and one of its steps."""

    step: Annotated[
        int | None, Field(ge=0, description="One finished step. Default: the typical step.")
    ] = None


class UnitArguments(RankArguments):
    """A run, one of its ranks and one of its units."""

    unit: Annotated[
        str | None,
        Field(description="Only waits of this FSDP unit; '(root)' is the root."),
    ] = None


class CompareArguments(Arguments):
    """The runs to compare."""

    runs: Annotated[
        list[str],
        Field(min_length=2, max_length=20, description="The reference, then the other runs."),
    ]
    part: Part = ""


class SimulateArguments(RankArguments):
    """Changes of the recorded plan, and another network; null keeps the recorded setting."""

    wrap: Annotated[
        str | None, Field(description="Wrap policy: root, block, every:N or split.")
    ] = None
    forward_prefetch: Annotated[int | None, Field(ge=0, description="Units to prefetch.")] = None
    backward_prefetch: Annotated[int | None, Field(ge=0, description="Units to prefetch.")] = None
    reshard_after_forward: Annotated[
        bool | int | None,
        Field(description="For all units except the root: true, false, or a number of ranks."),
    ] = None
    param_dtype: Annotated[str | None, Field(description="Dtype of all-gathers.")] = None
    reduce_dtype: Annotated[str | None, Field(description="Dtype of reductions.")] = None
    world_size: Annotated[int | None, Field(ge=1, description="Number of ranks.")] = None
    replicas: Annotated[
        int | None, Field(ge=1, description="Replicas of the model (HSDP); 1: all ranks shard.")
    ] = None
    microbatches: Annotated[int | None, Field(ge=1, description="Per step.")] = None
    checkpointing: Annotated[
        Literal["none", "full"] | None, Field(description="Activation checkpointing.")
    ] = None
    bandwidth: Annotated[
        str | None, Field(description="Bus bandwidth of another network, such as '50GB/s'.")
    ] = None
    latency: Annotated[
        str | None, Field(description="Latency of another network, such as '20us'.")
    ] = None


class AdviseArguments(RunArguments):
    """Limits of a search for a better plan."""

    memory_limit: Annotated[
        str | None,
        Field(description="The peak must not exceed it, such as '80GiB'. Default: the device."),
    ] = None
    allow_dtypes: Annotated[
        bool, Field(description="Whether messages may become bfloat16, which changes numerics.")
    ] = False


class DefineArguments(Arguments):
    """The metrics to define."""

    names: Annotated[
        list[str],
        Field(min_length=1, max_length=50, description="Keys of results, such as 'exposed_ns'."),
    ]
