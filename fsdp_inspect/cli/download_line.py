"""Show the downloaded bytes on a terminal while a command waits for a URL.

The line is drawn only while a request runs, and erased when the request ends. So it never mixes
with the output of the command, and no command has to know of it. Progress bars take precedence.
"""

import os
import sys
import threading
import time
from typing import TextIO

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.remote_system import DOWNLOADS

_QUIET_S = 0.5
"""A command that reads for a shorter time shows no line."""
_REDRAW_S = 0.1
_ERASE = "\r\x1b[2K"


def show_downloads() -> None:
    """Show the downloads of this process on stderr if it is a terminal."""
    if sys.stderr.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown"):
        DOWNLOADS.on_wait = _DownloadLine(sys.stderr).wait


class _DownloadLine:
    """The line on one terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._shown_from = 0.0  # the moment of the first line, 0: no request yet
        self._is_drawn = False
        self._is_waiting = threading.Event()
        self._lock = threading.Lock()

    def wait(self, is_waiting: bool) -> None:
        """Note that requests run, or that none runs any more: this erases the line."""
        if is_waiting and not self._shown_from:
            self._shown_from = time.monotonic() + _QUIET_S
            threading.Thread(target=self._redraw, name="download-line", daemon=True).start()
        with self._lock:
            if is_waiting:
                self._is_waiting.set()
                self._draw()
            else:
                self._is_waiting.clear()
                self._erase()

    def _redraw(self) -> None:
        while self._is_waiting.wait():
            with self._lock:
                if self._is_waiting.is_set():
                    self._draw()
            time.sleep(_REDRAW_S)

    def _draw(self) -> None:
        if time.monotonic() < self._shown_from or _has_bar():
            return
        self._terminal.write(f"{_ERASE}Reading ({format_bytes(DOWNLOADS.num_bytes)} downloaded)")
        self._terminal.flush()
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._terminal.write(_ERASE)
            self._terminal.flush()
            self._is_drawn = False


def _has_bar() -> bool:
    """Whether a bar is on the terminal: rich replaces stderr while it draws one."""
    from rich.file_proxy import FileProxy

    return isinstance(sys.stderr, FileProxy)
