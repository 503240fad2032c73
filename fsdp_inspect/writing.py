"""Write files that appear as a whole or not at all.

Several processes may write one file at once, such as all ranks of a script that saves a plan. Each
writes its own temporary file and renames it; the last one stays.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file atomically.

    Args:
        path: The file; its folder must exist.
        content: All bytes.
        durable: Wait until the bytes are on the disk, so that a power failure cannot lose them.

    Raises:
        OSError: Writing failed. The old file is unchanged, and no temporary file is left.
    """
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def unfinished_path(path: Path) -> Path:
    """The temporary path to which this thread writes a file before it is renamed.

    It contains the host: processes in containers often have the same number.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f"{path.name}.tmp-{writer}")
