"""Make memory snapshots in torch's form with a small caching allocator.

The keys, states, actions and their order are those of `torch.cuda.memory._snapshot()` in torch 2.13
(Module.cpp, THCPModule_memorySnapshot). Sizes are rounded up to 512 bytes; a segment is taken for
each size that finds no free block, and blocks are split exactly.
"""

import pickle
from dataclasses import dataclass, field
from pathlib import Path

BASE = 0x7F0000000000
START_US = 1_795_000_000_000_000


@dataclass
class FakeAllocator:
    segment_bytes: int = 1 << 20
    time_us: int = START_US
    segments: list[dict] = field(default_factory=list)
    trace: list[dict] = field(default_factory=list)
    annotations: list[dict] = field(default_factory=list)
    metadata: str = ""
    reserved: int = 0
    frames: list[dict] = field(default_factory=list)

    def alloc(self, size, *, frames=None):
        """The address of a new block."""
        rounded = -(-size // 512) * 512
        block = self._find(rounded) or self._find_in_new_segment(rounded)
        block.update(size=rounded, requested_size=size, state="active_allocated")
        block["frames"] = self.frames if frames is None else frames
        self._note("alloc", block["address"], size, frames=block["frames"])
        return block["address"]

    def free(self, address, *, completed=True):
        block = self._block(address)
        self._note("free_requested", address, block["requested_size"])
        if completed:
            self._note("free_completed", address, block["requested_size"])
        block["state"] = "inactive" if completed else "active_pending_free"

    def out_of_memory(self, size, device_free):
        self._note("oom", device_free, size)

    def annotate(self, name, stage):
        self.time_us += 1
        entry = {"name": name, "stage": stage, "device": 0, "time_us": self.time_us}
        self.annotations.append(entry)

    def inside(self, name):
        return _Range(self, name)

    def snapshot(self, *, entries=None):
        """The snapshot in the form of `_snapshot()`; `entries` keeps the last ones only."""
        self._note("snapshot", 0, 0)
        return {
            "segments": [self._describe(segment) for segment in self.segments],
            "device_traces": [self.trace[-entries:] if entries else self.trace],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
                "max_split_size": -1,
                "roundup_power2_divisions": {"1": 0, "2": 0},
            },
            "external_annotations": self.annotations,
        }

    def dump(self, path, *, protocol=4, **options) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(**options), protocol=protocol))
        return path

    def _note(self, action, address, size, *, frames=None):
        self.time_us += 1
        where = "device_free" if action == "oom" else "addr"
        self.trace.append(
            {
                "action": action,
                where: address,
                "size": size,
                "stream": 0,
                "time_us": self.time_us,
                "compile_context": "N/A",
                "user_metadata": self.metadata,
                "frames": frames or [],
                "pool_id": (0, 0),
            }
        )

    def _find(self, size):
        for segment in self.segments:
            for position, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= size:
                    rest = block["size"] - size
                    if rest:
                        after = {**block, "address": block["address"] + size, "size": rest}
                        segment["blocks"].insert(position + 1, after)
                    return block
        return None

    def _find_in_new_segment(self, size):
        total = max(self.segment_bytes, size)
        address = BASE + 2 * self.reserved
        self.reserved += total
        free = {"address": address, "size": total, "requested_size": 0, "state": "inactive"}
        self.segments.append({"address": address, "blocks": [{**free, "frames": []}]})
        self._note("segment_alloc", address, total)
        return self._find(size)

    def _block(self, address):
        return next(
            block
            for segment in self.segments
            for block in segment["blocks"]
            if block["address"] == address
        )

    def _describe(self, segment):
        blocks = segment["blocks"]
        active = [block for block in blocks if block["state"] != "inactive"]
        allocated = [block for block in active if block["state"] == "active_allocated"]
        return {
            "device": 0,
            "address": segment["address"],
            "total_size": sum(block["size"] for block in blocks),
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


@dataclass
class _Range:
    allocator: FakeAllocator
    name: str

    def __enter__(self):
        self.allocator.annotate(self.name, "START")

    def __exit__(self, *_):
        self.allocator.annotate(self.name, "END")


KIB = 1024
UNITS = ("layers.0", "layers.1")


def train(allocator, *, num_steps=2, leak=0):
    """Steps of two FSDP2 units, with the ranges that torch annotates.

    Before the first step there are 64 KiB of sharded parameters. In a step, each unit has 32 KiB
    gathered and 30 KiB unsharded in forward and again in backward, 10 KiB of activations until its
    backward, and 5 KiB temporary. In backward it has 20 KiB of gradients, 21 KiB to reduce, and 7
    KiB reduced (kept to the end of the step). The first optimizer step makes 12 KiB of state. Each
    step leaks `leak` bytes.

    The peak is in the backward of layers.1: see `test_snapshot.py`.
    """
    allocator.alloc(64 * KIB, frames=[frame("_init_sharded_param", "_fsdp_param.py")])
    for step in range(num_steps):
        saved = {unit: _forward(allocator, unit) for unit in UNITS}
        if leak:
            allocator.alloc(leak)
        reduced = [_backward(allocator, unit, saved[unit]) for unit in reversed(UNITS)]
        with allocator.inside("FSDP::root_post_backward_callback"):
            pass
        with allocator.inside("Optimizer.step#AdamW.step"):
            if step == 0:
                allocator.alloc(12 * KIB)
        for address in reduced:
            allocator.free(address)
    return allocator


def frame(name, filename="train.py", line=1):
    return {"name": name, "filename": filename, "line": line}


def _gather(allocator, unit):
    with allocator.inside(f"FSDP::all_gather ({unit})"):
        buffer = allocator.alloc(32 * KIB)
    with allocator.inside(f"FSDP::all_gather_copy_out ({unit})"):
        unsharded = allocator.alloc(30 * KIB)
    allocator.free(buffer)
    return unsharded


def _forward(allocator, unit):
    with allocator.inside(f"FSDP::pre_forward ({unit})"):
        unsharded = _gather(allocator, unit)
    saved = allocator.alloc(10 * KIB)
    allocator.free(allocator.alloc(5 * KIB))
    with allocator.inside(f"FSDP::post_forward ({unit})"):
        allocator.free(unsharded)
    return saved


def _backward(allocator, unit, saved):
    with allocator.inside(f"FSDP::pre_backward ({unit})"):
        unsharded = _gather(allocator, unit)
    gradient = allocator.alloc(20 * KIB)
    allocator.free(saved)
    with allocator.inside(f"FSDP::post_backward_accumulate ({unit})"):
        pass
    with allocator.inside(f"FSDP::post_backward_reshard ({unit})"):
        allocator.free(unsharded)
    with allocator.inside(f"FSDP::post_backward_reduce ({unit})"):
        buffer = allocator.alloc(21 * KIB)
        allocator.free(gradient)
        reduced = allocator.alloc(7 * KIB)
        allocator.free(buffer)
    return reduced
