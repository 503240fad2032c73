"""Open the file system of a URL, and explain its errors.

Each file system of fsspec has separate exceptions. Their names and codes are compared as text, so
that no package of a cloud provider is imported here.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from fsdp_inspect.error_text import causes_of, shorten
from fsdp_inspect.errors import NotARunError, UnreadableFileError

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""The extra of this package that brings the file system of a protocol."""
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_CLIENT_ATTEMPTS = 2
_RETRY_WAITS_S = (0.2, 1.0, 3.0)

_NO_CREDENTIALS = ("NoCredentials", "PartialCredentials", "CredentialsError", "TokenRetrieval")
_EXPIRED = ("ExpiredToken", "RequestExpired", "TokenRefreshRequired", "SSOTokenLoad")
_WRONG_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure")
_REFUSED_CONDITION = ("PreconditionFailed", "ConditionalRequestConflict")
_NO_SERVER = ("EndpointConnectionError", "ConnectTimeoutError", "ClientConnector", "gaierror")
_UNREACHABLE = (
    *_NO_SERVER,
    "ReadTimeoutError",
    "ConnectionRefused",
    "ConnectionError",
    "ServerDisconnected",
    "FSTimeoutError",
    "TimeoutError",
)


def protocol_of(url: str) -> str:
    """The protocol of a URL: `s3`."""
    return url.partition("://")[0].lower()


def open_system(url: str, *, can_write: bool = False) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Args:
        url: Any URL that fsspec can open.
        can_write: Create missing folders on a local disk when files are written.

    Raises:
        NotARunError: fsspec does not know the protocol, or its package is not installed.
    """
    protocol = protocol_of(url)
    try:
        from fsspec.config import conf  # the import takes 0.1 s: only for URLs
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {}
        if protocol in _EXTRAS and "config_kwargs" not in conf.get(protocol, {}):
            options["config_kwargs"] = {
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "read_timeout": _READ_TIMEOUT_S,
                "retries": {"mode": "standard", "max_attempts": _CLIENT_ATTEMPTS},
            }
        if protocol in ("file", "local") and can_write:
            options["auto_mkdir"] = True
        system, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise NotARunError(
            f"No run found at {url!r}: {str(error).rstrip('. ')}. Expected a local path or a URL "
            f"that fsspec can open. {_how_to_install(protocol, error)}"
        ) from error
    if protocol in _EXTRAS:
        _parse_dates_quickly(system)
        system.retries = _CLIENT_ATTEMPTS  # with 5, an unreachable server takes 12 s
    return system, str(path)


def _parse_dates_quickly(system: Any) -> None:
    """Let the client parse the dates of a listing without `dateutil`.

    Half of the time of a listing of 20,000 objects was the parsing of their dates (botocore 1.43).
    """
    from aiobotocore.session import AioSession

    if system.session is None:  # it connects later, with this session
        system.session = AioSession(**system.kwargs)
        factory = system.session.get_component("response_parser_factory")
        factory.set_parser_defaults(timestamp_parser=_parse_date)


def _parse_date(value: Any) -> Any:
    from botocore.utils import parse_timestamp

    if isinstance(value, str) and "T" in value:
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(value)
    return parse_timestamp(value)


def _how_to_install(protocol: str, error: Exception) -> str:
    if protocol in _EXTRAS and isinstance(error, ImportError):
        return f"Install its package with: pip install 'fsdp-inspect[{_EXTRAS[protocol]}]'"
    return "Install the package that the message names, or copy the run to a local disk."


def retry(action: Callable[[], T]) -> T:
    """The result of a request; errors that can pass are retried three times.

    Raises:
        Exception: The last error of the file system.
    """
    with DOWNLOADS.waiting():
        for wait_s in _RETRY_WAITS_S:
            try:
                return action()
            except Exception as error:  # each file system has separate exceptions
                if not can_pass(error):
                    raise
                time.sleep(wait_s)
        return action()


def can_pass(error: BaseException) -> bool:
    """Whether a second request may succeed: the error is neither about names nor credentials.

    The client itself repeats requests to a server that it cannot reach.
    """
    lasting = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    text = _text_of(error)
    is_lasting = isinstance(error, (*lasting, NotImplementedError, ValueError, TypeError))
    return not is_lasting and not _names(
        text,
        *_NO_CREDENTIALS,
        *_EXPIRED,
        *_WRONG_CREDENTIALS,
        *_NO_SERVER,
        *_REFUSED_CONDITION,
        "NotImplemented",
    )


def is_missing_bucket(error: BaseException) -> bool:
    """Whether the bucket does not exist, in contrast to a file in it."""
    text = _text_of(error)
    return _names(text, "NoSuchBucket", "bucket does not exist", "BucketNotFound")


def is_refused_condition(error: BaseException) -> bool:
    """Whether the store refused a write because another process changed the file meanwhile."""
    is_gone = isinstance(error, FileNotFoundError) and not is_missing_bucket(error)
    return is_gone or _names(_text_of(error), *_REFUSED_CONDITION)


def is_unsupported_condition(error: BaseException) -> bool:
    """Whether the store has no conditional writes."""
    return _names(_text_of(error), "NotImplemented")


def remote_error(url: str, error: BaseException) -> UnreadableFileError:
    """The error of a request as the problem, the expectation and the remedy."""
    return UnreadableFileError(f"Cannot read {url!r}: {describe_remote_error(url, error)}")


def describe_remote_error(url: str, error: BaseException, *, access: str = "list and read") -> str:
    """What is wrong with a request to this URL, what is expected, and what to do.

    Args:
        url: The URL.
        error: The error of the file system.
        access: The needed permission, such as `write`.
    """
    text = _text_of(error)
    place = url.partition("://")[2].partition("/")[0]
    if is_missing_bucket(error):
        return (
            f"bucket {place!r} not found. Expected an existing bucket. Check its name and the "
            "endpoint (AWS_ENDPOINT_URL)."
        )
    if _names(text, *_EXPIRED):
        return (
            "the session token of the credentials is expired. Expected valid credentials. Sign in "
            "again, or export a new AWS_SESSION_TOKEN with its keys."
        )
    if _names(text, *_NO_CREDENTIALS):
        return (
            "credentials not found. Expected the credentials of the object store in the "
            "environment or in its configuration file. Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket set FSSPEC_S3_ANON=true."
        )
    if _names(text, *_WRONG_CREDENTIALS):
        return (
            "the object store rejects the credentials. Expected a valid access key and its secret. "
            "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if isinstance(error, PermissionError) or _names(text, "AccessDenied", "Forbidden"):
        return (
            f"access denied. Expected credentials with permission to {access} it. Check the policy "
            "of the bucket, and the account in use (AWS_PROFILE, AWS_ACCESS_KEY_ID)."
        )
    if _names(text, *_UNREACHABLE):
        return (
            f"the server cannot be reached ({_first_line(error)}). Expected a server that answers. "
            "Check the network and the endpoint (AWS_ENDPOINT_URL)."
        )
    return (
        f"{_first_line(error)}. Expected a URL with permission and room to {access}. Check the "
        "URL, the network and the credentials."
    )


def _names(text: str, *names: str) -> bool:
    return any(name.lower() in text for name in names)


def _first_line(error: BaseException) -> str:
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    return shorten(lines[0].rstrip(". ")) if lines else type(error).__name__


def _text_of(error: BaseException) -> str:
    """Class names, codes and messages of an error and its causes, in lower case."""
    return " ".join(_words_of(error)).lower()


def _words_of(error: BaseException) -> Iterator[str]:
    for each in islice(causes_of(error), 8):
        response = getattr(each, "response", None)
        fields = response.get("Error", {}) if isinstance(response, dict) else {}
        yield from (type(each).__name__, str(each), str(fields.get("Code", "")))


# --- Count the requests to URLs: those that run, and the bytes that were downloaded.


class Downloads:
    """The requests and bytes of this process; thread-safe."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_requests = 0
        self.on_wait: Callable[[bool], object] = lambda is_waiting: None
        """Called with True when a request begins and none runs, and with False when none is left.

        No request begins or ends during the call.
        """
        self._num_running = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count a request with this many bytes of content."""
        with self._lock:
            self.num_requests += 1
            self.num_bytes += num_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a running request."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            was_running = self._num_running > 0
            self._num_running += change
            if was_running != (self._num_running > 0):
                self.on_wait(not was_running)


DOWNLOADS = Downloads()
"""The downloads of this process."""
