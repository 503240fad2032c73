"""Upload the files of one rank from a background thread while it records.

The training thread only starts this thread, and at the end waits for it a bounded time. The thread
reads the files that the recorder has written, so a slow, failing or hanging object store cannot
delay a step or fill the memory. After an error, it logs one message and tries again, at most every
minute. What is not uploaded at the end stays on the disk; `fsdp-inspect store upload` finishes it.
"""

import contextlib
import logging
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.remote_system import describe_remote_error
from fsdp_inspect.store.upload import FolderUpload, sum_left, write_upload_url

logger = logging.getLogger("fsdp_inspect.store")

INTERVAL_S = 30.0
"""Time between two uploads; a node that is lost loses at most this much, and a running upload."""
FINISH_TIMEOUT_S = 30.0
"""The time that the end of a recording waits for its upload."""
_LEFT_UPLOAD_S = 60
"""The time for which another process uploads the rest after a failure of the training."""
_LEFT_UPLOAD = f"""
import runpy, signal, sys
signal.alarm({_LEFT_UPLOAD_S})
sys.argv[:] = ["fsdp-inspect", "store", "upload", sys.argv[1]]
runpy.run_module("fsdp_inspect", run_name="__main__")
"""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class BackgroundUpload:
    """Uploads some folders of a run; no method raises, and only `finish` waits."""

    def __init__(
        self,
        run_folder: Path,
        url: str,
        uploads: Collection[FolderUpload],
        *,
        rank: int,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            run_folder: The run's folder on the disk.
            url: The URL of the run.
            uploads: The folders to upload, in this order.
            rank: This rank, for messages.
            interval_s: Time between two uploads.
        """
        self.url = url
        self._run_folder = run_folder
        self._uploads = uploads
        self._rank = rank
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._is_ending = False
        self._is_overdue = False
        self._is_complete = threading.Event()
        self._num_failures = 0
        self._reason = "the object store did not answer"
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name="fsdp-inspect-upload", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._note_failure(error)

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        """Upload the rest, for at most this time; returns whether everything is uploaded.

        If the process goes on, the thread continues after that.
        """
        self._is_ending = True
        self._wake.set()
        if self._thread.is_alive() and self._is_complete.wait(timeout_s):
            return True
        self._is_overdue = True
        self._report_rest(timeout_s)
        return False

    def leave(self, timeout_s: float) -> None:
        """Upload the rest for at most this time; another process then does what is missing."""
        self._is_ending = True
        self._wake.set()
        if self._is_complete.wait(timeout_s):
            return
        self._is_overdue = True
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.Popen(
                [sys.executable, "-c", _LEFT_UPLOAD, str(self._run_folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ).returncode = 0  # it outlives this process: no warning that it still runs
        self._log(
            "Rank %d: another process uploads the rest of the run to %s, for at most %d s. To "
            "check and finish it: fsdp-inspect store upload %s",
            self._rank,
            self.url,
            _LEFT_UPLOAD_S,
            shlex.quote(str(self._run_folder)),
        )

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # the disk fails; the writer reports it
            write_upload_url(self._run_folder, self.url)
        while True:
            is_last = self._is_ending
            started_s = time.monotonic()
            has_succeeded = self._try()
            if has_succeeded and is_last:
                self._is_complete.set()
                return
            took_s = time.monotonic() - started_s
            if not self._is_ending or not has_succeeded:
                self._wake.wait(self._wait_s(has_succeeded, took_s))
            self._wake.clear()

    def _wait_s(self, has_succeeded: bool, took_s: float) -> float:
        if has_succeeded:
            return max(self._interval_s - took_s, _FIRST_WAIT_S)
        is_awaited = self._is_ending and not self._is_overdue
        most = _FIRST_WAIT_S if is_awaited else _LONGEST_WAIT_S
        return float(min(_FIRST_WAIT_S * 2 ** min(self._num_failures, 10), most))

    def _try(self) -> bool:
        """Upload what is new; an error is logged once."""
        try:
            for upload in self._uploads:
                upload.upload()
        except Exception as error:  # nothing may stop the thread
            self._note_failure(error)
            return False
        self._num_failures = 0
        return True

    def _note_failure(self, error: BaseException) -> None:
        self._num_failures += 1
        is_explained = isinstance(error, FsdpInspectError)
        self._reason = (
            str(error) if is_explained else describe_remote_error(self.url, error, access="write")
        )
        if not self._has_warned:
            self._has_warned = True
            self._log(
                "Rank %d cannot upload to %s: %s Training continues. The recorder keeps all data "
                "in %s and tries again, at most every minute. This message is logged once.",
                self._rank,
                self.url,
                self._reason,
                self._run_folder,
            )

    def _report_rest(self, timeout_s: float) -> None:
        left = sum_left(self._uploads)
        self._log(
            "Rank %d has not uploaded %d %s (%s) to %s within %.0f s: %s They are in %s. To finish "
            "the upload: fsdp-inspect store upload %s",
            self._rank,
            left.num_files,
            "file" if left.num_files == 1 else "files",
            format_bytes(left.num_bytes),
            self.url,
            timeout_s,
            self._reason if self._num_failures else "the object store is slow.",
            self._run_folder,
            shlex.quote(str(self._run_folder)),
        )

    def _log(self, message: str, *values: object) -> None:
        try:
            logger.warning(message, *values)
        except Exception:  # a logging handler of the training script may raise
            return
