"""What does one rank's lateness cost per step, chance lateness of all of them left out?

The recorded steps are replayed on all ranks, as they were and with programs exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.clocks.alignment import Alignment
from fsdp_inspect.analysis.stragglers.rank_replay import Replay, read_programs
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The recorded steps replayed on all sampled ranks."""

    steps: tuple[int, ...]
    recorded_ns: int
    """Time of a step, of the last rank."""
    replayed_ns: int
    error_ratio: float
    """|replayed - recorded| / recorded, of the very steps that the replay was read from: whether
    their order was understood. It says nothing of how well a changed step is predicted."""
    balanced_ns: int
    """A step in which every rank works like the one in the middle."""


class RankPricing:
    """Replays the recorded steps, once as they were and then without a rank's lateness."""

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

    def without(self, rank: int) -> tuple[int, int] | None:
        """What a rank's lateness costs per step, and the rank that it was compared with.

        The lesser of two differences: the replayed step less the same with the rank's work
        replaced by that of the rank in the middle of the others (little, where a third rank is as
        late), and a step in which all work like it less one in which all work like the one in the
        middle (little, where the two are late in turns: then both steps lack the waiting).

        Returns:
            None where it cannot be replayed.
        """
        if self.result is None or rank not in self._ranks:
            return None
        like = self._replay.typical_of([other for other in self._ranks if other != rank])
        replaced = self._replay.step_time_ns({rank: like})
        slow = self._replay.step_time_ns(dict.fromkeys(self._ranks, rank))
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
                "The recorded steps cannot be replayed, since a rank waits for a collective that "
                "the others never issue: what lateness costs is not known."
            )
            return
        error = abs(replayed - recorded) / recorded
        self.result = StepReplay(steps, recorded, replayed, error, balanced)
