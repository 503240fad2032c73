"""Compute the bytes of a unit's parameters: whole, padded, and the share that a group keeps.

With an integer `reshard_after_forward` torch (2.13) frees a unit's whole parameters after forward.
It keeps a share of them, split among that many ranks, until backward gathers them again. The share
is a copy in the dtype of compute, in addition to the sharded parameters. Torch copies one parameter
at a time, and frees its whole after the copy.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.plan import ROOT, Fsdp1Settings, UnitPlan
from fsdp_inspect.trace.run import FLAT_PARAM, ParameterTraits, Unit


@dataclass(frozen=True, slots=True)
class Share:
    """The share that a smaller group keeps of a unit between forward and backward, bytes."""

    kept: int = 0
    rise: int = 0
    """The rise of memory above its start while torch makes the copies."""


NO_SHARE = Share()


def is_flat(unit: Unit) -> bool:
    """Whether FSDP1 shards its parameters as one flat parameter."""
    return unit.recorded_by == FLAT_PARAM


def flat_numel(numels: Iterable[int], ranks: int, alignment: int) -> int:
    """Elements of a flat parameter with padding.

    Args:
        numels: The elements of its parameters, in order.
        ranks: The ranks that shard it.
        alignment: The elements to which each parameter is aligned; 1: none.
    """
    total = 0
    for numel in numels:
        total = -(-total // alignment) * alignment + numel
    return -(-total // ranks) * ranks


def itemsize(dtype: str) -> int:
    """Bytes of an element; 4 for an unknown dtype."""
    return ITEMSIZE.get(dtype, 4)


def parameters_of(unit: Unit) -> dict[str, list[int]]:
    """Shapes by name; a unit without recorded parameters has a single entry."""
    if unit.parameters:
        return unit.parameters
    return {f"{unit.first_module}.*".removeprefix("."): [unit.num_parameters]}


def is_inside(name: str, module: str) -> bool:
    """Whether a parameter or module is inside a module; everything is inside the model itself."""
    return module == ROOT or name.startswith(f"{module}.")


def padded_numel(shape: Sequence[int], ranks: int, dim: int = 0) -> int:
    """Elements with the sharded dimension padded to a multiple of the ranks, as torch does."""
    sizes = [*shape] or [1]
    sizes[dim] = -(-sizes[dim] // ranks) * ranks
    return math.prod(sizes)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A recorded parameter, by what it adds to the messages of its unit."""

    shape: Sequence[int]
    traits: ParameterTraits
    stored: float
    """Bytes of an element in a shard."""
    trained: float
    """The trained fraction: 0 or 1, unless the run only has that of the whole unit."""
    gathered_scale: float
    """Recorded / computed bytes of its unit's all-gather. Other than 1: torch gathers other tensors
    (float8), or an older run lacks the settings of its parameters."""
    reduced_scale: float
    """The same of the reduce-scatter."""
    is_flat: bool = False
    """It is a part of a flat parameter, which is padded as a whole."""

    @property
    def is_scaled(self) -> bool:
        """Whether the sizes of its unit's messages are not explained by its parameters."""
        scales = (self.gathered_scale, self.reduced_scale)
        return not all(math.isclose(scale, 1, rel_tol=1e-3) for scale in scales)

    def padded(self, ranks: int) -> int:
        """Elements with padding, as part of the output of an all-gather."""
        if self.is_flat:
            return math.prod(self.shape)
        return padded_numel(self.shape, ranks, self.traits.shard_dim)

    @property
    def stored_dtype(self) -> str | None:
        """The dtype of its shard; None: unknown. A unit of equal parameters has no traits."""
        if itemsize(self.traits.dtype) == self.stored:
            return self.traits.dtype
        return "float32" if self.stored == 4 else None

    def gathered_dtype(self, wanted: str | None) -> str:
        """The dtype of its all-gather under a `param_dtype`; torch casts floating point only."""
        if wanted is None and not self.is_scaled:  # float8 is gathered as it is recorded
            wanted = self.stored_dtype
        is_float = "float" in self.traits.dtype
        return wanted if wanted and is_float else self.traits.gathered_dtype

    def gathered_bytes(self, ranks: int, wanted: str | None) -> float:
        """Bytes that it adds to an all-gather over the ranks, under a `param_dtype`."""
        return self.padded(ranks) * itemsize(self.gathered_dtype(wanted)) * self.gathered_scale

    def reduced_bytes(self, ranks: int, dtype: str) -> float:
        """Bytes that its gradient adds to a reduce-scatter over the ranks."""
        return self.padded(ranks) * self.trained * itemsize(dtype) * self.reduced_scale


def effective_dtypes(
    parameters: Collection[Parameter], planned: UnitPlan, torch_release: tuple[int, int]
) -> tuple[str | None, str | None]:
    """The dtypes of the all-gather and of the reduction that a plan means; None: unknown."""
    if not parameters:
        return None, None
    first = min(parameters, key=lambda each: not each.trained)
    param_dtype = (
        first.stored_dtype if planned.param_dtype is None else compute_dtype(parameters, planned)
    )
    if planned.reduce_dtype is not None or param_dtype is None:
        return param_dtype, planned.reduce_dtype
    return param_dtype, default_reduce_dtype(parameters, param_dtype, torch_release)


def compute_dtype(parameters: Iterable[Parameter], planned: UnitPlan) -> str:
    """The dtype of the all-gather of a unit, as in a manifest."""
    first = min(parameters, key=lambda each: not each.trained)
    return first.gathered_dtype(planned.param_dtype)


def default_reduce_dtype(
    parameters: Iterable[Parameter], param_dtype: str, torch_release: tuple[int, int]
) -> str:
    """The dtype in which torch reduces if it decides: for FSDP2 since 2.15 that of the parameters.

    Args:
        parameters: The parameters of the unit.
        param_dtype: The dtype of their all-gather.
        torch_release: The version of torch.
    """
    trained = [each for each in parameters if each.trained]
    is_by_compute = torch_release < (2, 15) or any(each.is_flat for each in trained)
    is_stored_in_32_bits = all(each.stored == 4 for each in trained)
    return "float32" if is_stored_in_32_bits and not is_by_compute else param_dtype


def describe_parameters(unit: Unit, ranks: int) -> dict[str, Parameter]:
    """The parameters of a recorded unit by name, such that they add up to its recorded bytes.

    Args:
        unit: A unit of a manifest.
        ranks: Ranks of its shard group.
    """
    ratio = unit.num_trainable_parameters / max(unit.num_parameters, 1)
    found = {
        name: Parameter(
            shape,
            traits := unit.traits_of(name),
            stored=itemsize(traits.dtype),
            trained=float(traits.is_trained) if unit.traits else ratio,
            gathered_scale=1.0,
            reduced_scale=1.0,
        )
        for name, shape in parameters_of(unit).items()
    }
    if is_flat(unit):
        numel = unit.unsharded_bytes / itemsize(unit.param_dtype)
        stored = unit.sharded_bytes * ranks / numel if numel else 0.0
        return {name: replace(one, stored=stored, is_flat=True) for name, one in found.items()}
    each = found.values()
    gathered = sum(one.gathered_bytes(ranks, one.traits.gathered_dtype) for one in each)
    reduced = sum(one.reduced_bytes(ranks, unit.reduce_dtype) for one in each)
    stored = sum(one.padded(ranks) * one.stored for one in each) / ranks
    return {
        name: replace(
            one,
            stored=one.stored * _ratio(unit.sharded_bytes, stored),
            gathered_scale=_ratio(unit.unsharded_bytes, gathered),
            reduced_scale=_ratio(unit.reduce_bytes, reduced),
        )
        for name, one in found.items()
    }


def _ratio(recorded: int, computed: float) -> float:
    return recorded / computed if recorded and computed else 1.0


def sharded_gradient_bytes(unit: Unit, ranks: int) -> int:
    """Bytes of the gradients of one rank's shard, in the dtypes of its parameters.

    Args:
        unit: A unit of a manifest or of a plan.
        ranks: Ranks of its shard group.
    """
    each = describe_parameters(unit, ranks).values()
    return round(sum(one.padded(ranks) * one.stored * one.trained for one in each) / ranks)


def smaller_group(reshard_after_forward: bool | int | None) -> int | None:
    """The number of ranks that share a unit between forward and backward; None: no such group.

    Args:
        reshard_after_forward: The effective setting (`policies.reshard_of`), as in a manifest.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    return reshard_after_forward


def share_of(unit: Unit, shard: int) -> Share:
    """The share that the unit's smaller group keeps; zero without such a group.

    Args:
        unit: The unit with its `reshard_after_forward`.
        shard: Ranks of its shard group.
    """
    group = smaller_group(unit.reshard_after_forward)
    if group is None:
        return NO_SHARE
    rise, level = 0, 0
    for size in _whole_bytes(unit, shard):
        level += size // group
        rise = max(rise, level)
        level -= size
    return Share(unit.unsharded_bytes // group, rise)


def reduce_input_of(unit: Unit, fsdp1: Fsdp1Settings | None) -> int:
    """Bytes of the copy that a reduce-scatter reads. FSDP1 copies gradients to cast or pad them."""
    gradients = unit.num_parameters * itemsize(unit.param_dtype)
    is_cast = unit.param_dtype != unit.reduce_dtype
    if fsdp1 is None or is_cast:
        return unit.reduce_bytes
    return 0 if fsdp1.use_orig_params or gradients == unit.reduce_bytes else unit.reduce_bytes


def last_gradient_of(unit: Unit) -> int:
    """Bytes of the gradients that exist until the reduction is issued; 0 if they are unknown.

    FSDP2: the gradient of the last parameter. FSDP1: the flat gradient.
    """
    if is_flat(unit):
        return unit.unsharded_bytes
    if not unit.parameters or not unit.num_trainable_parameters:
        return 0
    *_, last = (name for name in unit.parameters if unit.traits_of(name).is_trained)
    return math.prod(unit.parameters[last]) * itemsize(unit.traits_of(last).gathered_dtype)


def _whole_bytes(unit: Unit, shard: int) -> list[int]:
    """Padded bytes of each parameter; their sum if they were not recorded."""
    if not unit.parameters:
        return [unit.unsharded_bytes]
    each = describe_parameters(unit, shard).values()
    return [round(one.gathered_bytes(shard, one.traits.gathered_dtype)) for one in each]
