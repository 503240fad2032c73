"""What a rank observes of its training; `analysis.correctness` judges it."""

from typing import Annotated

from pydantic import Field

from fsdp_inspect.trace.records import Amount, Index, Record


class OptimizerSeen(Record):
    """The tensors of one optimizer, as seen before its updates."""

    place: str = ""
    """The user's line that calls its `step`, `file:line`; empty: unknown."""
    num_steps: Amount
    num_tensors: Amount
    num_of_model: Amount
    """Tensors that are parameters of a recorded model."""
    num_with_gradient: Amount
    """Tensors that had a gradient before an update."""
    num_alike: Amount
    """Tensors with the shape of a parameter before sharding; each such parameter counts once."""


class BatchSeen(Record):
    """The values of a batch of a DataLoader on the CPU."""

    step: Index
    digest: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of the first values of its first tensors, without constant ones."""


class LossSeen(Record):
    """A mean over tokens or samples, and the backward that followed."""

    step: Index
    microbatch: Index
    num_tokens: Amount
    """Labels that are not ignored."""
    scale: float
    """The gradient of the value that backward started from with respect to the mean."""
    place: str = ""
    """The user's line, `file:line`; empty: unknown."""


class ValuesSeen(Record):
    """Whether the loss and the parameters of a rank stayed finite.

    A look before step n shows the parameters that step n - 1 left.
    """

    loss_step: Index | None = None
    """The first step whose backward began from a loss that is not finite."""
    loss_place: str = ""
    """The user's line that called this backward, `file:line`; empty: unknown."""
    finite_step: Index | None = None
    """The last step before which all trained parameters were finite."""
    step: Index | None = None
    """The first step before which some were not."""
    units: list[Annotated[int, Field(ge=-1)]] = Field(default_factory=list)
    """The units of these; -1: parameters of no unit."""


class TrainingSeen(Record):
    """The observations of one rank."""

    num_trainable: Amount = 0
    """Parameters of the recorded models that require a gradient."""
    num_with_gradient: Amount = 0
    """Those that had a gradient before an update."""
    optimizers: list[OptimizerSeen] = Field(default_factory=list)
    batches: list[BatchSeen] = Field(default_factory=list)
    losses: list[LossSeen] = Field(default_factory=list)
    values: ValuesSeen = ValuesSeen()
