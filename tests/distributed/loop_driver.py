"""Record training loops whose steps are not a forward and its backward, one by one.

torchrun --nproc-per-node 2 loop_driver.py FOLDER [LOOP ...]
"""

import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fsdp_inspect import Plan, Recorder, apply_plan
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, VOCABULARY, NUM_STEPS = 128, 256, 9


class Block(nn.Module):
    """A residual block with two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """A small language model; `repeats` runs each block several times, as ALBERT does."""

    def __init__(self, *, num_blocks: int = 3, repeats: int = 1, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.repeats, self.checkpoints = repeats, checkpoints

    def forward(self, tokens: torch.Tensor, *, has_head: bool = True) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            for _ in range(self.repeats):
                hidden = (
                    checkpoint(layer, hidden, use_reentrant=False)
                    if self.checkpoints
                    else layer(hidden)
                )
        hidden = self.norm(hidden)
        return self.head(hidden) if has_head else hidden


class Wrapped(nn.Module):
    """A model inside another module, as a framework wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model()
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


class Adapted(nn.Module):
    """A frozen matrix with an adapter of rank 5, which two ranks pad; its matrix may be int8."""

    def __init__(self, base: nn.Linear, *, is_quantized: bool) -> None:
        super().__init__()
        base.requires_grad_(requires_grad=False)
        weight = (base.weight * 100).round().to(torch.int8) if is_quantized else base.weight
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.narrow = nn.Linear(base.in_features, 5, bias=False)
        self.wide = nn.Linear(5, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(hidden.dtype)
        return functional.linear(hidden, weight) + self.wide(self.narrow(hidden))


class Experts(nn.Module):
    """Three experts with equal weights, as one tensor, which is sharded on dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.01)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bth,ehd->btd", hidden, self.weights)


def replace_layers(model: nn.Module, loop: str) -> None:
    """Give the blocks of a model the layers of a loop."""
    for layer in model.layers:  # type: ignore[union-attr]
        if loop == "experts":
            layer.up, layer.down = Experts(), nn.Identity()  # type: ignore[union-attr]
        else:
            for name in ("up", "down"):
                base = getattr(layer, name)
                setattr(layer, name, Adapted(base, is_quantized=loop == "quantized"))


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    """The dimension on which experts are sharded."""
    return Shard(1) if parameter.ndim == 3 else None


Step = Callable[[nn.Module, torch.Tensor], None]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def plain(model: nn.Module, tokens: torch.Tensor) -> None:
    """A forward and its backward."""
    loss_of(model(tokens), tokens).backward()


def chunked_loss(model: nn.Module, tokens: torch.Tensor) -> None:
    """torchtitan's loss: the head runs forward and backward alone, chunk by chunk."""
    hidden = model(tokens, has_head=False)
    detached = hidden.detach().requires_grad_()
    for chunk in detached.chunk(4, dim=1):
        model.head(chunk).float().logsumexp(-1).mean().backward()
    hidden.backward(detached.grad)


def gathered_head(model: nn.Module, tokens: torch.Tensor) -> None:
    """torchtitan's loss: the script gathers the head for all chunks, and reduces it once."""
    hidden = model(tokens, has_head=False)
    detached = hidden.detach().requires_grad_()
    head: FSDPModule = model.head  # type: ignore[assignment]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    chunks = detached.chunk(4, dim=1)
    for number, chunk in enumerate(chunks):
        if number == len(chunks) - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        head(chunk).float().logsumexp(-1).mean().backward()  # type: ignore[operator]
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    hidden.backward(detached.grad)


def two_losses(model: nn.Module, tokens: torch.Tensor) -> None:
    """Two backwards of one forward."""
    logits = model(tokens)
    loss_of(logits, tokens).backward(retain_graph=True)
    logits.square().mean().backward()


def pipelined(model: nn.Module, tokens: torch.Tensor) -> None:
    """Two forwards, then their backwards."""
    losses = [loss_of(model(tokens), tokens), loss_of(model(tokens.flip(0)), tokens)]
    for loss in losses:
        loss.backward()


def siamese(model: nn.Module, tokens: torch.Tensor) -> None:
    """Two forwards with one backward."""
    (model(tokens) - model(tokens.flip(0))).square().mean().backward()


def reference(model: nn.Module, tokens: torch.Tensor) -> None:
    """DPO: a forward without a graph before the trained forward."""
    with torch.no_grad():
        target = model(tokens)
    (model(tokens) - target - 1).square().mean().backward()


def discarded(model: nn.Module, tokens: torch.Tensor) -> None:
    """A forward with an unused result."""
    model(tokens)
    plain(model, tokens)


def generating(model: nn.Module, tokens: torch.Tensor) -> None:
    """Tokens are generated before the training on them."""
    with torch.no_grad():
        for length in range(1, 5):
            model(tokens[:, :length])
    plain(model, tokens)


def evaluating(model: nn.Module, tokens: torch.Tensor) -> None:
    """An evaluation after the backward, inside the step."""
    plain(model, tokens)
    model.eval()
    with torch.no_grad():
        model(tokens)
    model.train()


def failing(model: nn.Module, tokens: torch.Tensor) -> None:
    """The first microbatch ends in an exception after its forward."""
    for microbatch in range(2):
        try:
            loss = loss_of(model(tokens), tokens)
            if microbatch == 0:
                raise ValueError("a bad batch")
            loss.backward()
        except ValueError:
            pass


def accumulating(model: nn.Module, tokens: torch.Tensor) -> None:
    """Three microbatches; only the last one reduces."""
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)  # type: ignore[operator]
        plain(model, tokens)


def teaching(model: nn.Module, tokens: torch.Tensor) -> None:
    """Two models in one module; only one of them is trained."""
    with torch.no_grad():
        target = model["teacher"](tokens)  # type: ignore[index]
    (model["student"](tokens) - target).square().mean().backward()  # type: ignore[index]


def truncated(model: nn.Module, tokens: torch.Tensor) -> None:
    """Three backwards, each with its own optimizer step, as truncated backpropagation does."""
    for _ in range(3):
        plain(model, tokens)
        _update(model)


def sharpness(model: nn.Module, tokens: torch.Tensor) -> None:
    """Gradients at perturbed weights, as sharpness-aware minimization computes them."""
    plain(model, tokens)
    moves = []
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                moves.append((parameter, parameter.grad * 0.01))
                parameter.add_(moves[-1][1])
                parameter.grad = None
    plain(model, tokens)
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)


def _update(model: nn.Module) -> None:
    optimizer: torch.optim.Optimizer = model.optimizer  # type: ignore[assignment]
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[str, Step] = {
    each.__name__: each
    for each in (plain, chunked_loss, gathered_head, two_losses, pipelined, siamese, reference,
                 discarded, generating, evaluating, failing, accumulating, teaching, truncated,
                 sharpness)
}  # fmt: skip
_MODELS = (
    *("shared_layer", "checkpointed", "frozen", "tied", "wrapped", "without_root"),
    *("adapters", "quantized", "experts"),
)
LOOPS |= dict.fromkeys(_MODELS, plain)


def build(loop: str, plan: Plan | None = None) -> nn.Module:
    """The model of a loop, sharded; by a plan, if its loop has a single model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if loop == "teaching":
        model: nn.Module = nn.ModuleDict({"student": Model(), "teacher": Model(num_blocks=2)})
        roots = list(model.children())
    elif loop == "wrapped":
        model = Wrapped()
        roots = [model.net]
    else:
        model = Model(
            num_blocks=1 if loop == "shared_layer" else 3,
            repeats=4 if loop == "shared_layer" else 1,
            checkpoints=loop == "checkpointed",
        )
        roots = [model]
    if loop == "tied":
        model.head.weight = model.embedding.weight
    if loop in ("adapters", "quantized", "experts"):
        replace_layers(model, loop)
    if loop == "frozen":
        model.layers[0].requires_grad_(requires_grad=False)
    if plan is None:
        shard(loop, roots, mesh)
    else:
        apply_plan(model, plan, mesh, shard_placement_fn=second_dimension)
    return model


def shard(loop: str, roots: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Make each block a unit, and the rest of each model its root unit."""
    for root in roots:
        parts = [*root.layers, *([root.head] if loop == "chunked_loss" else [])]
        if loop == "gathered_head":
            fully_shard([root.norm, root.head], mesh=mesh)
        if loop == "without_root":
            parts += [root.embedding, root.norm, root.head]
        for part in parts:
            fully_shard(part, mesh=mesh, shard_placement_fn=second_dimension)
        if loop != "without_root":
            fully_shard(root, mesh=mesh)


def train(loop: str, folder: str) -> None:
    """Train some steps of a loop and record them."""
    torch.manual_seed(0)
    model = build(loop)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = model.optimizer = torch.optim.AdamW(trained)  # type: ignore[assignment]
    tokens = torch.randint(0, VOCABULARY, (4, 32))
    with Recorder(
        model, optimizer=optimizer, path=f"{folder}/{loop}", warmup_steps=2, print_verdict=False
    ) as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step():
                LOOPS[loop](model, tokens)
                _update(model)


def main() -> None:
    """Record every loop, or the named ones."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for loop in names or LOOPS:
        train(loop, folder)
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
