"""Reduce tensors to fingerprints, which show differences of two runs in little space."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from fsdp_inspect.recording.tensors import local_part, tensors_in
from fsdp_inspect.trace.step_dump import FINGERPRINT_LENGTH, FINGERPRINT_SAMPLES, Array


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> Array:
    """Sum, sum of squares and evenly spaced values; shape: (FINGERPRINT_LENGTH,), float64."""
    flat = tensor.detach().reshape(-1)
    count = min(flat.numel(), FINGERPRINT_SAMPLES)
    found = np.zeros(FINGERPRINT_LENGTH)
    if count:
        wide = flat.double()
        places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).round().long()
        found[0], found[1] = float(wide.sum()), float(wide.dot(wide))
        found[2 : 2 + count] = wide[places.to(flat.device)].cpu().numpy()
    return found


def fingerprint_all(value: Any) -> Array:
    """One fingerprint of all floating tensors of an output: of their concatenation."""
    tensors = [
        each
        for each in map(local_part, tensors_in(value))
        if each.is_floating_point() and each.numel()
    ]
    if not tensors:
        return np.zeros(FINGERPRINT_LENGTH)
    return fingerprint(torch.cat([each.detach().reshape(-1).double() for each in tensors]))


def digest(*values: Any) -> str:
    """A checksum of all tensors in the values."""
    total = 0
    for tensor in map(local_part, tensors_in(values)):
        raw = tensor.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(raw.tobytes(), total)
    return f"{total:08x}"
