"""Train a tiny sharded model on one rank, with the trackers of the command line.

Usage: python -m tests.studies.trackers.tracked_script RUN [--active] [TRACKER ...]

`fake` writes a line per step into RUN.fake, `broken` raises, and `hanging` never returns. With
`--active`, the script has runs of wandb and MLflow, and logs to wandb itself. It prints the losses.
"""

import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.trackers import feed, feed as delivery, libraries

NUM_STEPS = 12


class Fake:
    """Writes what it gets into a file."""

    def attach(self):
        self.lines = ["attach"]

    def start(self, run):
        self.file = run.folder.with_suffix(".fake")
        self.lines.append(f"start {run.run_id} {run.url}")

    def log(self, step, values):
        self.lines.append(f"{step} {sorted(values)}")

    def close(self):
        self.file.write_text("\n".join([*self.lines, "close"]))


class Broken(Fake):
    def start(self, run):
        raise ConnectionError("no network")


class Hanging(Fake):
    def log(self, step, values):
        threading.Event().wait()


def main():
    run, *names = sys.argv[1:]
    libraries.TRACKERS.update(fake=Fake, broken=Broken, hanging=Hanging)
    delivery.MOST_PENDING = 16
    feed._LAST_LOOK_S = feed._CLOSE_S = 240.0
    close = delivery.Delivery.close

    def close_soon(self, deadline_s):
        close(self, time.monotonic() if self._name == "hanging" else deadline_s)

    delivery.Delivery.close = close_soon
    is_active = "--active" in names
    names = [name for name in names if name != "--active"]
    if is_active:
        import mlflow
        import wandb

        wandb.init(project="own")
        mlflow.start_run(run_name="own")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    recorded = Recorder(
        model,
        optimizer=optimizer,
        path=run,
        log_to=names,
        dashboard_url="http://127.0.0.1:8501/",
        print_verdict=False,
        enabled=run != "none",
    )
    with recorded as recorder:
        for step in range(NUM_STEPS):
            with recorder.step():
                loss = model(torch.randn(4, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.log(loss=loss, tokens_per_s=1000.0)
            print("LOSS", step, loss.item().hex(), flush=True)
            if is_active:
                wandb.log({"own": step}, step=step)
    if is_active:
        wandb.finish()
        mlflow.end_run()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("always")
    main()
