"""Define the dump of one training step: parameters, gradients and fingerprints of each rank.

`fsdp-inspect equivalence` compares the dump of a sharded step with that of the same step without
sharding. A rank writes `rank-00003/index.json` last, next to one `.npy` file per tensor. Values are
float32, or float64 for parameters of 64 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.writing import replace_file

ENVIRONMENT_VARIABLE = "FSDP_INSPECT_EQUIVALENCE"
"""Settings of the dump for the ranks of a command, as `DumpSettings` in JSON."""

INDEX_FILE = "index.json"
_PROGRESS_FILE = "progress.json"
"""Written by a rank that ends before the step."""
FINGERPRINT_SAMPLES = 256
FINGERPRINT_LENGTH = 2 + FINGERPRINT_SAMPLES
"""Length of a fingerprint: sum, sum of squares, and values at evenly spaced places, then zeros."""
_VERSION = 1
_LOW_BITS = {"bfloat16": np.uint32(0xFFFF), "float16": np.uint32(0x1FFF)}
"""Bits of a float32 that are zero in each value of a 16-bit dtype."""

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class DumpSettings:
    """The settings of a dump for the ranks of a command."""

    folder: str
    """The absolute path of the folder of this dump."""
    step: int
    """The step to dump, from 0, counted by updates of optimizers."""
    sharded: str | None
    """The folder of the sharded dump, for the run without sharding; None: the sharded run."""

    def encode(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> DumpSettings:
        """Read the value of the environment variable."""
        fields = json.loads(text)
        return cls(str(fields["folder"]), int(fields["step"]), fields["sharded"])


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank did that ended before the step."""

    has_model: bool = False
    """Whether a model with units ran a forward."""
    num_updates: int = 0
    """Updates of parameters of such a model."""
    num_others: int = 0
    """Steps of optimizers that hold none of its parameters."""
    place: str = ""
    """The user's line of the first of these, `file:line`; empty: unknown."""


@dataclass(frozen=True, slots=True)
class DumpedParameter:
    """The part of one parameter that a rank holds."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    offset: tuple[int, ...]
    """The offset of the part in the whole parameter, for each dimension."""
    local_shape: tuple[int, ...]
    dtype: str
    unit: str | None
    """The FSDP unit; None: no unit owns the parameter, or the run without sharding."""
    is_trained: bool
    has_gradient: bool
    change_after_backward: float | None
    """Norm of the gradient at the update / its norm after the last backward; None: unknown."""
    narrowed_to: str
    """The narrower dtype that all values of the gradient fit at the update, but did not after the
    last backward; empty: none."""


@dataclass(frozen=True, slots=True)
class DumpedUnit:
    """The arguments of `fully_shard` for one unit."""

    name: str
    param_dtype: str
    """Dtype of the parameters in forward and backward."""
    reduce_dtype: str
    divide_factor: float | None
    """The divide factor that the script set; None: the number of ranks."""
    num_ranks: int
    """Ranks whose gradients the unit averages."""


@dataclass(frozen=True, slots=True)
class Backward:
    """One call of backward."""

    factor: float
    """The constant factor of the loss: 0.25 for `(loss / 4).backward()`."""
    place: str
    """The line of the script; empty: unknown."""


@dataclass(frozen=True, slots=True)
class StepDump:
    """The dump of one rank."""

    folder: Path
    rank: int
    world_size: int
    step: int
    parameters: tuple[DumpedParameter, ...]
    units: tuple[DumpedUnit, ...]
    inputs: tuple[str, ...]
    """A digest of the input of each forward of the model."""
    used: tuple[tuple[str, int], ...]
    """Parameter and number of the call: the parameters whose values a forward used, in order."""
    taken: tuple[tuple[str, int], ...]
    """Without sharding: the parameters that the sharded run saved, in the dtype of the forward."""
    outputs: tuple[tuple[str, int], ...]
    """Module and number of the call: the modules with fingerprints of outputs, in order."""
    entered: tuple[tuple[str, int], ...]
    """Model and number of the output: the models with fingerprints of the gradients from the
    loss."""
    backwards: tuple[Backward, ...]
    divided_at: str
    """The line of the script that set a divide factor; empty: none."""
    notes: tuple[str, ...]

    def parameter(self, at: int) -> Array:
        """The values of a parameter's part at the start of the step; shape: `local_shape`."""
        return _load(self.folder / "parameters" / f"{at}.npy", self.parameters[at].local_shape)

    def gradient(self, at: int) -> Array:
        """The gradient of a parameter's part; shape: `local_shape`."""
        return _load(self.folder / "gradients" / f"{at}.npy", self.parameters[at].local_shape)

    def fingerprints(self, kind: str) -> Array:
        """The fingerprints of a field such as `used`; shape: (entries, FINGERPRINT_LENGTH)."""
        entries = {
            "used": self.used,
            "taken": self.taken,
            "outputs": self.outputs,
            "entered": self.entered,
        }[kind]
        return _load(self.folder / f"{kind}.npy", (len(entries), FINGERPRINT_LENGTH))


def write_index(dump: StepDump) -> None:
    """Write the index of a dump atomically."""
    fields = asdict(dump)
    del fields["folder"]
    text = json.dumps({"version": _VERSION, **fields})
    replace_file(dump.folder / INDEX_FILE, text.encode())


def write_progress(folder: Path, progress: Progress) -> None:
    """Write what the rank of this folder did, if it ends before the step."""
    (folder / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))


def read_progress(folder: Path) -> Progress | None:
    """What the first rank did that ended before the step; None: no rank wrote it."""
    path = next(iter(sorted(folder.glob(f"rank-*/{_PROGRESS_FILE}"))), None)
    if path is None:
        return None
    found = json.loads(path.read_text())
    return Progress(
        bool(found["has_model"]),
        int(found["num_updates"]),
        int(found["num_others"]),
        str(found["place"]),
    )


def read_dumps(folder: Path) -> list[StepDump]:
    """Read the dumps of all ranks, in the order of ranks.

    Raises:
        FsdpInspectError: An index is damaged.
    """
    paths = sorted(folder.glob(f"rank-*/{INDEX_FILE}"))
    return sorted((_read_index(path) for path in paths), key=lambda dump: dump.rank)


def rank_dump_folder(folder: Path, rank: int) -> Path:
    """The folder of a rank's dump."""
    return folder / f"rank-{rank:05d}"


def assemble(parts: Iterable[tuple[DumpedParameter, Array]], shape: Sequence[int]) -> Array | None:
    """Assemble a whole tensor from the parts of ranks; None if a part of it is missing.

    Args:
        parts: The place of each part, and its values. Equal parts may be given several times.
        shape: The shape of the whole tensor.
    """
    whole: Array | None = None
    known = np.zeros(tuple(shape), dtype=bool)
    for parameter, values in parts:
        if whole is None:
            whole = np.zeros(tuple(shape), dtype=values.dtype)
        place = slices_of(parameter)
        whole[place], known[place] = values, True
    return whole if whole is not None and known.all() else None


def slices_of(parameter: DumpedParameter) -> tuple[slice, ...]:
    """The slices of a rank's part in the whole parameter."""
    return tuple(
        slice(start, start + size)
        for start, size in zip(parameter.offset, parameter.local_shape, strict=True)
    )


def narrower_dtype(values: Array) -> str:
    """The 16-bit dtype that each value fits; empty: none, or all values are zero."""
    narrow = np.ascontiguousarray(values, dtype=np.float32)
    if not np.array_equal(narrow, values) or not narrow.any():
        return ""
    bits = narrow.view(np.uint32)
    return next((dtype for dtype, low in _LOW_BITS.items() if not (bits & low).any()), "")


def _load(path: Path, shape: tuple[int, ...]) -> Array:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, error) from error
    if values.shape != shape or values.dtype.kind != "f":
        raise _damaged(path, f"shape {values.shape} and dtype {values.dtype}")
    found: Array = values
    return found


def _read_index(path: Path) -> StepDump:
    try:
        return _decode(path.parent, parse_json(read_regular(path, MAX_JSON_BYTES)))
    except (OSError, InvalidTextError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error


def _damaged(path: Path, reason: object) -> FsdpInspectError:
    return FsdpInspectError(
        f"The dump {str(path)!r} cannot be read: {reason}. Expected a file that `fsdp-inspect "
        "equivalence` wrote. Run the command again."
    )


def _decode(folder: Path, fields: Mapping[str, Any]) -> StepDump:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']!r}")
    return StepDump(
        folder=folder,
        rank=int(fields["rank"]),
        world_size=int(fields["world_size"]),
        step=int(fields["step"]),
        parameters=tuple(_parameter(each) for each in fields["parameters"]),
        units=tuple(DumpedUnit(**each) for each in fields["units"]),
        inputs=tuple(map(str, fields["inputs"])),
        used=_keys(fields["used"]),
        taken=_keys(fields["taken"]),
        outputs=_keys(fields["outputs"]),
        entered=_keys(fields["entered"]),
        backwards=tuple(Backward(**each) for each in fields["backwards"]),
        divided_at=str(fields["divided_at"]),
        notes=tuple(map(str, fields["notes"])),
    )


def _keys(fields: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(call)) for name, call in fields)


def _parameter(fields: Mapping[str, Any]) -> DumpedParameter:
    sizes = ("shape", "offset", "local_shape")
    return DumpedParameter(**{**fields, **{name: tuple(map(int, fields[name])) for name in sizes}})
