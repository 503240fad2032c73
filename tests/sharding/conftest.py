from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def fake_world_of_4() -> Iterator[None]:
    """One process that believes it is rank 0 of 4; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()
