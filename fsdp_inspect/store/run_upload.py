"""Finish the upload of a run that its recorders left incomplete; may be repeated."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.errors import FsdpInspectError, NotARunError, StoreError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.parallel.tasks import OnDone
from fsdp_inspect.store.files import LocalFiles, open_files
from fsdp_inspect.store.folder import is_alive, list_rank_places, rank_folder, read_rank_record
from fsdp_inspect.store.records import decode_record
from fsdp_inspect.store.remote_system import describe_remote_error
from fsdp_inspect.store.schema import MANIFEST_FILE
from fsdp_inspect.store.summary_files import Place, folder_of
from fsdp_inspect.store.upload import (
    UPLOAD_FILE,
    FolderUpload,
    LeftOver,
    UploadTarget,
    read_upload_url,
    upload_of_rank,
    upload_of_run,
    write_upload_url,
)
from fsdp_inspect.trace.run import RunManifest, RunStatus

_RANKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class UploadResult:
    """The result of an upload."""

    run_id: str
    url: str
    num_ranks: int
    """The ranks on this disk, without those that still record."""
    num_files: int
    """The objects that were written."""
    num_bytes: int
    recording: tuple[Place, ...]
    """Attempt and rank of the ranks that still record; their recorders upload them."""


def upload_run(
    path: Path,
    url: str | None = None,
    on_progress: OnDone = lambda done, total: None,
) -> UploadResult:
    """Upload what a URL lacks of a run, and verify the sizes of all files there.

    Args:
        path: The run folder, on a local or mounted disk.
        url: The folder of runs at the URL; None: the URL to which the recorder uploads.
        on_progress: Called with the number of finished folders and of all folders.

    Raises:
        NotARunError: The path contains no run.
        StoreError: There is no URL, the URL holds another run, or the store fails.
    """
    places = list_rank_places(path)
    if not places:
        raise NotARunError(
            f"No run found at {str(path)!r}: rank folders are missing. Expected the folder of a "
            "run. List the runs of a folder with `fsdp-inspect runs`."
        )
    place = _choose_url(path, url)
    _refuse_other_run(path, place)
    recording = [each for each in places if _is_recording(path, each)]
    finished = [each for each in places if each not in recording]
    target = UploadTarget(place)
    uploads = [upload_of_run(path, target)]
    uploads += [upload_of_rank(path, target, folder_of(each)) for each in finished]
    _upload_all(uploads, place, on_progress)
    with suppress(OSError):  # the upload itself is complete
        write_upload_url(path, place)
    return UploadResult(
        run_id=path.name,
        url=place,
        num_ranks=len(finished),
        num_files=sum(upload.num_sent for upload in uploads),
        num_bytes=sum(upload.num_sent_bytes for upload in uploads),
        recording=tuple(recording),
    )


def _choose_url(path: Path, url: str | None) -> str:
    known = read_upload_url(path)
    if url is None:
        if known is None:
            raise StoreError(
                f"{str(path)!r} has no {UPLOAD_FILE}: its recorder uploaded nothing. Expected the "
                "URL of a folder of runs. Name it: fsdp-inspect store upload RUN s3://bucket/runs"
            )
        return known
    parent = url.rstrip("/")
    if known is not None and known.rpartition("/")[0] == parent:
        return known
    return f"{parent}/{path.resolve().name}"


def _refuse_other_run(path: Path, url: str) -> None:
    """Reject a URL with another run of the same name; a part without `run.json` is accepted."""
    own, there = (_read_manifest(place) for place in (path, url))
    if own is None or there is None:
        return
    first, second = (each.origin() for each in (own, there))
    is_of_other_node = own.recorded_id == there.recorded_id and not _has_rank_0(path)
    if first != second and not is_of_other_node:
        raise StoreError(
            f"{url!r} contains another run: {there.recorded_id!r} of {there.created}. Expected the "
            f"run {own.recorded_id!r} of {own.created}, or no run. Choose another URL."
        )


def _has_rank_0(path: Path) -> bool:
    return any(rank == 0 for _, rank in list_rank_places(path))


def _read_manifest(place: Path | str) -> RunManifest | None:
    encoded = open_files(place).read(MANIFEST_FILE)
    if encoded is None:
        return None
    try:
        return decode_record(encoded, RunManifest, f"{place}/{MANIFEST_FILE}")
    except StoreError:
        return None


def _is_recording(path: Path, place: Place) -> bool:
    record = read_rank_record(rank_folder(path, *place))
    if record is None or record.status is not RunStatus.RUNNING:
        return False
    return is_alive(record, LocalFiles(path), folder_of(place))


def _upload_all(uploads: Sequence[FolderUpload], url: str, on_progress: OnDone) -> None:
    done, missing = 0, LeftOver()
    try:
        with ThreadPoolExecutor(_RANKS_AT_ONCE) as pool:
            for left in pool.map(_upload_one, uploads):
                done, missing = done + 1, missing + left
                on_progress(done, len(uploads))
    except FsdpInspectError:
        raise
    except Exception as error:  # each file system of fsspec has separate exceptions
        reason = describe_remote_error(url, error, access="write")
        raise StoreError(
            f"Cannot upload to {url!r}: {reason} Run the command again to continue."
        ) from error
    if missing.num_files:
        raise StoreError(
            f"{url!r} lacks {missing.num_files} files ({format_bytes(missing.num_bytes)}) or has "
            "them with other sizes. Expected the sizes on the disk. Run the command again."
        )


def _upload_one(upload: FolderUpload) -> LeftOver:
    upload.learn()
    upload.upload()
    return upload.verify()
