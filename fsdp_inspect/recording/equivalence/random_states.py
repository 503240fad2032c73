"""Save the states of the random generators in one run, and restore them in the other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_random_states(folder: Path, name: str) -> None:
    """Save the default generators of Python, NumPy and torch under a name."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {f"torch-{at}": state.numpy() for at, state in enumerate(_torch_states())}
    _, keys, position, has_gauss, gauss = np.random.get_state()
    arrays: dict[str, Any] = {"numpy": keys, **states}
    np.savez(folder / f"{name}.npz", **arrays)
    text = json.dumps({"python": random.getstate(), "numpy": [position, has_gauss, gauss]})
    (folder / f"{name}.json").write_text(text)


def restore_random_states(folder: Path, name: str) -> None:
    """Restore the states saved under a name; without them, the generators stay unchanged."""
    path = folder / f"{name}.json"
    if not path.exists():
        return
    fields = json.loads(path.read_text())
    version, internal, gauss = fields["python"]
    random.setstate((version, tuple(internal), gauss))
    with np.load(folder / f"{name}.npz") as arrays:
        np.random.set_state(("MT19937", arrays["numpy"], *fields["numpy"]))
        torch.set_rng_state(torch.from_numpy(arrays["torch-0"]))
        for device in range(_num_devices()):
            if f"torch-{device + 1}" in arrays:
                state = torch.from_numpy(arrays[f"torch-{device + 1}"])
                torch.cuda.set_rng_state(state, device)


def _torch_states() -> list[torch.Tensor]:
    own = [torch.cuda.get_rng_state(device) for device in range(_num_devices())]
    return [torch.get_rng_state(), *own]


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
