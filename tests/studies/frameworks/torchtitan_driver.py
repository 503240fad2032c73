"""Run torchtitan's own training command on CPU.

    torchrun --nproc-per-node 2 torchtitan_driver.py FOLDER [--callback] [MISTAKE]

The losses are written to FOLDER. `torchtitan_cpu` lists the replaced parts. With `--callback`,
torchtitan's own option activates the override that records. `torchtitan_mistakes` has the MISTAKEs.
"""

from __future__ import annotations

import json
import sys

import torch  # noqa: F401 - first, as in a user's script: the launcher waits for it

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from tests.studies.frameworks import torchtitan_cpu

RECORD = "fsdp_inspect.recording.integrations.torchtitan.record"


def main(folder: str, mistake: str = "", *, with_callback: bool) -> None:
    """Train with the configuration of `torchtitan_configs`, or with a mistake."""
    torchtitan_cpu.install()
    from torchtitan.train import main as train

    options = {"path": f"{folder}/run"}
    sys.argv[1:] = [
        *(
            "--module",
            f"tests.studies.frameworks.torchtitan_{'mistakes' if mistake else 'configs'}",
        ),
        *("--config", mistake or "small"),
        *("--metrics.folder", folder, "--dump-folder", folder),
        *("--parallelism.spmd-backend", "partial_dtensor"),
        *(["--override.imports", f"{RECORD}={json.dumps(options)}"] if with_callback else []),
    ]
    train()


if __name__ == "__main__":
    words = [each for each in sys.argv[1:] if each != "--callback"]
    main(*words, with_callback="--callback" in sys.argv)
    release_process_groups()
