"""Equal gradients show that the sharded step is right only if several ranks reduced them."""

from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.comparison.equivalence import Equivalence, StepStatus, compare_steps
from fsdp_inspect.report.equivalence import (
    describe_equivalence,
    describe_evidence,
    name_next_step,
)
from fsdp_inspect.trace.step_dump import (
    FINGERPRINT_LENGTH,
    DumpedParameter,
    DumpedUnit,
    StepDump,
)


def compare(folder: Path, num_ranks: int) -> Equivalence:
    """Compare two runs with the same gradients."""
    parameter = DumpedParameter(
        name="weight", shape=(4,), offset=(0,), local_shape=(4,), dtype="float32", unit="",
        is_trained=True, has_gradient=True, change_after_backward=1.0, narrowed_to="",
    )  # fmt: skip
    dumps = []
    for rank in range(num_ranks):
        own = folder / f"rank-{rank}"
        (own / "gradients").mkdir(parents=True)
        np.save(own / "gradients/0.npy", np.array([0.1, 0.2, 0.3, 0.4], np.float32))
        for kind in ("used", "taken", "outputs", "entered"):
            np.save(own / f"{kind}.npy", np.zeros((0, FINGERPRINT_LENGTH)))
        unit = DumpedUnit("", "float32", "float32", None, num_ranks)
        dumps.append(
            StepDump(
                folder=own,
                rank=rank,
                world_size=num_ranks,
                step=1,
                parameters=(parameter,),
                units=(unit,),
                inputs=(),
                used=(),
                taken=(),
                outputs=(),
                entered=(),
                backwards=(),
                divided_at="",
                notes=(),
            )
        )
    return compare_steps(dumps, dumps)


@pytest.mark.parametrize(
    ("num_ranks", "status", "said"),
    [
        (1, StepStatus.UNKNOWN, "Cannot tell: on one rank, nothing is sharded and no gradient is"),
        (2, StepStatus.EQUAL, "The sharded step equals the step without sharding."),
    ],
)
def test_equal_gradients_of_a_single_rank_show_nothing(tmp_path, num_ranks, status, said) -> None:
    found = compare(tmp_path, num_ranks)
    assert found.status is status
    assert describe_equivalence(found).startswith(said)
    assert ("1 rank, 0 backwards" in describe_evidence(found)[0]) is (num_ranks == 1)
    assert ("two or more ranks" in name_next_step(found)) is (num_ranks == 1)
