"""Which plans are predicted from one baseline and then run? A grid of plans, links, shapes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

LINKS = {
    "slow": "bandwidth=100MB/s,latency=500us",
    "medium": "bandwidth=300MB/s,latency=200us",
    "fast": "bandwidth=2GB/s,latency=50us",
}
SHAPES: Mapping[str, Mapping[str, str]] = {
    "even": {"fixed-compute": "forward=6ms,backward=12ms"},
    "by-parameters": {"fixed-compute": "forward=60ns/param,backward=120ns/param"},
}
"""Equal parts, and parts that last as long as they have parameters: attention and feed-forward of
one block, the embedding and the head then differ by far."""
WORLD_SIZE = 8
_WRAPS = ("block", "every:2", "every:3", "root")
_RESHARDS = ("auto", "false")
_DEPTHS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan under one link and shape."""

    link: str
    shape: str
    settings: tuple[tuple[str, str], ...]
    """What differs from the baseline, as the trainer's options."""

    @property
    def name(self) -> str:
        """In tables."""
        changes = " ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.shape}, {self.link} link: {changes or 'as recorded'}"

    @property
    def baseline(self) -> Trial:
        """The run that it is predicted from."""
        return Trial(self.link, self.shape, ())

    def options(self) -> list[str]:
        """Of the trainer."""
        emulation = f"world_size={WORLD_SIZE},{LINKS[self.link]}"
        pairs = {"emulate": emulation, **SHAPES[self.shape], **dict(self.settings)}
        return [word for name, value in pairs.items() for word in (f"--{name}", value)]


def make_grid(num_trials: int) -> list[Trial]:
    """So many trials of the whole grid, drawn once and for all; without the baselines."""
    plans = [
        (wrap, reshard, depth)
        for wrap, reshard, depth in product(_WRAPS, _RESHARDS, _DEPTHS)
        if not (wrap == "root" and (depth or reshard != "auto"))
    ]
    trials = [
        Trial(link, shape, _settings(*plan))
        for plan, link, shape in product(plans, LINKS, SHAPES)
        if _settings(*plan)
    ]
    return random.Random(0).sample(trials, min(num_trials, len(trials)))


def _settings(wrap: str, reshard: str, depth: int) -> tuple[tuple[str, str], ...]:
    changes = {
        "wrap": (wrap, "block"),
        "reshard-after-forward": (reshard, "auto"),
        "forward-prefetch": (str(depth), "0"),
    }
    return tuple((name, value) for name, (value, usual) in changes.items() if value != usual)
