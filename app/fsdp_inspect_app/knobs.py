"""Define the settings of What-if: the options of `fsdp-inspect simulate`.

A knob has the name of the command's option, and its values are the option's texts. The address, the
command and the widget are therefore equal. A knob with the recorded value is missing in all of
them.
"""

import base64
import binascii
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isnan
from typing import Any, get_args

from fsdp_inspect.errors import PlanError
from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.result_types import (
    Changes,
    Checkpointing,
    NodeLink,
    Plan,
    RunManifest,
)
from fsdp_inspect.simulation.buckets import BucketChanges, BucketSettings
from fsdp_inspect.simulation.changes import CheckpointingMode
from fsdp_inspect.simulation.scenario import mesh_of
from fsdp_inspect.simulation.zero3 import GatherSettings
from fsdp_inspect.trace.plan import AccumulationSync, BackwardPrefetch, FloatDtype

AS_RECORDED = "as recorded"
PLAN_FILE, PREDICTION_FILE = "plan.toml", "plan.prediction.json"
_MOST_RANKS = 4096
_GROUP_SIZES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Knob:
    """One option of What-if."""

    name: str
    """The name in the address: the command's option with underscores."""
    label: str
    help: str
    options: tuple[str, ...]
    is_slider: bool
    read: Callable[[str], Any]
    """Converts the option's text to its value."""
    option: str = ""
    """The command's option, if it is not the name."""
    is_flag: bool = False
    """Whether the command has an option for each of the values `true` and `false`."""


def _read_reshard(text: str) -> bool | int:
    return int(text) if text.isdecimal() else text == "true"


def _up_to(most: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(most + 1))


def _doubling(first: int, most: int) -> tuple[str, ...]:
    return tuple(str(1 << power) for power in range(13) if first <= 1 << power <= most)


def knobs_of_units(plan: Plan) -> tuple[Knob, ...]:
    """The knobs of the units: the cut of the model, and the gathers.

    Args:
        plan: The recorded plan, resolved.
    """
    num_modules = sum(len(unit.modules) for unit in plan.units)
    groups = tuple(f"every:{size}" for size in _GROUP_SIZES if size < num_modules)
    backward = Knob(
        "backward_prefetch", "Prefetch in backward", "Units to prefetch in backward.",
        _up_to(6), True, int,
    )  # fmt: skip
    if plan.fsdp1 is not None:
        groups = ()  # a unit is one module
        help_ = "When backward gathers the next unit: before or after the current gradients."
        moments = get_args(BackwardPrefetch)
        backward = replace(backward, help=help_, options=moments, is_slider=False, read=str)
    return (
        Knob(
            "wrap", "Units", "Blocks that form one unit. split: halves of blocks.",
            ("root", *groups[::-1], "block", "split"), False, str,
        ),
        Knob(
            "reshard_after_forward", "Reshard after forward",
            "For all units except the root. false: keep the parameters until backward. N: reshard "
            "to groups of N ranks.",
            ("true", "false", *_doubling(2, 64)), False, _read_reshard,
        ),
        Knob(
            "checkpointing", "Activation checkpointing",
            "For all blocks. full: drop activations in forward, and recompute them in backward.",
            get_args(CheckpointingMode), False, str,
        ),
        Knob(
            "forward_prefetch", "Prefetch in forward", "Units to prefetch in forward.",
            _up_to(6 if plan.fsdp1 is None else 1), True, int,
        ),
        backward,
        Knob(
            "param_dtype", "Parameter dtype", "Dtype of all-gathers. Compute stays as recorded.",
            get_args(FloatDtype), False, str,
        ),
        Knob(
            "reduce_dtype", "Reduce dtype", "Dtype of gradient reductions.",
            get_args(FloatDtype), False, str,
        ),
    )  # fmt: skip


KNOBS_OF_REDUCTION = (
    Knob(
        "reduce_scatter_buffers", "Reduce-scatter inputs", "Largest number at once. Default: 1.",
        ("1", "2", "3", "4"), True, int,
    ),
    Knob(
        "separate_reduce_scatter_group", "Reduce-scatter group",
        "separate: its own communicator, so it does not queue behind all-gathers.",
        ("separate", "shared"), False, lambda text: text == "separate",
        "reduce_scatter_group",
    ),
    Knob(
        "microbatches", "Microbatches", "Forward and backward passes of a step. Each one keeps its "
        "number of tokens.", ("1", "2", "4", "8", "16"), True, int,
    ),
    Knob(
        "accumulation_sync", "Gradient reduction",
        "Microbatches that reduce. last: gradients stay unsharded until the last one. "
        "all_reduce_last: only the all-reduce waits for it.",
        get_args(AccumulationSync), False, str,
    ),
)  # fmt: skip

KNOBS_OF_RANKS = (
    Knob(
        "world_size", "Ranks", "The compute of each rank stays as recorded.",
        _doubling(1, _MOST_RANKS), True, int,
    ),
    Knob(
        "replicas", "Replicas", "Copies of the sharded model (HSDP), which all-reduce gradients.",
        ("1", "2", "4", "8", "16", "32"), True, int,
    ),
)  # fmt: skip

_SERIES = (1, 2, 5)

KNOBS_OF_LINK = (
    Knob(
        "bandwidth", "Bus bandwidth", "For all collectives.",
        (
            *(f"{step * scale}MB/s" for scale in (10, 100) for step in _SERIES),
            *(f"{step * scale}GB/s" for scale in (1, 10, 100) for step in _SERIES),
        ),
        True, parse_bytes_per_s,
    ),
    Knob(
        "latency", "Latency", "For all collectives.",
        (
            "0us",
            *(f"{step * scale}us" for scale in (1, 10, 100) for step in _SERIES),
            "1ms", "2ms", "5ms", "10ms",
        ),
        True, parse_time_ns,
    ),
)  # fmt: skip
"""The knobs of the network between all ranks."""

KNOBS_OF_NODE = (
    Knob(
        "node_bandwidth", "Bandwidth within a node",
        "For the all-gathers of backward, if units reshard to groups of N ranks.",
        tuple(f"{step * scale}GB/s" for scale in (1, 10, 100) for step in _SERIES),
        True, parse_bytes_per_s,
    ),
    Knob(
        "node_latency", "Latency within a node", "For the same all-gathers.",
        ("0us", *(f"{step * scale}us" for scale in (1, 10, 100) for step in _SERIES)),
        True, parse_time_ns,
    ),
)  # fmt: skip
"""The knobs of the network within a node."""

KNOBS_OF_NETWORK = (*KNOBS_OF_LINK, *KNOBS_OF_NODE)


_BUCKET_CAP = Knob(
    "bucket_cap", "Bucket size (MiB)", "bucket_cap_mb of DistributedDataParallel.",
    ("1", "2", "5", "10", "25", "50", "100", "200", "400", "1000"), True, float,
)  # fmt: skip
_KNOBS_OF_ZERO = (
    Knob(
        "reduce_bucket_size", "Bucket size (elements)", "reduce_bucket_size of DeepSpeed.",
        tuple(f"{step * scale}" for scale in (10**6, 10**7, 10**8) for step in _SERIES),
        True, int,
    ),
    Knob("zero_stage", "Stage of ZeRO", "Stage 3 is not simulated.", ("1", "2"), False, int),
)  # fmt: skip
_KNOBS_OF_GATHERS = tuple(
    Knob(
        each.name, each.name.replace("_", " ").capitalize(), f"stage3_{each.name} of DeepSpeed.",
        ("0", *(f"{step * scale}" for scale in (10**k for k in range(4, 9)) for step in _SERIES)),
        True, int,
    )
    for each in fields(GatherSettings)
)  # fmt: skip
_OVERLAP = Knob(
    "overlap", "Overlap", "Whether reductions run while backward computes.",
    ("true", "false"), False, lambda text: text == "true", is_flag=True,
)  # fmt: skip
_NAMES_OF_BUCKETS = {"bucket_cap": "bucket_cap_mb", "overlap": "overlaps"}
"""The names of changes of buckets that differ from those of the command's options."""


def knobs_of_buckets(settings: BucketSettings) -> tuple[Knob, ...]:
    """The knobs of the messages of a run with DDP, or with ZeRO-1 to ZeRO-3."""
    if settings.gathers is not None:
        return (_KNOBS_OF_ZERO[0], *_KNOBS_OF_GATHERS)
    return (*(_KNOBS_OF_ZERO if settings.is_zero else (_BUCKET_CAP,)), _OVERLAP)


def bucket_changes_of(chosen: Mapping[str, str], knobs: Sequence[Knob]) -> BucketChanges:
    """The changes of the buckets that the knobs request; arguments as for `changes_of`."""
    asked = {knob.name: knob.read(chosen[knob.name]) for knob in knobs if knob.name in chosen}
    return BucketChanges(**{_NAMES_OF_BUCKETS.get(name, name): asked[name] for name in asked})


def recorded_buckets(settings: BucketSettings) -> dict[str, str]:
    """The recorded settings of the buckets by knob; unknown values are missing."""
    found = {"overlap": str(settings.overlaps).lower()}
    if not isnan(settings.size):
        found["reduce_bucket_size" if settings.is_zero else "bucket_cap"] = f"{settings.size:.12g}"
    if settings.gathers is not None:
        found |= {name: f"{value:.12g}" for name, value in asdict(settings.gathers).items()}
    return found


def changes_of(chosen: Mapping[str, str], knobs: Sequence[Knob]) -> Changes:
    """The changes of the plan that the knobs request.

    Args:
        chosen: The texts by knob; knobs with the recorded value are missing.
        knobs: The knobs of the plan.
    """
    return Changes(**{knob.name: knob.read(chosen[knob.name]) for knob in knobs
                      if knob.name in chosen})  # fmt: skip


def network_of(chosen: Mapping[str, str]) -> tuple[float | None, float | None]:
    """The requested bandwidth in bytes/s and latency in ns; None: the run's own."""
    return _read_network(chosen, "bandwidth"), _read_network(chosen, "latency")


def node_link_of(chosen: Mapping[str, str]) -> NodeLink | None:
    """The requested link within a node; None: as measured in the run."""
    link = NodeLink(_read_network(chosen, "node_bandwidth"), _read_network(chosen, "node_latency"))
    return None if link == NodeLink() else link


def _read_network(chosen: Mapping[str, str], name: str) -> float | None:
    (knob,) = (knob for knob in KNOBS_OF_NETWORK if knob.name == name)
    value: float | None = knob.read(chosen[name]) if name in chosen else None
    return value


def command_of(run: str, chosen: Mapping[str, str], knobs: Sequence[Knob]) -> str:
    """The command that gives the same numbers.

    Args:
        run: The run in the command.
        chosen: The texts by knob.
        knobs: All knobs.
    """
    words = ["fsdp-inspect", "simulate", run]
    for knob in knobs:
        if knob.name in chosen:
            option, text = (knob.option or knob.name).replace("_", "-"), chosen[knob.name]
            if knob.is_flag:
                words.append(f"--{option}" if text == "true" else f"--no-{option}")
            else:
                words += [f"--{option}", text]
    return shlex.join(words)


def recorded_values(plan: Plan, manifest: RunManifest) -> dict[str, str]:
    """The values of the recorded plan by knob, in one or two words; unknown values are missing.

    Args:
        plan: The recorded plan, resolved.
        manifest: The manifest of the run.
    """
    mesh = mesh_of(plan, manifest)
    inner = [unit for unit in plan.units if not unit.is_root]
    return {
        "wrap": f"{len(manifest.units)} units",
        "reshard_after_forward": _one_of([unit.reshard_after_forward for unit in inner]),
        "checkpointing": _checkpointing(plan.checkpointing),
        "forward_prefetch": _depth(plan.forward_prefetch),
        "backward_prefetch": plan.fsdp1.backward_prefetch
        if plan.fsdp1
        else _depth(plan.backward_prefetch),
        "param_dtype": _one_of([unit.param_dtype for unit in manifest.units]),
        "reduce_dtype": _one_of([unit.reduce_dtype for unit in manifest.units]),
        "reduce_scatter_buffers": _one_of(
            [unit.reduce_scatter_max_input_buffers for unit in plan.units]
        ),
        "world_size": str(mesh.world_size),
        "replicas": str(mesh.replicate),
        "microbatches": str(plan.accumulation.microbatches),
        "accumulation_sync": plan.accumulation.sync,
    }


def _checkpointing(checkpointing: Checkpointing) -> str:
    return "full" if checkpointing.full else "selective" if checkpointing.selective else "none"


def _depth(prefetch: int | Mapping[str, Sequence[str]]) -> str:
    return str(prefetch) if isinstance(prefetch, int) else "by unit"


def _one_of(values: Sequence[object]) -> str:
    """The value of all units, written as in plan files."""
    if len({repr(value) for value in values}) != 1:
        return "by unit"
    value = values[0]
    if value is None:
        return "torch's own"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- Pack plans into addresses, and check them when they are read.
#
# The text is the plan file, deflated and in URL-safe base64: about 300 characters for a model of 80
# blocks. The length of a text from an address is limited, packed and unpacked. It is read like any
# plan file. It contains names of modules, never of files.

_LONGEST_ADDRESS = 6_000
_LONGEST_PLAN = 500_000


def pack_plan(plan: Plan) -> str | None:
    """Pack a plan for an address; None if it is too long."""
    packed = base64.urlsafe_b64encode(zlib.compress(plan.to_toml().encode(), 9)).decode()
    text = packed.rstrip("=")
    return text if len(text) <= _LONGEST_ADDRESS else None


def unpack_plan(text: str) -> Plan:
    """Read the plan in an address.

    Raises:
        PlanError: The text is not a plan from `pack_plan`.
    """
    if len(text) > _LONGEST_ADDRESS:
        raise PlanError(f"The plan in the address is longer than {_LONGEST_ADDRESS} characters.")
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        toml = unpacker.decompress(packed, _LONGEST_PLAN)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise PlanError("The plan in the address is cut off or too long.")
        return Plan.from_toml(toml.decode())
    except (binascii.Error, zlib.error, ValueError) as error:
        raise PlanError(
            "The plan in the address cannot be read. Expected one that this dashboard wrote. Copy "
            "the whole address."
        ) from error
