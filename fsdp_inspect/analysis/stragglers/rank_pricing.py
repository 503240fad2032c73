"""Compute the cost per step of the extra work of one rank, or of several.

The recorded steps are replayed on all ranks, once as recorded and then with exchanged programs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.clocks.alignment import Alignment
from fsdp_inspect.analysis.stragglers.rank_replay import Replay, read_programs
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The recorded steps, replayed on all sampled ranks."""

    steps: tuple[int, ...]
    recorded_ns: int
    """Duration of a recorded step, until the last rank ends it."""
    replayed_ns: int
    error_ratio: float
    """|replayed - recorded| / recorded, for the steps that supplied the replay. It checks the order
    of events in the replay. It is not the error of a prediction."""
    balanced_ns: int
    """Duration of a step in which every rank has the work of the median rank by work."""


class RankPricing:
    """Replays the recorded steps, once as recorded and then without the extra work of ranks."""

    def __init__(
        self, run: RunSource, ranks: Sequence[int], steps: Sequence[int], alignment: Alignment
    ):
        self.refusals: list[str] = []
        self.result: StepReplay | None = None
        programs = read_programs(run, ranks, steps, alignment) if steps else []
        self._ranks = [program.rank for program in programs]
        self._replay = Replay(run, programs)
        if len(programs) > 1:
            self._price_all(tuple(steps))

    def without(self, ranks: Collection[int]) -> tuple[int, int] | None:
        """Compute the cost of extra work of ranks per step, and the rank they are compared with.

        The comparison uses the median rank, by work, of the other ranks. The cost is the smaller of
        two differences:

        - The replayed step - the replayed step in which the ranks have the work of the median rank.
          It is small if other ranks are equally late.
        - The replayed step in which all ranks have the work of the median one of these ranks - the
          replayed step in which all have the work of the median rank. It is small if the ranks and
          the others are late in turns, because then neither step contains the waits.

        Returns:
            None if the steps cannot be replayed.
        """
        own = [rank for rank in self._ranks if rank in ranks]
        others = [rank for rank in self._ranks if rank not in ranks]
        if self.result is None or not own or not others:
            return None
        like, typical = self._replay.typical_of(others), self._replay.typical_of(own)
        replaced = self._replay.step_time_ns(dict.fromkeys(own, like))
        slow = self._replay.step_time_ns(dict.fromkeys(self._ranks, typical))
        fast = self._replay.step_time_ns(dict.fromkeys(self._ranks, like))
        if replaced is None or slow is None or fast is None:
            return None
        return min(self.result.replayed_ns - replaced, slow - fast), like

    def _price_all(self, steps: tuple[int, ...]) -> None:
        recorded, replayed = self._replay.recorded_ns, self._replay.step_time_ns()
        like = self._replay.typical_of(self._ranks)
        balanced = self._replay.step_time_ns(dict.fromkeys(self._ranks, like))
        if replayed is None or balanced is None or recorded <= 0:
            self.refusals.append(
                "The recorded steps cannot be replayed, because a rank waits for a collective that "
                "the other ranks never issue. The cost of late ranks is unknown."
            )
            return
        error = abs(replayed - recorded) / recorded
        self.result = StepReplay(steps, recorded, replayed, error, balanced)
