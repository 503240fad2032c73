"""List the plans, links and shapes to predict from a baseline and then run.

One baseline is recorded for each shape, on the medium link. The other links are also predicted,
like `fsdp-inspect simulate --bandwidth --latency` does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.simulation.changes import Changes, CheckpointingMode


@dataclass(frozen=True, slots=True)
class Link:
    """An emulated link."""

    bandwidth: str
    latency: str
    between_nodes: tuple[str, str] | None = None
    """The link of one rank's network card between nodes, if the link is that within nodes of
    `NODE_SIZE` ranks."""

    @property
    def emulation(self) -> str:
        """The link in the form of `--emulate`."""
        text = f"world_size={WORLD_SIZE},bandwidth={self.bandwidth},latency={self.latency}"
        if self.between_nodes is None:
            return text
        bandwidth, latency = self.between_nodes
        nodes = f"gpus_per_node={NODE_SIZE},inter_bandwidth={bandwidth},inter_latency={latency}"
        return f"{text},{nodes}"

    @property
    def network(self) -> dict[str, float]:
        """The link in the form of another network of `simulate`."""
        bandwidth, latency = parse_bytes_per_s(self.bandwidth), parse_time_ns(self.latency)
        assert bandwidth is not None
        assert latency is not None
        return {"bus_bytes_per_s": float(bandwidth), "latency_ns": float(latency)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its compute times."""

    module: str
    """The module to run with `python -m`."""
    options: Mapping[str, str]


WORLD_SIZE = 8
NODE_SIZE = 4
BASELINE_LINK = "medium"
LINKS = {
    "slow": Link("100MB/s", "500us"),
    "medium": Link("300MB/s", "200us"),
    "fast": Link("2GB/s", "50us"),
}
TWO_NODES = "two nodes"
NETWORKS = {**LINKS, TWO_NODES: Link("2GB/s", "50us", between_nodes=("7.5MB/s", "200us"))}
"""Between two nodes all ranks together have 30 MB/s, so backward cannot hide its all-gathers
there."""
SHAPES: Mapping[str, Shape] = {
    "even": Shape(
        "instrumented_trainer",
        {"preset": "tiny", "fixed-compute": "forward=6ms,backward=12ms"},
    ),
    "uneven": Shape(
        "tests.studies.validation.uneven_trainer",
        {"preset": "tiny", "fixed-compute": "forward=60ns/param,backward=120ns/param"},
    ),
}
"""Equal blocks with parts of equal duration, and blocks of different widths, whose parts last in
proportion to their parameters."""
REAL_SHAPE = Shape("instrumented_trainer", {"preset": "tiny", "dim": "256", "seq-len": "128"})
"""A shape with real compute times."""
REAL = "real compute"
"""The name of the shape with real compute times."""
SPLIT = (
    "tok_embeddings; layers.*.attention_norm, layers.*.attention; "
    "layers.*.ffn_norm, layers.*.ffn; norm, lm_head"
)
_WRAPS = ("block", "every:2", "every:4", "split")
_RESHARDS = ("auto", "false")
_DEPTHS = (0, 1, 2, 3)
_USUAL = {"wrap": "block", "reshard-after-forward": "auto", "forward-prefetch": "0"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan under one link and shape."""

    shape: str
    link: str
    settings: tuple[tuple[str, str], ...] = ()
    """The settings that differ from the baseline, as the trainer's options; `split` represents
    `SPLIT`."""

    @property
    def name(self) -> str:
        """The name in tables."""
        changes = " ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.shape}, {self.link} link: {changes or 'as recorded'}"


def baseline_of(shape: str) -> Trial:
    """The run from which every trial of a shape is predicted."""
    return Trial(shape, BASELINE_LINK)


def plans() -> list[tuple[tuple[str, str], ...]]:
    """The settings of every plan of the grid, the recorded plan first."""
    chosen = [_settings("block", "auto", 0)]
    for wrap, reshard, depth in product(_WRAPS, _RESHARDS, _DEPTHS):
        chosen.append(_settings(wrap, reshard, depth))
    chosen.append((("wrap", "root"),))
    return list(dict.fromkeys(chosen))


def _settings(wrap: str, reshard: str, depth: int) -> tuple[tuple[str, str], ...]:
    values = {"wrap": wrap, "reshard-after-forward": reshard, "forward-prefetch": str(depth)}
    return tuple((name, value) for name, value in values.items() if value != _USUAL[name])


def all_trials() -> list[Trial]:
    """The whole grid without the baselines."""
    trials = [
        Trial(shape, link, settings) for shape in SHAPES for link in LINKS for settings in plans()
    ]
    return [trial for trial in trials if trial.settings or trial.link != BASELINE_LINK]


def draw(trials: list[Trial], num_trials: int) -> list[Trial]:
    """A fixed random selection of trials, spread evenly over shapes and links."""
    shuffled = random.Random(0).sample(trials, len(trials))
    by_place: dict[tuple[str, str], list[Trial]] = {}
    for trial in shuffled:
        by_place.setdefault((trial.shape, trial.link), []).append(trial)
    drawn: list[Trial] = []
    while len(drawn) < min(num_trials, len(trials)):
        for waiting in by_place.values():
            if waiting and len(drawn) < num_trials:
                drawn.append(waiting.pop())
    return drawn


def changes_of(trial: Trial) -> Changes:
    """The trial's settings as changes of the recorded plan."""
    settings = dict(trial.settings)
    return Changes(
        wrap=settings.get("wrap"),
        forward_prefetch=int(settings.get("forward-prefetch", "0")),
        reshard_after_forward=_reshard(settings.get("reshard-after-forward")),
        checkpointing=_checkpointing(settings.get("checkpointing")),
    )


def _reshard(text: str | None) -> bool | int | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    return text == "true"


def _checkpointing(text: str | None) -> CheckpointingMode | None:
    modes: dict[str | None, CheckpointingMode] = {"none": "none", "full": "full"}
    return modes.get(text)


def command_of(trial: Trial) -> list[str]:
    """The words of a `python -m` command that runs a trial."""
    shape = SHAPES.get(trial.shape, REAL_SHAPE)
    chosen = {**shape.options, **dict(trial.settings)}
    if chosen.get("wrap") == "split":
        chosen["wrap"] = SPLIT
    chosen["emulate"] = NETWORKS[trial.link].emulation
    return [shape.module, *(f"--{name}={value}" for name, value in chosen.items())]


def real_trials() -> list[Trial]:
    """Plans of the grid with real compute, on the baseline's link and the slow link."""
    trials = [
        Trial(REAL, link, settings) for link in (BASELINE_LINK, "slow") for settings in plans()
    ]
    return [trial for trial in trials if trial.settings]
