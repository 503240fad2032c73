"""Train without a recorder, with forwards without gradients in each step.

A teacher runs in each step, and a frozen tower runs inside the student's forward. Every fourth
step, the student is evaluated. One of its two heads has no gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, NUM_STEPS, EVERY = 128, 11, 4


class Block(nn.Module):
    """A residual block with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.relu(self.linear(values))


class Student(nn.Module):
    """A frozen tower, trained blocks and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2)).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused_head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in self.tower:
                values = block(values)
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


def main() -> None:
    """Train, and print nothing."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    student = Student()
    teacher = nn.Sequential(Block(), Block()).requires_grad_(requires_grad=False)
    for block in (*student.tower, *student.layers, *teacher):
        fully_shard(block, mesh=mesh)
    fully_shard(student, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    trained = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    values = torch.randn(4, 8, WIDTH)
    for step in range(NUM_STEPS):
        with torch.no_grad():
            target = teacher(values)
        (student(values) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            with torch.no_grad():
                student.eval()(values)
            student.train()
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
