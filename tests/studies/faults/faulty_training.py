"""A training with one injected fault: `python faulty_training.py FAULT --rank R --step S`.

The line of a fault ends with a comment `# fault: NAME`, by which the suite finds its number.
"""

import argparse
import ctypes
import fcntl
import functools
import gc
import itertools
import mmap
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as all_reduce_by_name
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

FOREVER_S = 600.0
FAULT_TIME = "fault-time"
"""The file with the time at which the faulty step began, on the machine's monotonic clock."""
WIDTH = 32
LIMIT_BYTES = 64 << 20
"""The limit of the device's memory in the faults `memory-*`."""
MAPPED_BYTES = 1 << 20


class Block(nn.Module):
    """A block with a residual path."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return x + self.down(torch.relu(self.up(x)))  # fault: batch


class Model(nn.Module):
    """Blocks; `order` gives the calls of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(3))
        self.wide = Block(WIDTH, 2 * WIDTH)
        self.order = "first 0 1 2 wide"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the blocks in `order`."""
        for name in self.order.split():
            x = self._called(name)(x)  # fault: order
        return x.square().mean()

    def _called(self, name: str) -> nn.Module:
        return self.blocks[int(name)] if name.isdecimal() else getattr(self, name)


class LlamaLoss(nn.Module):
    """A small Llama of Transformers and its loss; `skipped` names a layer that is left out."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=WIDTH * 2,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.inner = LlamaForCausalLM(config)
        self.order = ""
        self._all = list(self.inner.model.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of the model on tokens that follow from `x`."""
        if self.order:
            chosen = [self._all[int(name)] for name in self.order.split()]
            self.inner.model.layers = nn.ModuleList(chosen)
            self.inner.model.config.num_hidden_layers = len(chosen)
        tokens = (x.abs() * 1000).long() % 64  # fault: tokens
        return self.inner(input_ids=tokens, labels=tokens).loss  # fault: llama


class Batches(Dataset):
    """Random batches of one reader; `slow` is the number of a batch that never arrives."""

    def __init__(self, length: int, slow: int = -1, reader: int | None = None) -> None:
        """Readers with other numbers have other batches. Default: the rank."""
        self.length = length
        self.slow = slow
        self.reader = int(os.environ["RANK"]) if reader is None else reader

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == self.slow:
            time.sleep(FOREVER_S)  # fault: data
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(1000 * self.reader + at))


def make_model(kind: str, *, low_precision: bool) -> nn.Module:
    """A sharded model."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low_precision else None)
    if kind == "llama":
        model: nn.Module = LlamaLoss()
        units = [*model.inner.model.layers]
    else:
        model = Model()
        units = [model.first, *model.blocks, model.wide]
    for unit in units:
        fully_shard(unit, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


# --- faults of one rank in one step, before its forward


def lose_order(model: nn.Module, order: str) -> None:
    """Change the order of the units permanently."""
    model.order = order


def save_alone() -> None:
    """Save a checkpoint into a pipe without a reader."""
    path = f"pipe-{os.getpid()}"
    os.mkfifo(path)
    torch.save({"weights": torch.zeros(10)}, path)  # fault: checkpoint


def evaluate_alone() -> None:
    """Run a long evaluation on one rank."""
    total = torch.zeros(())
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        total += torch.randn(64, 64).sum()  # fault: evaluation


def stop_in_debugger() -> None:
    """Stop in a debugger that receives no command."""
    import pdb

    reader, _ = os.pipe()
    pdb.Pdb(stdin=os.fdopen(reader), stdout=sys.stderr, nosigint=True).set_trace()
    time.sleep(0)  # fault: breakpoint


def retry_for_long() -> None:
    """Handle an exception slowly."""
    try:
        raise ValueError("a sample is damaged")
    except ValueError:
        time.sleep(FOREVER_S)  # fault: handler


def lock_up() -> None:
    """Take a lock twice."""
    lock = threading.Lock()
    with lock:
        lock.acquire()  # fault: lock


def hold_the_interpreter() -> None:
    """Sleep in native code that keeps Python's lock."""
    ctypes.PyDLL(None).sleep(int(FOREVER_S))  # fault: native


def hold_the_interpreter_in_a_thread() -> None:
    """Hold the lock in another thread, while this thread issues collectives."""
    library = ctypes.PyDLL(None)
    threading.Thread(target=lambda: library.sleep(int(FOREVER_S)), daemon=True).start()


def stop_process() -> None:
    """Stop this process as a debugger or a scheduler does."""
    os.kill(os.getpid(), signal.SIGSTOP)  # fault: stopped


def wait_for_child() -> None:
    """Wait for a child process that does not end."""
    import subprocess

    subprocess.run(["sleep", str(FOREVER_S)], check=True)  # fault: child


def fail() -> None:
    """Raise an exception."""
    raise ValueError("the loss is not a number")  # fault: exception


def fail_late() -> None:
    """Let the others wait for longer than a hang takes, then raise an exception."""
    time.sleep(4)
    raise RuntimeError("gave up")  # fault: late


def time_out() -> None:
    """Raise an error of this rank's own whose words are those of a lost peer."""
    raise TimeoutError("the connection to the tokenizer timed out")  # fault: own


def fail_for_memory() -> None:
    """Raise the error of the allocator."""
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")  # fault: memory


def hoard() -> None:
    """Allocate more than the limit of the device's memory."""
    torch.zeros(LIMIT_BYTES)  # fault: hoard


def crash() -> None:
    """Read address 0."""
    ctypes.string_at(0)  # fault: segmentation


def abort() -> None:
    """Abort in native code."""
    os.abort()  # fault: abort


def vanish() -> None:
    """Exit without Python's exit handlers."""
    os._exit(3)  # fault: vanish


def be_killed() -> None:
    """Die of SIGKILL, like by the kernel's OOM killer."""
    os.kill(os.getpid(), signal.SIGKILL)  # fault: killed


def leave() -> None:
    """End normally, but too early."""
    sys.exit(0)  # fault: leave


def reduce_alone() -> None:
    """Issue a collective that the other ranks do not issue."""
    dist.all_reduce(torch.zeros(WIDTH))  # fault: foreign


class Slow:
    """An object in a cycle whose finalizer takes long and keeps Python's lock."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        """Sleep in native code."""
        ctypes.PyDLL(None).sleep(int(FOREVER_S))  # fault: garbage


def collect_garbage() -> None:
    """Collect garbage for a long time."""
    Slow()
    gc.collect()


def read_pages() -> None:
    """Repeatedly read pages that are not in memory, as when memory is short."""
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        file.write(os.urandom(MAPPED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # no reading ahead
        forget = functools.partial(mapped.madvise, mmap.MADV_DONTNEED)
        drop = functools.partial(os.posix_fadvise, file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = functools.partial(mapped.__getitem__, slice(None, None, mmap.PAGESIZE))
        for _ in itertools.repeat(None):
            forget(), drop(), read()  # fault: pages


def synchronize_alone() -> None:
    """Wait in a barrier that the other ranks do not enter."""
    dist.barrier()  # fault: barrier


def broadcast_alone() -> None:
    """Broadcast an object that the other ranks do not receive."""
    dist.broadcast_object_list([{"epoch": 1}], src=dist.get_rank())  # fault: object


def wait_for_thread() -> None:
    """Wait for an item of a thread that has died."""
    items: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=lambda: items, daemon=True)
    thread.start()
    items.get()  # fault: queue


def wait_for_file() -> None:
    """Wait for the lock of a file that another process holds."""
    import subprocess

    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    name = f"lock-{os.getpid()}"
    code = f"{holder}; print(flush=True); time.sleep({FOREVER_S})"
    process = subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with Path(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # fault: file


def interrupt() -> None:
    """Send SIGINT, like Ctrl-C; a shell may have started the process to ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(FOREVER_S)


FAULTS: dict[str, Callable[[], None]] = {
    "checkpoint": save_alone,
    "evaluation": evaluate_alone,
    "breakpoint": stop_in_debugger,
    "handler": retry_for_long,
    "lock": lock_up,
    "native": hold_the_interpreter,
    "native-thread": hold_the_interpreter_in_a_thread,
    "stopped": stop_process,
    "child": wait_for_child,
    "exception": fail,
    "exception-late": fail_late,
    "exception-own": time_out,
    "memory": fail_for_memory,
    "memory-hoard": hoard,
    "segmentation": crash,
    "abort": abort,
    "vanish": vanish,
    "killed": be_killed,
    "leave": leave,
    "foreign": reduce_alone,
    "garbage": collect_garbage,
    "pages": read_pages,
    "barrier": synchronize_alone,
    "object": broadcast_alone,
    "queue": wait_for_thread,
    "file": wait_for_file,
    "interrupt": interrupt,
}
ORDERS = {
    "mlp": {
        "skip-equal": "first 0 2 wide",
        "skip-other": "0 1 2",
        "repeat": "first 0 1 1 2 wide",
        "swap-equal": "first 1 0 2 wide",
        "swap-other": "first 0 1 wide 2",
        "branch": "first 0 0 2 wide",
    },
    "llama": {
        "skip-equal": "0 2 3",
        "skip-other": "1 2 3",
        "repeat": "0 1 1 2 3",
        "swap-equal": "1 0 2 3",
        "swap-other": "0 1 3 2",
        "branch": "0 0 2 3",
    },
}


def train(given: argparse.Namespace) -> None:
    """Train, with the fault on one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    is_faulty = rank == given.rank
    everyone = given.fault in ("all-slow", "all-lock")
    low = given.fault == "dtype" and is_faulty
    model = make_model(given.model, low_precision=low)
    length = given.step if given.fault == "uneven" and is_faulty else given.steps
    slow = given.step if given.fault.startswith("data") and is_faulty else -1
    workers = 1 if given.fault == "data-worker" else 0
    context = "fork" if workers else None
    loader = DataLoader(Batches(length, slow), num_workers=workers, multiprocessing_context=context)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    apart = dist.new_group(list(range(world)))
    for step, batch in enumerate(loader):  # fault: loop
        if step == given.step and is_faulty:
            Path(FAULT_TIME).write_text(str(time.monotonic()))
        if step == given.step and (is_faulty or everyone):
            inject(given, model)
        if given.fault == "foreign-absent" and step == given.step and not is_faulty:
            dist.all_reduce(torch.zeros(3), group=apart)  # fault: absent
        if given.fault == "foreign-hidden" and step == given.step and not is_faulty:
            all_reduce_by_name(torch.zeros(3), group=apart)  # fault: hidden
        if given.fault == "memory-batch" and is_faulty and step == given.step:
            batch = batch.repeat(LIMIT_BYTES // batch.numel() // 16, 1)
        size = 5 if given.fault == "user-size" and is_faulty and step == given.step else 4
        dist.all_reduce(torch.zeros(size))  # fault: user
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.pause)
    dist.barrier()


def inject(given: argparse.Namespace, model: nn.Module) -> None:
    """Apply the fault on its rank and in its step."""
    if given.fault in ORDERS[given.model]:
        lose_order(model, ORDERS[given.model][given.fault])
    elif given.fault == "all-slow":
        time.sleep(given.slow)  # fault: slow
    elif given.fault == "all-lock":
        lock_up()
    elif given.fault in FAULTS:
        FAULTS[given.fault]()


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--slow", type=float, default=FOREVER_S)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
