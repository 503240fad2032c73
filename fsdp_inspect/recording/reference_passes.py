"""Tell reference passes, which belong to every step, from evaluations.

A teacher, a reference model and a target network run forwards without gradients in each step. An
evaluation runs them too, but not in each step. Without `recorder.step()`, only the regularity
shows the difference: a forward without gradients belongs to the step if the same unit, in the same
mode, ran one in the step before.
"""

PassKey = tuple[int, bool]
"""The unit, and whether its module is in training mode."""


class ReferencePasses:
    """The forwards without gradients of the current step and of the one before."""

    def __init__(self) -> None:
        self._current: set[PassKey] = set()
        self._previous: set[PassKey] = set()

    def note(self, key: PassKey) -> bool:
        """Note a forward without gradients; returns whether it belongs to the step."""
        self._current.add(key)
        return key in self._previous

    def end_step(self) -> None:
        """Begin the next step."""
        self._previous, self._current = self._current, set()
