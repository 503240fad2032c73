"""A training on two ranks that ends in a chosen way: `torchrun ... ending_script.py END [FOLDER]`.

With FOLDER, a `Recorder` is attached in a `with` block. `ENDS` maps the name of an end to the
function that brings it about at step `FAULT_STEP`; each docstring states the end. Just before, the
rank writes the time (monotonic, ns) into the file that the variable FAULT_TIME names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

NUM_STEPS = 8
FAULT_STEP = 4
SECOND_ERROR_S = 0.5
"""The delay of the second error, on the other rank."""

ENDS: dict[str, Callable[[Training], Any]] = {}


def end(function: Callable[[Training], Any]) -> Callable[[Training], Any]:
    """Register an end under its name with dashes; it runs on every rank at the fault step."""
    ENDS[function.__name__.replace("_", "-").strip("-")] = function
    return function


class Data(Dataset[torch.Tensor]):
    """Batches; `fails_at` is the index at which a batch raises."""

    fails_at = -1

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            note_fault()
            raise ValueError(f"broken sample {index}")
        return torch.ones(16)


class Stopping(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        note_fault()
        raise ValueError("fault in backward")


class Training:
    """The state that an end may change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data: Any = None
        self.after_loop: Callable[[], None] = lambda: None
        """Called after the `with` block of the recorder."""
        self.transform: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        """Applied to the model's output."""

    @property
    def is_faulty(self) -> bool:
        """Whether this is the rank that fails."""
        return self.rank == 1

    def run(self, recorder: Any, loop_end: Callable[[Training], Any], name: str) -> None:
        """Train until the end."""
        data = Data()
        if name.startswith("data") and self.is_faulty:
            data.fails_at = FAULT_STEP
        self.data = DataLoader(data, batch_size=1, num_workers=name.startswith("data-worker"))
        first = 0 if name.endswith("first-step") else FAULT_STEP
        for step, batch in enumerate(self.data):
            if step == first:
                loop_end(self)
            with recorder.step() if recorder is not None else contextlib.nullcontext():
                self.transform(self.model(batch)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def note_fault() -> None:
    """Write the time of the fault, once for all ranks."""
    path = Path(os.environ["FAULT_TIME"])
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(str(time.monotonic_ns()))


def fail(message: str = "no label") -> None:
    """Raise an error of the script."""
    note_fault()
    raise ValueError(message)


def restarts() -> int:
    """The number of restarts of the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher() -> int:
    """The process of torchrun."""
    return os.getppid()


# --- exceptions


@end
def exception(training: Training) -> None:
    """One rank raises between steps; the other waits for it in the next collective."""
    if training.is_faulty:
        fail()


@end
def exception_on_rank_0(training: Training) -> None:
    """Rank 0 raises, which often holds the store and the listening ports."""
    if not training.is_faulty:
        fail()


@end
def exception_in_first_step(training: Training) -> None:
    """One rank raises before the first step has ended."""
    if training.is_faulty:
        fail()


@end
def exception_in_forward(training: Training) -> None:
    """A hook of a module raises in forward."""
    if training.is_faulty:
        training.model[2].register_forward_pre_hook(lambda *_: fail("fault in forward"))


@end
def exception_in_forward_hook(training: Training) -> None:
    """A global forward hook of the script raises."""
    if training.is_faulty:
        training.model[1].register_forward_hook(lambda *_: fail("fault in a hook"))


@end
def exception_in_backward(training: Training) -> None:
    """A custom autograd function raises in backward, on the thread of the engine."""
    if training.is_faulty:
        training.transform = Stopping.apply


@end
def exception_in_gradient_hook(training: Training) -> None:
    """A tensor hook raises in backward."""

    def hooked(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: fail("fault in a gradient hook"))
        return x

    if training.is_faulty:
        training.transform = hooked


@end
def exception_in_loss(training: Training) -> None:
    """The loss raises between forward and backward."""
    if training.is_faulty:
        training.transform = lambda _: fail("bad loss")


@end
def exception_in_optimizer(training: Training) -> None:
    """The optimizer raises."""
    if training.is_faulty:
        training.optimizer.register_step_pre_hook(lambda *_: fail("fault in the optimizer"))


@end
def data_worker(training: Training) -> None:
    """A worker process of the data loader raises."""


@end
def data_main(training: Training) -> None:
    """The data set raises in the main process."""


@end
def exception_in_evaluation(training: Training) -> None:
    """One rank raises in an evaluation."""
    with torch.no_grad():
        training.model(torch.ones(1, 16))
        if training.is_faulty:
            fail("fault in evaluation")


@end
def exception_in_checkpoint(training: Training) -> None:
    """Saving fails because the folder does not exist."""
    if training.is_faulty:
        note_fault()
        torch.save({"x": torch.ones(1)}, "/nonexistent/checkpoint.pt")


@end
def exception_with_cause(training: Training) -> None:
    """An error with a cause: two tracebacks are printed."""
    if training.is_faulty:
        try:
            {}["missing"]
        except KeyError as error:
            note_fault()
            raise RuntimeError("configuration") from error


@end
def exception_group(training: Training) -> None:
    """An exception group."""
    if training.is_faulty:
        note_fault()
        raise ExceptionGroup("both", [ValueError("one"), TypeError("two")])


@end
def exception_without_text(training: Training) -> None:
    """An error whose `str` raises."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    if training.is_faulty:
        note_fault()
        raise Odd


@end
def exception_with_own_hook(training: Training) -> None:
    """The script has its own `sys.excepthook`."""
    sys.excepthook = lambda kind, error, where: print(f"own hook: {error}", file=sys.stderr)
    if training.is_faulty:
        fail()


@end
def exception_in_thread(training: Training) -> None:
    """A thread of the script raises; the training goes on and ends normally."""
    if training.is_faulty:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()


@end
def exception_in_cleanup(training: Training) -> None:
    """An exit handler of the script raises after a normal training."""
    import atexit

    if training.is_faulty:
        atexit.register(fail)


@end
def exception_everywhere(training: Training) -> None:
    """All ranks raise the same error at once."""
    fail()


@end
def caught_exception(training: Training) -> None:
    """The script catches the error and exits with its own code."""
    if training.is_faulty:
        try:
            fail()
        except ValueError:
            sys.exit(5)


@end
def error_file(training: Training) -> None:
    """`@record` writes torchelastic's error file."""
    if training.is_faulty:
        record(fail)()


# --- two errors


@end
def two_errors(training: Training) -> None:
    """The other rank fails 0.5 s after the first one, of another check."""
    if training.is_faulty:
        fail("the cause")
    time.sleep(SECOND_ERROR_S)
    raise RuntimeError("a consequence")


@end
def two_errors_on_rank_0_first(training: Training) -> None:
    """Rank 0 is the cause."""
    if not training.is_faulty:
        fail("the cause")
    time.sleep(SECOND_ERROR_S)
    raise RuntimeError("a consequence")


@end
def error_then_exit(training: Training) -> None:
    """The other rank exits with its own code 0.5 s later."""
    if training.is_faulty:
        fail("the cause")
    time.sleep(SECOND_ERROR_S)
    os._exit(7)


# --- signals


def signal_itself(training: Training, number: int) -> None:
    if training.is_faulty:
        note_fault()
        os.kill(os.getpid(), number)
        time.sleep(30)


@end
def sigterm(training: Training) -> None:
    """A rank gets SIGTERM."""
    signal_itself(training, signal.SIGTERM)


@end
def sigint(training: Training) -> None:
    """A rank gets SIGINT."""
    signal_itself(training, signal.SIGINT)


@end
def sigkill(training: Training) -> None:
    """A rank is killed."""
    signal_itself(training, signal.SIGKILL)


@end
def sighup(training: Training) -> None:
    """A rank loses its terminal."""
    signal_itself(training, signal.SIGHUP)


@end
def abort(training: Training) -> None:
    """A rank aborts, as after an assertion in native code."""
    if training.is_faulty:
        note_fault()
        os.abort()


@end
def segmentation_fault(training: Training) -> None:
    """A rank reads address 0."""
    if training.is_faulty:
        note_fault()
        ctypes.string_at(0)


@end
def handled_sigterm(training: Training) -> None:
    """The script turns SIGTERM into an exit of its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    signal_itself(training, signal.SIGTERM)


def signal_launcher(training: Training, number: int) -> None:
    calls: list[tuple[Callable[..., object], tuple[int, ...]]] = [(time.sleep, (30,))]
    if training.is_faulty:
        note_fault()
        calls.insert(0, (os.kill, (launcher(), number)))
    for call, arguments in calls:
        call(*arguments)  # one line: the answer of torchrun interrupts the kill or the sleep


@end
def sigterm_to_launcher(training: Training) -> None:
    """The scheduler ends the job."""
    signal_launcher(training, signal.SIGTERM)


@end
def sigint_to_launcher(training: Training) -> None:
    """The user presses Ctrl-C."""
    signal_launcher(training, signal.SIGINT)


# --- exits


@end
def exit_code(training: Training) -> None:
    """A rank exits with a code."""
    if training.is_faulty:
        note_fault()
        sys.exit(3)


@end
def exit_text(training: Training) -> None:
    """A rank exits with a message, code 1."""
    if training.is_faulty:
        note_fault()
        sys.exit("the data set is empty")


@end
def early_exit(training: Training) -> None:
    """A rank exits normally before the others, which then fail."""
    if training.is_faulty:
        note_fault()
        sys.exit(0)


@end
def hard_exit(training: Training) -> None:
    """A rank leaves without cleaning up."""
    if training.is_faulty:
        note_fault()
        os._exit(3)


@end
def hard_exit_of_all(training: Training) -> None:
    """All ranks leave without cleaning up, with code 0."""
    dist.barrier()
    note_fault()
    os._exit(0)


@end
def keyboard_interrupt(training: Training) -> None:
    """KeyboardInterrupt on one rank."""
    if training.is_faulty:
        note_fault()
        raise KeyboardInterrupt


# --- memory


@end
def device_out_of_memory(training: Training) -> None:
    """An allocation on the device fails."""
    if training.is_faulty:
        note_fault()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@end
def host_out_of_memory(training: Training) -> None:
    """An allocation on the host fails."""
    if training.is_faulty:
        note_fault()
        bytearray(1 << 60)


# --- after the last step


@end
def exception_after_training(training: Training) -> None:
    """A rank raises after the recording has ended."""
    if training.is_faulty:
        training.after_loop = fail


@end
def exception_after_training_on_rank_0(training: Training) -> None:
    """Rank 0 raises after the recording has ended."""
    if not training.is_faulty:
        training.after_loop = fail


@end
def exit_after_training(training: Training) -> None:
    """Every rank exits with code 4 after the recording has ended."""

    def leave() -> None:
        note_fault()
        os._exit(4)

    training.after_loop = leave


# --- elastic restarts


@end
def restart(training: Training) -> None:
    """The first attempt fails, the second one ends normally."""
    if training.is_faulty and restarts() == 0:
        fail()


@end
def restart_in_vain(training: Training) -> None:
    """Both attempts fail."""
    if training.is_faulty:
        fail(f"attempt {restarts()}")


@end
def restart_after_kill(training: Training) -> None:
    """A rank is killed in the first attempt."""
    if restarts() == 0:
        signal_itself(training, signal.SIGKILL)


@end
def hang(training: Training) -> None:
    """A rank sleeps; the job is killed from outside."""
    if training.is_faulty:
        note_fault()
        time.sleep(600)


@end
def no_fault(training: Training) -> None:
    """A normal training."""


@contextlib.contextmanager
def recording(training: Training, folder: str) -> Iterator[Any]:
    """A recorder of the training; None without a folder."""
    if not folder:
        yield None
        return
    from fsdp_inspect import Recorder

    path = Path(folder) / "run"
    with Recorder(training.model, optimizer=training.optimizer, path=path) as recorder:
        yield recorder


def main(name: str, folder: str = "") -> None:
    dist.init_process_group("gloo")
    training = Training()
    with recording(training, folder) as recorder:
        training.run(recorder, ENDS[name], name)
    training.after_loop()
    dist.destroy_process_group()
    print(f"rank {training.rank} trained", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
