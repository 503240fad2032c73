"""How many plans have been played? Shown once it takes long, where someone looks at it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.5
"""A search that takes no longer says nothing while it runs."""


@contextmanager
def show_progress() -> Iterator[Callable[[int], object]]:
    """What to call with the number of plans played so far."""
    from rich.console import Console

    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status("Playing plans ...") as status:
        status.stop()

        def on_play(count: int) -> None:
            if time.monotonic() - begun > _QUIET_S:
                status.start()
                status.update(f"Playing plans ... {count}")

        yield on_play if console.is_terminal else lambda _: None
