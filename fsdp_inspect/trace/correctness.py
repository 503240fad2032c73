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
    """Tensors that are trainable parameters of a recorded model."""
    num_frozen: Amount = 0
    """Tensors that are its other parameters."""
    num_with_gradient: Amount
    """Tensors that had a gradient before an update."""
    num_alike: Amount
    """Tensors with the shape of a parameter before sharding; each such parameter counts once."""
    began_with_state: bool = False
    """Whether it had state before its first observed update."""
    keeps_state: bool = False
    """Whether it had state before a later one."""
    has_moved: bool | None = None
    """Whether a tensor changed between its first update and the end of the recording. None: it has
    parameters of the model, or none requires a gradient, or the end is unknown."""


class BatchSeen(Record):
    """The values of a batch of a DataLoader on the CPU."""

    step: Index
    digest: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of values of its first tensors, without constant ones."""
    inputs: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    """The same of what the model first received after it; None: nothing readable."""


class PassSeen(Record):
    """A pass of the training over a DataLoader."""

    digests: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(default_factory=list)
    """Those of its first batches, as in `BatchSeen`; 0: nothing readable."""
    is_shuffled: bool = False
    """Whether its sampler shuffles."""
    has_ended: bool = False
    inputs: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(default_factory=list)
    """What the model first received after each of these batches that a backward followed, in the
    same form."""


class RandomSeen(Record):
    """The random state of a rank's device around the forward of a microbatch."""

    step: Index
    before: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of the state before the forward."""
    is_used: bool
    """Whether the forward changed it."""


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
    dtype: str = ""
    """The dtype of the value; empty: unknown."""
    is_part: bool = False
    """Whether the value that backward started from has other terms, too."""
    is_sum: bool = False
    """Whether the loss is a sum, which the script divides."""


class ValuesSeen(Record):
    """Whether the loss and the parameters of a rank stayed finite.

    A look before step n shows the parameters that step n - 1 left.
    """

    losses: dict[int, float] = Field(default_factory=dict)
    """The finite value that the first backward of a step began from, by step: the first ones."""
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
    masked: list[Annotated[int, Field(ge=-1)]] = Field(default_factory=list)
    """The units of which some were not finite before step 1, as a mask: `step` leaves them out."""


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
    divide_factor: float | None = None
    """The number that the script set for FSDP2 to divide its gradient by; None: it set none."""


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
    weighted: list[float | None] = Field(default_factory=list)
    """Weighted sums of these: that of a sum of gradients is the sum of theirs."""
    weighted_before: list[float | None] = Field(default_factory=list)
    """The same after the last backward; empty: unknown."""
    values: list[float | None]
    """The norms of the sampled values before the update."""
    digests: list[Annotated[int, Field(ge=0, lt=1 << 32)]]
    """CRC-32 of these values."""
    num_meant: Amount
    """Sampled values with a gradient that is not zero."""
    num_lost: Amount
    """Those that the update did not change."""
    num_still: Amount | None = None
    """Those of `num_meant` that are as before the first sampled update; None: unknown."""


class BufferSeen(Record):
    """A buffer of which a rank samples up to 64 values."""

    name: str
    digest: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of these values before the first sampled update."""
    is_constant: bool = False
    """Whether they were the same in each later look, the last one at the end."""


class ClipSeen(Record):
    """Calls that clip gradients, from one line of the user."""

    place: str = ""
    """The user's line, `file:line`; empty: unknown."""
    limit: float
    """The largest norm, or value, that the last call allowed."""
    num_calls: Amount = 0
    num_scaled: Amount = 0
    """Calls while the gradients were multiplied by the scale of a gradient scaler, if this scale is
    larger than the limit."""
    scale: float = 0.0
    """The largest scale at a call; 0: unknown, in earlier recordings."""
    num_early: Amount = 0
    """Calls after which a backward of the same update added to the gradients."""
    num_late: Amount = 0
    """Calls between an update and a backward that found these gradients cleared."""
    num_empty: Amount = 0
    """Calls that found no gradient."""


class WindowSeen(Record):
    """The backwards of an update that has fewer of them than usual."""

    step: Index
    num_backwards: Amount
    scale: float
    """The sum of `LossSeen.scale` over them."""
    ends_pass: bool
    """Whether a pass over a DataLoader ended before the update."""


class WindowsSeen(Record):
    """The backwards of the updates of the only optimizer."""

    num_backwards: Amount = 0
    """The usual number; 0: there is none, or it is 1."""
    scale: float = 0.0
    """The sum of `LossSeen.scale` over them in the last usual update."""
    num_usual: Amount = 0
    """Updates with this number."""
    short: list[WindowSeen] = Field(default_factory=list)
    """The first updates with fewer backwards."""


class CoverageSeen(Record):
    """The parameters of the models, compared with those that the optimizers hold."""

    num_updates: Amount = 0
    num_repeated: Amount = 0
    """Updates that used gradients which an update had used before."""
    num_without_state: Amount = 0
    """Updates of an optimizer without state, after another optimizer had left state for the same
    parameters."""
    missing: list[str] = Field(default_factory=list)
    """The first names of parameters with a gradient that no optimizer holds or changes, and of
    those without a value on this rank that no optimizer holds."""
    num_missing: Amount = 0
    missing_values: Amount = 0
    held_values: Amount = 0
    """Values of the trainable parameters that an optimizer holds, if others are missing."""
    units_without: list[Index] = Field(default_factory=list)
    """Units that kept a graph and that an optimizer holds, none of whose parameters ever had a
    gradient before an update."""
    unreduced: list[str] = Field(default_factory=list)
    """The first names of trainable parameters inside DDP that an optimizer holds, and that the
    reducer does not know."""


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


class StreakSeen(Record):
    """Updates in a row, until the last one, that have something in common."""

    since: Index | None = None
    """The step of the first one; None: the last update is none of them."""
    number: Amount = 0
    num_before: Amount = 0
    """Updates before, counted until 8."""


class LateSeen(Record):
    """What the updates of the whole training show."""

    kept: StreakSeen = StreakSeen()
    """Updates whose first backward added to the gradients of the update before. After the first
    updates, one in five is looked at."""
    unused: StreakSeen = StreakSeen()
    """Of the same updates, those without a gradient that a backward since the last update left."""
    units_without: dict[str, StreakSeen] = Field(default_factory=dict)
    """By index of a unit that kept a graph: updates that had gradients for other units of the
    optimizer and none for it. After the first updates, one in five is looked at."""
    idle: StreakSeen = StreakSeen()
    """Updates at learning rate 0, which all groups have on the host."""
    rates: dict[int, float] = Field(default_factory=dict)
    """The largest learning rate on the host in the last steps, by step."""
    digests: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(default_factory=list)
    """CRC-32 of the sampled values at the end; empty: unknown."""
    began: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(default_factory=list)
    """The same after 16 backwards, if no optimizer had stepped until then; empty: one had."""
    num_updates: Amount = 0
    """All updates of optimizers that hold parameters of the recorded models; 0: unknown."""
    num_backwards: Amount = 0
    """All backwards of the process."""


class UnitsSeen(Record):
    """The unsharded parameters of units, compared with their shards around backwards."""

    num_looks: Amount = 0
    stale: dict[str, Amount] = Field(default_factory=dict)
    """By index of a unit: the looks that found it unsharded, with values from before a change of
    its shards."""
    changed: list[Index] = Field(default_factory=list)
    """Units without trained parameters whose shards changed."""


class ModeSeen(Record):
    """The mode of a model in the updates of its parameters."""

    model: str
    """Its class."""
    num_on: Amount = 0
    """Updates in training mode, the first 8 and those after evaluation mode."""
    since: Index | None = None
    """The step from which on all updates had evaluation mode; None: the last one did not."""
    num_off: Amount = 0
    """These updates, counted until 8."""
    num_dropouts: Amount = 0
    """Dropouts with a rate above 0 that were off then."""
    largest_dropout: float = 0.0
    """The largest of these rates."""
    num_batch_norms: Amount = 0
    """Batch normalizations that used their stored statistics then."""


class TrainingSeen(Record):
    """The observations of one rank."""

    num_trainable: Amount = 0
    """Parameters of the recorded models that require a gradient."""
    num_with_gradient: Amount = 0
    """Those that had a gradient before an update."""
    optimizers: list[OptimizerSeen] = Field(default_factory=list)
    batches: list[BatchSeen] = Field(default_factory=list)
    passes: list[PassSeen] = Field(default_factory=list)
    random: list[RandomSeen] = Field(default_factory=list)
    autocast: str = ""
    """The dtype of the autocast region around the first forward; empty: none."""
    losses: list[LossSeen] = Field(default_factory=list)
    num_unlabelled: Amount = 0
    """Means and sums in the same steps whose labels are all ignored; `losses` leaves them out."""
    values: ValuesSeen = ValuesSeen()
    coverage: CoverageSeen | None = None
    """None: the optimizers update partitions, or an earlier recording did not see all of them."""
    units: UnitsSeen | None = None
    """None: earlier recordings, and ranks that did not look."""
    rounds: list[RoundSeen] = Field(default_factory=list)
    windows: WindowsSeen = WindowsSeen()
    late: LateSeen | None = None
    """None: earlier recordings."""
    modes: list[ModeSeen] = Field(default_factory=list)
    """Models with dropout or batch normalization."""
    clips: list[ClipSeen] = Field(default_factory=list)
    backward_place: str = ""
    """The user's line that called the last sampled backward, `file:line`; empty: unknown."""
    parameters: list[ParameterSeen] = Field(default_factory=list)
    buffers: list[BufferSeen] = Field(default_factory=list)
    updates: list[UpdateSeen] = Field(default_factory=list)
    """The first 8 sampled updates, and the last 4 after them."""
