"""Make a CUDA build of torch behave as a CPU build on a machine without a driver: a pytest plugin.

Such a build names CUDA as its accelerator on any machine, and then fails to initialise it.
"""

from typing import Any

import torch


def accelerator(*_: Any) -> torch.device:
    return torch.device("cpu")


if torch.version.cuda and not torch.cuda.is_available():
    torch._C._get_accelerator = accelerator
