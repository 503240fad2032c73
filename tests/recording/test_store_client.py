"""Calls of a store whose server answers, fails, or is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from fsdp_inspect.recording.store_client import StoreClient

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is the server of a store, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def test_calls_return_what_the_store_returns(server: tuple[subprocess.Popen[str], int]) -> None:
    client = StoreClient(TCPStore("127.0.0.1", server[1], is_master=False))

    client.set("key", b"value")

    assert client.get("key") == b"value"
    assert client.check(["key"])
    assert not client.check(["key", "other"])
    assert [client.add("count", 2), client.add("count", 1)] == [2, 3]


def test_a_stopped_server_ends_the_calls_and_not_the_thread_that_calls(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    client = StoreClient(TCPStore("127.0.0.1", server[1], is_master=False), answer_s=0.5)
    client.add("count", 1)
    os.kill(server[0].pid, signal.SIGSTOP)

    with pytest.raises(RuntimeError, match=r"no answer within 0\.5 s"):
        client.add("count", 1)

    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="an earlier call had no answer"):
        client.check(["count"])
    assert time.monotonic() - begun < 0.4  # it does not wait again


def test_an_error_of_the_store_reaches_the_caller(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    client = StoreClient(TCPStore("127.0.0.1", server[1], is_master=False))
    server[0].kill()
    server[0].wait()
    with pytest.raises(RuntimeError):
        client.add("count", 1)
