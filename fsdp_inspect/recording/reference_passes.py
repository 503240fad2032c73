"""Distinguish reference passes, which belong to every step, from evaluations.

A teacher, a reference model and a target network run forwards without gradients in each step. An
evaluation runs them too, but not in each step. Without `recorder.step()`, only the regularity shows
the difference: a forward without gradients belongs to the step if the same unit, in the same mode,
ran one in each of the two steps before. In the second and third step, only the step before decides,
because the launcher attaches within the first step.
"""

PassKey = tuple[int, bool]
"""The unit, and whether its module is in training mode."""

_FIRST_STEPS = 3


class ReferencePasses:
    """The forwards without gradients of the current step and of the two steps before."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._current: set[PassKey] = set()
        self._previous: set[PassKey] = set()
        self._regular: set[PassKey] = set()

    def note(self, key: PassKey) -> bool:
        """Note a forward without gradients; returns whether it belongs to the step."""
        self._current.add(key)
        return key in self._regular

    def end_step(self) -> None:
        """Begin the next step."""
        self._num_ended += 1
        is_early = self._num_ended < _FIRST_STEPS
        self._regular = self._current if is_early else self._current & self._previous
        self._previous, self._current = self._current, set()
