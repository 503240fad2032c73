"""Record the forward of a whole model, for sharders whose units have none of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fsdp_inspect.recording.patches import wrap_call
from fsdp_inspect.trace.codes import NO_UNIT, MemoryPoint

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.reference_passes import PassKey
    from fsdp_inspect.recording.session import Session


def wrap_model_forward(
    original: Callable[..., Any],
    session: Session,
    memory: MemoryProbe,
    *,
    key: Callable[[], PassKey] = lambda: (NO_UNIT, True),
    on_begin: Callable[[], None] | None = None,
    on_end: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Wrap the `forward` of a model.

    Args:
        original: The bound method.
        session: The recording.
        memory: Receives the inputs and the readings at both ends, in a memory step.
        key: The model and its mode; see `Session.enter_forward`.
        on_begin: Called after the forward has begun.
        on_end: Called before its end is noted.
    """

    def before(*args: Any, **kwargs: Any) -> None:
        mark = session.clock.mark()
        session.enter_forward(mark, grad_enabled=torch.is_grad_enabled(), key=key())
        if session.watches_memory:
            memory.inputs(args, kwargs)
            memory.sample(MemoryPoint.FORWARD_START)
        if on_begin is not None:
            on_begin()

    def after(token: None, result: Any) -> None:
        if on_end is not None:
            on_end()
        if session.watches_memory:
            memory.sample(MemoryPoint.FORWARD_END)
        session.leave_forward(session.clock.mark())

    return wrap_call(original, before, after, session)
