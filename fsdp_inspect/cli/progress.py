"""Show the number of simulated plans on a terminal during a long search."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.5
"""A shorter search shows no progress."""


@contextmanager
def show_progress() -> Iterator[Callable[[int], object]]:
    """Show progress; call the result with the number of plans simulated so far."""
    from rich.console import Console

    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status("Simulating plans ...") as status:
        status.stop()

        def on_play(count: int) -> None:
            if time.monotonic() - begun > _QUIET_S:
                status.start()
                status.update(f"Simulating plans ... {count}")

        yield on_play if console.is_terminal else lambda _: None
