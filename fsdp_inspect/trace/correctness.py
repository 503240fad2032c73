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
    began_with_state: bool = False
    """Whether it had state before its first observed update."""
    keeps_state: bool = False
    """Whether it had state before a later one."""


class BatchSeen(Record):
    """The values of a batch of a DataLoader on the CPU."""

    step: Index
    digest: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of the first values of its first tensors, without constant ones."""
    inputs: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    """The same of what the model first received after it; None: nothing readable."""


class LossSeen(Record):
    """A mean or a sum over tokens or samples, and the backward that followed."""

    step: Index
    microbatch: Index
    num_tokens: Amount
    """Labels that are not ignored."""
    scale: float
    """The gradient of the value that backward started from with respect to the mean, which is the
    sum / `num_tokens`."""
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


class ParameterSeen(Record):
    """A parameter of which a rank samples up to 64 values."""

    name: str
    unit: Annotated[int, Field(ge=-1)]
    """The index of its unit; -1: none."""
    part: list[Index]
    """The place of the rank among those that hold other parts; empty: the rank holds it whole."""
    is_replica: bool
    """Whether the sharder keeps this part on several ranks."""
    dtype: str
    keeps_copy: bool = False
    """Whether the optimizer keeps what rounding takes from the parameter."""


class UpdateSeen(Record):
    """The sampled parameters around an update; lists are in the order of `parameters`."""

    step: Index
    rate: float
    """The learning rate; 0 if it is not known on the host."""
    factor: float | None
    """The one factor of all sampled gradients between the last backward and the update, as of
    clipping; None: there is none, or it is unknown."""
    gradients: list[float | None]
    """The norms of the sampled gradients before the update."""
    values: list[float | None]
    """The norms of the sampled values before the update."""
    digests: list[Annotated[int, Field(ge=0, lt=1 << 32)]]
    """CRC-32 of these values."""
    num_meant: Amount
    """Sampled values with a gradient that is not zero."""
    num_lost: Amount
    """Those that the update did not change."""


class CoverageSeen(Record):
    """The parameters of the models, compared with those that the optimizers hold."""

    num_updates: Amount = 0
    num_repeated: Amount = 0
    """Updates that used gradients which an update had used before."""
    missing: list[str] = Field(default_factory=list)
    """The first names of parameters with a gradient that no optimizer holds or changes."""
    num_missing: Amount = 0
    missing_values: Amount = 0
    held_values: Amount = 0
    """Values of the parameters that an optimizer holds, if others are missing."""
    units_without: list[Index] = Field(default_factory=list)
    """Units that kept a graph and that an optimizer holds, none of whose parameters ever had a
    gradient before an update."""


class RoundSeen(Record):
    """What happened to a few parameters of an optimizer between two of its updates."""

    step: Index
    num_backwards: Amount
    """Backwards that changed their gradients."""
    num_passes: Amount
    """Backwards, also those without reduction, if the learning rate is known on the host."""
    num_batches: Amount
    """Batches that data loaders gave to the training thread."""
    num_loaders: Amount
    """The passes over data loaders that gave them."""
    num_cleared: Amount
    """Backwards after the first that found the gradients of the one before cleared."""
    num_moved: Amount
    """Backwards that found the parameters changed since the one before or the update."""
    num_rates: Amount
    """Different learning rates at the backwards."""
    is_kept: bool
    """Whether the first backward added to the gradients of the update before."""


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
    coverage: CoverageSeen | None = None
    """None: the recorder does not see all optimizers, or they update partitions."""
    rounds: list[RoundSeen] = Field(default_factory=list)
    backward_place: str = ""
    """The user's line that called the last sampled backward, `file:line`; empty: unknown."""
    parameters: list[ParameterSeen] = Field(default_factory=list)
    updates: list[UpdateSeen] = Field(default_factory=list)
    """The first 8 sampled updates, and the last 4 after them."""
