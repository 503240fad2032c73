"""The first all-gather of a step, and the work after the optimizer for which it waits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.analysis.optimizer_wait import measure_optimizer_wait
from fsdp_inspect.recording.session import Session
from fsdp_inspect.trace.codes import EventKind, Phase, Stream
from tests.builders import RunBuilder
from tests.recording.virtual_device import MS
from tests.recording.virtual_training import Replay
from tests.simulation.test_recorded_streams import as_run, step_ns


def run_of(*, delay: int, issue: int = -40, steps: int = 5, **manifest):
    """Steps of 1000 whose optimizer ends 100 before them; the gather starts `delay` after it."""
    builder = RunBuilder(**{"device_type": "cuda", **manifest})
    rank = builder.rank(0)
    for number in range(steps):
        at = 1000 * number
        rank.step(number, at, at + 1000)
        gather = at - 100 + delay
        rank.add(
            EventKind.ALL_GATHER_COPY_IN, gather, gather + 5, unit="layers.0", phase=Phase.FORWARD,
            stream=Stream.ALL_GATHER_COPY_IN, issue_ns=at + issue,
        )  # fmt: skip
        rank.all_gather("layers.0", gather + 5, gather + 65, issue_ns=at + issue, need=gather)
        rank.forward("layers.0", gather + 65, gather + 165)
        rank.optimizer(at + 850, at + 900)
    return builder.build()


def test_the_delay_is_from_the_optimizers_end_to_the_copy_in():
    found = measure_optimizer_wait(run_of(delay=130, issue=-300))
    assert (found.delay_ns, len(found.gathers)) == (130, 4)
    first = found.gathers[0]
    assert (first.fqn, first.optimizer_end_ns, first.start_ns, first.exposed_ns) == (
        "layers.0", -100, 30, 60,
    )  # fmt: skip


def test_of_a_long_run_each_typical_step_and_the_step_after_it_is_read():
    # The steps are equal, so the earliest and the latest quarter of 400 are not typical.
    found = measure_optimizer_wait(run_of(delay=130, issue=-300, steps=400))
    assert (found.delay_ns, len(found.gathers)) == (130, 96)


def test_the_gain_is_no_more_than_what_the_gather_is_waited_for():
    found = measure_optimizer_wait(run_of(delay=130, issue=-300))
    assert (found.gain_low_ns, found.gain_ns, found.gain_high_ns) == (60, 60, 60)


def test_what_the_host_had_not_issued_is_no_wait_for_other_work():
    assert measure_optimizer_wait(run_of(delay=130, issue=20)).delay_ns == 10


@pytest.mark.parametrize(
    ("steps", "device"), [(3, "cuda"), (5, "cpu")], ids=["too few steps", "no streams"]
)
def test_there_is_no_answer(steps: int, device: str):
    assert measure_optimizer_wait(run_of(delay=130, steps=steps, device_type=device)) is None


def test_a_step_that_is_left_out_does_not_lie_between_two_others():
    run = run_of(delay=130, issue=-300, steps=8, memory_steps=[4])
    assert sorted(each.step for each in measure_optimizer_wait(run).gathers) == [1, 2, 3, 6, 7]


def test_communication_that_is_not_fsdps_is_no_work_behind_the_optimizer():
    builder = RunBuilder(device_type="cuda")
    rank = builder.rank(0)
    for number in range(5):
        at = 1000 * number
        rank.step(number, at, at + 1000)
        rank.all_reduce(None, at - 80, at - 20)
        rank.all_gather("layers.0", at, at + 50, issue_ns=at - 300, need=at)
        rank.optimizer(at + 850, at + 900)
    assert measure_optimizer_wait(builder.build()).delay_ns == 40


# --- torch's own code on virtual streams


@pytest.fixture(scope="module")
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Averaged(Replay):
    """After the optimizer (4 ms), the weights are averaged on the compute stream for 20 ms."""

    num_steps = 6

    def begin_step(self) -> None:
        """Let the host run ahead of the device."""

    def finish_step(self, model: Any, session: Session) -> None:
        begin = session.clock.mark()
        self.device.run("optimizer", "", 4 * MS)
        session.add(EventKind.OPTIMIZER, begin, session.clock.mark(), phase=Phase.OPTIMIZER)
        self.update(model)
        self.device.run("average", "", 20 * MS)

    def update(self, model: Any) -> None:
        """Called right after the optimizer."""


class Announced(Averaged):
    """The same, with the event that FSDP2 uses as the end of the optimizer."""

    def update(self, model: Any) -> None:
        model.set_post_optim_event(self.device.current.record_event())


@pytest.mark.usefixtures("fake_process_group")
@pytest.mark.parametrize("gather_ms", [6.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_an_event_behind_the_optimizer_saves_what_was_told(gather_ms: float):
    speed = {"gather_ms": gather_ms, "scatter_ms": 2.0}
    waiting = Averaged(**speed)
    found = measure_optimizer_wait(as_run(waiting))
    saved = step_ns(waiting) - step_ns(Announced(**speed))
    assert found.delay_ns == pytest.approx(20 * MS, abs=MS)
    # Two all-gathers run next to the average, as far as there is time.
    assert saved == pytest.approx(min(2 * gather_ms, 20) * MS, abs=MS)
    assert found.gain_low_ns - MS <= saved <= found.gain_high_ns + MS
    assert found.gain_ns == pytest.approx(saved, abs=MS)
    assert measure_optimizer_wait(as_run(Announced(**speed))).delay_ns == pytest.approx(0, abs=MS)
