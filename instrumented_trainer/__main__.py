"""Train and record: `torchrun --nproc-per-node N -m instrumented_trainer [--key VALUE ...]`.

Exits with 2, before any process group starts, if a setting is invalid; only rank 0 prints the
reason.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect.errors import FsdpInspectError
from instrumented_trainer.command_line import parse_command
from instrumented_trainer.config import TrainerConfig

BAD_SETTING = 2

_INTERRUPTED = 130
_PATIENCE_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code."""
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
    except FsdpInspectError as error:
        return _refuse(error)
    if command.text is not None:
        if _is_first():
            print(command.text, end="")
        return 0
    return _run(command.config)


def _run(config: TrainerConfig) -> int:
    from instrumented_trainer.runtime import process_group, read_runtime
    from instrumented_trainer.trainer import prepare, train

    try:
        runtime = read_runtime(config.emulate)
        prepared = prepare(config, runtime)
    except FsdpInspectError as error:
        return _refuse(error)
    try:
        with process_group(runtime):
            train(prepared)
    except FsdpInspectError as error:
        print(f"instrumented_trainer, rank {runtime.rank}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if runtime.is_first:
            print("instrumented_trainer: stopped", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _refuse(error: FsdpInspectError) -> int:
    if _is_first():
        print(f"instrumented_trainer: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(str(error))
    else:
        # torchrun ends all ranks as soon as one has ended: wait until the first has printed.
        time.sleep(_PATIENCE_S)
    return BAD_SETTING


def _tell_torchrun(message: str) -> None:
    """Make torchrun repeat the message at the end of its own failure report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
