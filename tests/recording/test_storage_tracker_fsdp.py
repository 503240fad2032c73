"""The storage tracker on real FSDP2 code under a fake process group of 8 ranks."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.storage_log import TrackedStepMemory
from fsdp_inspect.recording.storage_tracker import StorageTracker
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase
from tests.torch_versions import needs_torch, release

HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
)
WIDTH = 64
S = WIDTH * WIDTH * 4
"""Unsharded bytes of one block of `equal_blocks`."""


@pytest.fixture(scope="module", autouse=True)
def fake_world_of_8() -> Iterator[None]:
    """One process that acts as rank 0 of 8; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    mesh_of.cache_clear()
    dist.destroy_process_group()


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    def __init__(self, dim: int = 32, num_layers: int = 3, vocabulary: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Training:
    """A sharded decoder and its optimizer; every instance starts from the same weights."""

    def __init__(
        self,
        *,
        reshard: bool | int = True,
        half: bool = False,
        checkpointed: bool = False,
        grouped: bool = False,
        mesh_shape: tuple[int, ...] = (8,),
        optimizer: dict[str, bool] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = Decoder()
        self.tokens = torch.arange(96).remainder(48).view(4, 24)
        if checkpointed:
            _checkpoint_layers(self.model)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None
        options = {"mesh": mesh_of(mesh_shape), "mp_policy": policy or MixedPrecisionPolicy()}
        for layer in self.model.layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        if grouped:
            fully_shard([self.model.norm, self.model.head], **options)
        fully_shard(self.model, reshard_after_forward=reshard, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **(optimizer or {}))

    def step(self) -> torch.Tensor:
        logits = self.model(self.tokens).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tracker(self) -> StorageTracker:
        tracker = StorageTracker(lambda: (-1, Phase.FORWARD), device_type="cpu")
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        for category, tensors in (
            (MemoryCategory.SHARDED_PARAMETER, self.model.parameters()),
            (MemoryCategory.BUFFER, self.model.buffers()),
            (MemoryCategory.OPTIMIZER_STATE, states),
            (MemoryCategory.INPUT, self.tokens),
        ):
            tracker.register_known(category, tensors, -1)
        return tracker

    def tracked_step(self) -> TrackedStepMemory:
        tracker = self.tracker()
        with tracker:
            self.step()
        return tracker.result()


def _checkpoint_layers(model: Decoder) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


def torchs_peak(training: Training) -> int:
    """The peak of a step by torch's own tracker, which moves FSDP's hooks."""
    from torch.distributed._tools import FSDPMemTracker

    tracker = FSDPMemTracker(training.model, training.optimizer)
    tracker.track_inputs((training.tokens,))
    with tracker:
        training.step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at import
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="resharded"),
        pytest.param({"reshard": False}, id="kept after forward"),
        pytest.param({"reshard": 2}, id="resharded to 2 ranks"),
        pytest.param({"half": True}, id="bf16"),
        pytest.param({"half": True, "reshard": False}, id="bf16 kept"),
        pytest.param({"checkpointed": True, "half": True}, id="checkpointed"),
        pytest.param({"mesh_shape": (2, 4)}, id="hsdp"),
        pytest.param({"optimizer": {"fused": True}}, id="fused optimizer"),
        pytest.param({"optimizer": {"foreach": True}}, id="foreach optimizer"),
        pytest.param({"optimizer": {"foreach": False, "amsgrad": True}}, id="for-loop optimizer"),
    ],
)
def test_peak_is_byte_for_byte_that_of_torchs_tracker(options):
    theirs, ours = Training(**options), Training(**options)
    for training in (theirs, ours):
        training.step()
    assert ours.tracked_step().peak.total_bytes == torchs_peak(theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at import
def test_peak_with_a_grouped_unit_is_that_of_torchs_plain_tracker():
    # Not FSDPMemTracker: for `fully_shard([norm, head])` it installs FSDP's hooks on each module of
    # the unit, which is then gathered for the norm and again for the head.
    from torch.distributed._tools import MemTracker

    theirs, ours = Training(grouped=True), Training(grouped=True)
    for training in (theirs, ours):
        training.step()
    tracker = MemTracker()
    tracker.track_external(theirs.model, theirs.optimizer, theirs.tokens)
    with tracker:
        theirs.step()
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ours.tracked_step().peak.total_bytes == expected


def test_first_step_ends_with_parameters_and_optimizer_state_and_nothing_of_global_shape():
    training = Training()
    memory = training.tracked_step()
    shards = sum(parameter.to_local().nbytes for parameter in training.model.parameters())
    num_tensors = len(list(training.model.parameters()))
    created = memory.end.total_bytes - memory.start.total_bytes
    assert created == 2 * shards + 4 * num_tensors  # two moments, and a step counter each


def test_losses_under_the_tracker_are_identical_to_the_last_bit():
    needs_torch("2.13", "leaves what the fake process group gathers uninitialised")
    plain, tracked = Training(half=True), Training(half=True)
    expected = [plain.step().item() for _ in range(4)]
    losses = []
    for index in range(4):
        with tracked.tracker() if index % 2 else torch.enable_grad():
            losses.append(tracked.step().item())
    assert losses == expected


def test_hooks_of_every_module_are_the_same_in_the_same_order_after_the_step():
    training = Training(checkpointed=True, grouped=True)
    training.step()
    before = _hooks(training.model)
    tracker = training.tracker()
    with tracker:
        assert _hooks(training.model) == before
        training.step()
    assert _hooks(training.model) == before
    assert any(before)


def _hooks(model: nn.Module) -> list[list[int]]:
    return [
        [id(hook) for name in HOOK_DICTIONARIES for hook in getattr(module, name).values()]
        for module in model.modules()
    ]


def test_a_step_repeats_to_the_byte():
    training = Training(half=True, checkpointed=True)
    training.step()
    first, second = training.tracked_step(), training.tracked_step()
    assert first.peak.owned == second.peak.owned
    assert first.end.total_bytes == second.start.total_bytes == second.end.total_bytes


def test_step_on_fake_tensors_has_the_bytes_of_the_real_one():
    real = Training()
    mesh_of((8,))  # a mesh cannot be made on fake tensors
    with FakeTensorMode():
        fake = Training()
        of_fake = [fake.tracked_step(), fake.tracked_step()]
    for expected, memory in zip([real.tracked_step(), real.tracked_step()], of_fake, strict=True):
        assert memory.peak.owned == expected.peak.owned
        assert memory.end.owned == expected.end.owned


# --- the rules of FSDP2's schedule, in bytes


def equal_blocks(*, reshard: bool = True, depth: int = 0, asynchronous: bool = False) -> nn.Module:
    """Five units of S unsharded bytes each, and a root that owns no parameters."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
    mesh = mesh_of((8,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    for index, block in enumerate(model):
        block.set_modules_to_forward_prefetch(list(model[index + 1 : index + 1 + depth]))
    model._set_unshard_async_op(asynchronous)
    return model


def forward_over_resting(model: nn.Module) -> tuple[int, int]:
    """The peak and the end of a forward, each above the resting memory before it."""
    row = torch.ones(1, WIDTH)
    model(row).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    tracker = StorageTracker(lambda: (-1, Phase.FORWARD))
    tracker.register_known(MemoryCategory.SHARDED_PARAMETER, model.parameters(), -1)
    tracker.register_known(MemoryCategory.INPUT, row, -1)
    with tracker:
        loss = model(row).sum()
        tracker.mark(MemoryPoint.FORWARD_END)
        loss.backward()
    (mark,) = tracker.result().marks
    resting = tracker.result().start.total_bytes
    return mark.peak_bytes - resting, mark.instant.total_bytes - resting


@pytest.mark.parametrize(
    ("options", "num_units", "num_activations"),
    [
        pytest.param({}, 3, 4, id="two gather outputs and the unsharded copy"),
        pytest.param({"depth": 1}, 3, 4, id="prefetch of one unit costs nothing"),
        pytest.param({"depth": 2}, 4, 3, id="prefetch of two units costs one more"),
        pytest.param({"asynchronous": True}, 2, 4, id="a Work frees the gather output early"),
        pytest.param({"reshard": False}, 5 + 2, 4, id="all units stay unsharded"),
    ],
)
def test_forward_peak_over_resting_is_a_whole_number_of_units_and_the_activations(
    options, num_units, num_activations
):
    # The peak is at the last all-gather; each earlier block has kept its output.
    # Without a prefetch, torch 2.15 frees the previous gather output before it copies out of the
    # next one. The peak is then one activation later.
    if release() >= (2, 15) and not options.keys() & {"depth", "asynchronous"}:
        num_units, num_activations = num_units - 1, num_activations + 1
    expected = num_units * S + num_activations * WIDTH * 4
    assert forward_over_resting(equal_blocks(**options))[0] == expected


def test_after_a_forward_without_resharding_every_unit_is_still_whole():
    kept = forward_over_resting(equal_blocks(reshard=False))[1]
    freed = forward_over_resting(equal_blocks(reshard=True))[1]
    assert kept - freed == 5 * S


# --- real processes

GLOO_SCRIPT = """
import json, sys
import torch.distributed as dist
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from tests.recording.test_storage_tracker_fsdp import Training

dist.init_process_group("gloo")
training = Training(half=True, mesh_shape=(2,))
training.step()
memory = training.tracked_step()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"peak": memory.peak.total_bytes, "end": memory.end.total_bytes}, file)
dist.destroy_process_group()
del training, memory
release_process_groups()
"""


@pytest.mark.distributed
def test_memory_of_rank_0_with_gloo_is_that_of_a_fake_group(run_ranks, tmp_path):
    """Gloo's threads free their tensors when they run, so the peak may be higher, but not lower.

    Without gloo's own copies they are equal to the byte: tests/distributed.
    """
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(GLOO_SCRIPT)
    run_ranks(script, out)
    fake = Training(half=True, mesh_shape=(2,))
    fake.step()
    memory = fake.tracked_step()
    real = json.loads(out.read_text())
    assert real["end"] == memory.end.total_bytes
    assert memory.peak.total_bytes <= real["peak"] <= 1.1 * memory.peak.total_bytes


# --- the uses of parameters


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_pass_tells_the_order_in_which_it_uses_its_parameters(
    tmp_path: Path, *, checkpointed: bool
):
    """Under torch 2.13 a linear's bias has no use in backward. Repeated forwards do not count.

    The order of the parameters of one operation is arbitrary.
    """
    training = Training(checkpointed=checkpointed)
    recorder = Recorder(
        training.model, path=tmp_path / "run", memory_steps=(1,), print_verdict=False,
        device_interval_s=0,
    )  # fmt: skip
    with recorder:
        for _ in range(2):
            with recorder.step():
                training.step()
    run = open_run(tmp_path / "run")
    (unit,) = (each for each in run.manifest.units if each.fqn == "layers.1")
    names = [name.removeprefix("layers.1.") for name in unit.parameters]
    samples = run.memory(0)
    uses = samples.where(
        (samples.point == MemoryPoint.PARAMETER_USE) & (samples.unit == unit.index)
    )
    order = {
        phase: [names[place] for place in uses.parameter[uses.phase == phase].tolist()]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert order == {
        Phase.FORWARD: [
            "norm.bias", "norm.weight", "up.weight", "up.bias", "down.weight", "down.bias",
        ],
        Phase.BACKWARD: ["down.weight", "up.weight", "norm.bias", "norm.weight"],
    }  # fmt: skip
    assert (uses.peak_compute <= uses.peak_allocated).all()
