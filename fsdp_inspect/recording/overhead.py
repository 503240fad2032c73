"""Keep the cost of a recording within a budget: choose the steps that are recorded in detail.

A *detailed* step has rows of its units and collectives. A *plain* step has the rows of its parts
only, and notes each collective in the black box. The ranks choose the same steps without a
collective: the first `FIRST_DETAILED` timed steps, then blocks of `BLOCK` steps. Blocks of plain
and detailed steps alternate `NUM_PROBES` times at first. Their step times give the cost of detail
on this machine (`statistics.compare_blocks`). Rank 0 then publishes the distance of the next blocks
through the store, for steps far enough ahead that each rank reads it before. A rank that reads it
late has plain steps where others have detailed ones. Analyses use the steps that are detailed on
all ranks.

The account of the budget: a detailed step costs the measured difference and its share of the
writer's thread. A plain step costs what its notes take, which the recorder times in the first plain
step of each block. The threads that sample and watch cost their CPU time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp_inspect.statistics import compare_blocks
from fsdp_inspect.store.schema import DETAIL_REQUEST_FILE, PROFILE_REQUEST_FILE
from fsdp_inspect.trace.run import BLOCK_OF_DETAIL, RecorderUse

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.torch_api.process_groups import StoreClient

DEFAULT_OVERHEAD = "1%"
FIRST_DETAILED = 20
"""The first timed steps, which are detailed so that a short run has as much detail as ever."""
BLOCK = BLOCK_OF_DETAIL
NUM_PROBES = 6
"""The blocks of each sort that follow the first steps, to measure the cost."""
_ASSUMED_COST = 0.1
"""The cost of detail as a part of the step time, until it is measured."""
_LEAST_COST = 0.002
_LONGEST_PERIOD = 2000
_MOST_DETAIL = 15 / 16
"""The highest share of detailed steps, so that plain steps next to them show the cost."""
_AHEAD_S = 3.0
"""A published choice begins this long after its publication: each rank has read it by then."""
_HORIZON = 500
"""The account of the budget is to be even after this many further steps, or after twice as many
steps as have run."""
_MOST_PARTS = 16
"""The newest parts and windows that are kept: each begins seconds after its publication."""
_COMPARED_STEPS = 1000
"""The newest steps that give the cost of detail."""
_DECIDE_EVERY_S = 10.0
_PROFILED_STEPS = 3
"""The steps that a request of the dashboard profiles."""
_TRIGGER_EVERY = 200
"""The shortest distance of detailed blocks that an unusual step triggers."""
_SLOW_FACTOR = 2.0
_NUM_USUAL = 20
_LASTING_FACTOR = 1.2
"""The change of the median of so many plain steps that lasts."""
_LASTING_EVERY = 100
"""The shortest distance of the detailed blocks that it triggers."""
_WRITER = "fsdp-inspect-writer"
_OWN_THREADS = "fsdp-inspect"


def read_overhead(value: str | float | None) -> float | None:
    """The budget as a part of the step time, from `"1%"` or 0.01; None: no budget.

    Raises:
        ValueError: The value is neither; the message states it.
    """
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, str) and value.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            number = float(value.strip()[:-1]) / 100
    elif type(value) in (int, float):
        number = float(value)
    if number is None or not 0 < number <= 1:
        raise ValueError(
            f"overhead must be a part of the step time such as '1%' or 0.01 (above 0, at most "
            f"100%), or None to record every step in detail, got {value!r}."
        )
    return number


class DetailSchedule:
    """The steps that are detailed; a pure function of what was published."""

    def __init__(self, num_first: int, budget: float) -> None:
        """The first `num_first` steps are detailed; then the blocks of the probes."""
        self._num_first = num_first
        self._end_of_probes = num_first + 2 * BLOCK * NUM_PROBES
        self._parts: tuple[tuple[int, int], ...] = (
            (self._end_of_probes, period_of(budget / _ASSUMED_COST)),
        )
        """The first step and the distance of blocks of each part, ascending. A background thread
        replaces the tuples while the training thread reads them."""
        self._windows: tuple[tuple[int, int], ...] = ()
        """The first and the last step of further blocks."""

    def is_detailed(self, step: int) -> bool:
        """Whether a step is detailed."""
        if step < self._num_first:
            return True
        if step < self._end_of_probes:
            return (step - self._num_first) // BLOCK % 2 == 1
        if any(first <= step <= last for first, last in self._windows):
            return True
        first, period = next(part for part in reversed(self._parts) if part[0] <= step)
        return (step - first) % period >= period - BLOCK

    @property
    def period(self) -> int:
        """The newest distance of blocks."""
        return self._parts[-1][1]

    @property
    def last_begin(self) -> int:
        """The first step of the newest part; blocks are measured before it."""
        return self._parts[-1][0]

    def space(self, first: int, period: int) -> None:
        """From the step `first` on, begin a block every `period` steps."""
        self._parts = (*self._parts[-_MOST_PARTS:], (max(first, self.last_begin), period))

    def add_window(self, first: int, last: int) -> None:
        """Record these steps in detail."""
        self._windows = (*self._windows[-_MOST_PARTS:], (first, last))


def period_of(share: float) -> int:
    """The distance of blocks for a share of detailed steps."""
    share = min(share, _MOST_DETAIL)
    return _LONGEST_PERIOD if share <= 0 else min(math.ceil(BLOCK / share), _LONGEST_PERIOD)


class OverheadControl:
    """Chooses the detailed steps of one rank, and on rank 0 their number.

    The training thread calls `choose`, `note_step` and `ask`; the watchdog calls `tick`.
    """

    def __init__(
        self,
        session: Session,
        budget: float,
        *,
        rank: int,
        world_size: int,
        num_first: int,
        folder: Path,
    ) -> None:
        """Prepare it.

        Args:
            session: The recording.
            budget: The part of the step time that the recording may take.
            rank: This rank.
            world_size: The number of ranks.
            num_first: Detailed steps at the start.
            folder: The run folder, in which the dashboard asks for detail and for profiles.
        """
        self.budget = budget
        self.schedule = DetailSchedule(num_first, budget)
        self._session = session
        self._rank = rank
        self._is_alone = world_size == 1
        self._request, self._profile_request = (
            folder / name for name in (DETAIL_REQUEST_FILE, PROFILE_REQUEST_FILE)
        )
        self.profile: Callable[[int, int], None] = lambda first, last: None
        """Profiles the steps from the first to the last; the watchdog calls it."""
        self._boundaries: deque[tuple[int, Any, Any, bool, bool]] = deque()
        """Step, start, end, whether it was detailed, and whether its time counts: not yet read."""
        self._steps: deque[tuple[int, int, bool]] = deque(maxlen=_COMPARED_STEPS)
        """Step, step time in ns, and whether it was detailed."""
        self._recent: deque[int] = deque(maxlen=_NUM_USUAL)
        """The times of the last usual steps, ns."""
        self._recent_plain: deque[int] = deque(maxlen=_NUM_USUAL)
        """Those of the last usual plain steps."""
        self._num_detailed = self._num_steps = 0
        self._num_read = 0
        self._level = 0
        """The median of these after the last lasting change, ns."""
        self._asked_at = self._changed_at = -_TRIGGER_EVERY
        self._asked_steps = 0
        """The detailed steps to publish."""
        self._num_issued = self._num_in_step = 0
        self._timed_plain = 0
        self._begun_ns, self._decided_ns = time.perf_counter_ns(), 0

    # --- the training thread

    def choose(self, step: int, *, needs_detail: bool) -> bool:
        """Whether the step that begins is detailed; a memory or numerics step needs detail."""
        is_detailed = needs_detail or self.schedule.is_detailed(step)
        session = self._session
        was_plain = not session.detail
        session.times_plain = not (is_detailed or was_plain)
        self._timed_plain += session.times_plain
        return is_detailed

    def note_step(self, step: int, start: Any, end: Any, *, counts: bool) -> None:
        """Note a step that has ended.

        Args:
            step: Its number.
            start: The mark of its start.
            end: The mark of its end.
            counts: Whether its time counts: no memory step, evaluation or checkpoint.
        """
        is_detailed = self._session.detail
        self._num_steps += 1
        self._num_detailed += is_detailed
        if self._rank != 0:
            return
        self._compare_collectives(step)
        self._boundaries.append((step, start, end, is_detailed, counts))
        while self._boundaries:
            number, first, last, detailed, is_usual = self._boundaries[0]
            times = _ns_of(first), _ns_of(last)
            if times[0] is None or times[1] is None:
                break
            self._boundaries.popleft()
            if is_usual:
                self._look(number, times[1] - times[0], is_detailed=detailed)
                self._steps.append((number, times[1] - times[0], detailed))
            else:
                self.ask(number)

    def _compare_collectives(self, step: int) -> None:
        """Ask for detail if the step issued another number of collectives than the last one."""
        box = self._session.black_box
        issued = 0 if box is None else box.num_issued
        count, self._num_issued = issued - self._num_issued, issued
        if count != self._num_in_step:
            self._num_in_step = count
            self.ask(step)

    def _look(self, step: int, time_ns: int, *, is_detailed: bool) -> None:
        """Ask for detail after a step far above the usual, or once plain steps have changed."""
        recent = sorted(self._recent)
        self._recent.append(time_ns)
        if len(recent) == _NUM_USUAL and time_ns > _SLOW_FACTOR * recent[_NUM_USUAL // 2]:
            self.ask(step)
        if is_detailed:
            return
        self._recent_plain.append(time_ns)
        usual = sorted(self._recent_plain)[len(self._recent_plain) // 2]
        if len(self._recent_plain) < _NUM_USUAL:
            self._level = usual
        elif max(usual, self._level) > _LASTING_FACTOR * min(usual, self._level):
            self._level = usual
            if step - self._changed_at >= _LASTING_EVERY:
                # The causes of a lasting change need as many detailed steps on each side.
                self._changed_at, self._asked_steps = step, 2 * BLOCK

    def ask(self, step: int) -> None:
        """Ask for a block of detail after an unusual step."""
        if step - self._asked_at >= _TRIGGER_EVERY:
            self._asked_at, self._asked_steps = step, max(self._asked_steps, BLOCK)

    # --- the watchdog's thread

    def tick(self, store: StoreClient | None, prefix: str) -> None:
        """On rank 0, publish what changes; on the others, read it.

        Args:
            store: The store of the ranks; None: this rank alone.
            prefix: The prefix of the keys.

        Raises:
            RuntimeError: The store does not answer.
        """
        if store is None and not self._is_alone:
            return  # the ranks keep to what they know
        if self._rank == 0:
            for kind, first, value in self._decide():
                self._apply(kind, first, value)
                if store is not None:
                    self._num_read += 1
                    store.set(f"{prefix}/detail/{self._num_read}", f"{kind},{first},{value}")
        elif store is not None:
            key = f"{prefix}/detail/{self._num_read + 1}"
            while store.check([key]):
                parts = store.get(key).decode().split(",")
                self._apply(parts[0], int(parts[1]), int(parts[2]))
                self._num_read += 1
                key = f"{prefix}/detail/{self._num_read + 1}"

    def _apply(self, kind: str, first: int, value: int) -> None:
        if kind == "period":
            self.schedule.space(first, value)
        elif kind == "profile":
            self.profile(first, value)
        else:
            self.schedule.add_window(first, value)

    def _decide(self) -> list[tuple[str, int, int]]:
        """What rank 0 publishes now."""
        step, news = self._session.step, []
        step_s = self._step_s()
        if step_s is None:
            return []
        ahead = step + max(2 * BLOCK, math.ceil(_AHEAD_S / step_s))
        if _takes(self._profile_request):
            news.append(("profile", ahead, ahead + _PROFILED_STEPS - 1))
        asked, self._asked_steps = self._asked_steps, 0
        if _takes(self._request):
            asked = max(asked, BLOCK)
        if asked:
            news.append(("window", ahead, ahead + asked - 1))
        is_time = time.perf_counter_ns() - self._decided_ns >= _DECIDE_EVERY_S * 1e9
        if step > self.schedule.last_begin and is_time:
            self._decided_ns = time.perf_counter_ns()
            period = self._affordable_period()
            if period is not None and not 0.8 <= period / self.schedule.period <= 1.25:
                news.append(("period", ahead, period))
        return news

    def _step_s(self) -> float | None:
        recent = list(self._recent)
        return max(float(np.median(recent)) / 1e9, 1e-6) if recent else None

    def _affordable_period(self) -> int | None:
        """The distance of blocks at which the account is even after the horizon; None: unknown."""
        use, step_s = self.use(), self._step_s()
        rows = np.array(list(self._steps), dtype=np.int64)
        if step_s is None or not len(rows):
            return None
        cost = compare_blocks(rows[:, 0], rows[:, 1], rows[:, 2].astype(bool), length=BLOCK)
        if cost is None:
            return None
        of_writer = use.writer_ns / max(self._num_detailed, 1) / 1e9 / step_s
        # The upper end: on a busy machine, a low median may be chance.
        detail = max(cost.high, 0.0) + of_writer
        fixed = use.plain_ratio(step_s) + use.threads_ns / 1e9 / max(use.wall_ns / 1e9, step_s)
        horizon = max(_HORIZON, self._num_steps)
        left = (self.budget - fixed) * (self._num_steps + horizon) - self._num_detailed * detail
        return period_of(left / (horizon * max(detail, _LEAST_COST)))

    # --- the record

    def use(self) -> RecorderUse:
        """What the recorder has used so far."""
        writer_ns, threads_ns = _cpu_of_threads()
        box = self._session.black_box
        keeper_ns = 0 if box is None else box.keeper_cpu_ns
        return RecorderUse(
            budget=self.budget,
            num_steps=self._num_steps,
            num_detailed=self._num_detailed,
            plain_ns=self._session.plain_ns,
            num_timed_plain=self._timed_plain,
            writer_ns=writer_ns,
            threads_ns=threads_ns + keeper_ns,
            wall_ns=time.perf_counter_ns() - self._begun_ns,
        )


def _takes(request: Path) -> bool:
    """Whether there is such a request, which is then removed."""
    try:
        request.unlink()
    except OSError:
        return False
    return True


def _ns_of(mark: Any) -> int | None:
    """The time of a mark, ns; None: a device has not passed it, or nobody has read it."""
    return mark if type(mark) is int else mark.read_ns


def _cpu_of_threads() -> tuple[int, int]:
    """The CPU time of the recorder's threads, ns: the writer, and the others."""
    writer = others = 0
    for thread in threading.enumerate():
        if not thread.name.startswith(_OWN_THREADS) or thread.ident is None:
            continue
        try:
            spent = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
        except (AttributeError, OSError):  # no such clock on this system, or the thread has ended
            continue
        if thread.name.startswith(_WRITER):
            writer += spent
        else:
            others += spent
    return writer, others
