"""Serve a folder read-only in the protocol of S3, with a delay before each answer.

Only what reading a run needs: listings in pages, HEAD, and GET with a range. moto keeps its objects
in memory, and a run of 4,096 ranks does not fit.

    python -m tests.studies.benchmarks.s3_folder FOLDER PORT LATENCY_S
"""

import hashlib
import sys
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "runs"
_PAGE = 1000
_SMALL_BYTES = 64 << 10


def _tag_of(path: Path) -> str:
    """The ETag: the MD5 of a small file as in S3, and the state of a large one."""
    status = path.stat()
    if status.st_size < _SMALL_BYTES:
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"


class S3Folder(ThreadingHTTPServer):
    """The server; objects of the bucket `runs` are the files of the folder."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, port: int, latency_s: float) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.latency_s = latency_s
        self.keys = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
        )
        self.listed: dict[str, str] = {key: self._describe(key) for key in self.keys}

    def _describe(self, key: str) -> str:
        status = (self.folder / key).stat()
        changed = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        tag = _tag_of(self.folder / key)
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
            f"<ETag>&quot;{tag}&quot;</ETag><Size>{status.st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )

    def list_page(self, prefix: str, delimiter: str, after: str) -> str:
        """A page of a listing as XML."""
        items: dict[str, str] = {}
        is_cut = False
        for key in self.keys:
            if not key.startswith(prefix):
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if name <= after or name in items:
                continue
            if len(items) == _PAGE:
                is_cut = True
                break
            common = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            items[name] = self.listed[key] if end < 0 else common
        more = f"<NextContinuationToken>{escape(max(items))}</NextContinuationToken>"
        return (
            '<?xml version="1.0"?><ListBucketResult '
            'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(items)}</KeyCount>"
            f"<MaxKeys>{_PAGE}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{more if is_cut else ''}{''.join(items.values())}</ListBucketResult>"
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Folder

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        key = unquote(asked.path).removeprefix(f"/{BUCKET}").lstrip("/")
        time.sleep(self.server.latency_s)
        if not key:
            fields = {name: values[0] for name, values in parse_qs(asked.query).items()}
            after = fields.get("continuation-token", fields.get("start-after", ""))
            page = self.server.list_page(
                fields.get("prefix", ""), fields.get("delimiter", ""), after
            )
            self._answer(200, page.encode(), {"Content-Type": "application/xml"})
        else:
            self._send_file(self.server.folder / key)

    do_HEAD = do_GET

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        status = path.stat()
        first, last = 0, status.st_size - 1
        span = self.headers.get("Range", "").removeprefix("bytes=")
        if span:
            low, _, high = span.partition("-")
            first = int(low) if low else max(status.st_size - int(high), 0)
            last = min(int(high), last) if low and high else last
        with path.open("rb") as file:
            file.seek(first)
            content = file.read(last - first + 1)
        headers = {
            "ETag": f'"{_tag_of(path)}"',
            "Last-Modified": datetime.fromtimestamp(status.st_mtime, UTC).strftime(
                "%a, %d %b %Y %H:%M:%S GMT"
            ),
            "Accept-Ranges": "bytes",
            "Content-Range": f"bytes {first}-{last}/{status.st_size}",
        }
        self._answer(206 if span else 200, content, headers)

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    S3Folder(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])).serve_forever()
