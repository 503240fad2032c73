"""Calls of a store whose server answers, fails, or is stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from fsdp_inspect.recording.torch_api.process_groups import StoreClient

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""
PATIENT_S = 500.0


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is the server of a store, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def client(server: tuple[subprocess.Popen[str], int]) -> StoreClient:
    """A client that waits as long as a busy machine needs."""
    return StoreClient(TCPStore("127.0.0.1", server[1], is_master=False), answer_s=PATIENT_S)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until it no longer runs."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_calls_return_what_the_store_returns(client: StoreClient) -> None:
    client.set("key", b"value")

    assert client.get("key") == b"value"
    assert client.check(["key"])
    assert not client.check(["key", "other"])
    assert [client.add("count", 2), client.add("count", 1)] == [2, 3]


def test_a_stopped_server_ends_the_calls_and_not_the_thread_that_calls(
    server: tuple[subprocess.Popen[str], int], client: StoreClient
) -> None:
    client.add("count", 1)
    stop(server[0])
    client._answer_s = 0.5

    with pytest.raises(RuntimeError, match=r"no answer within 0\.5 s"):
        client.add("count", 1)

    client._answer_s = PATIENT_S
    with pytest.raises(RuntimeError, match="an earlier call had no answer"):  # without a wait
        client.check(["count"])


def test_an_error_of_the_store_reaches_the_caller(
    server: tuple[subprocess.Popen[str], int], client: StoreClient
) -> None:
    server[0].kill()
    server[0].wait()
    with pytest.raises(RuntimeError) as error:
        client.add("count", 1)
    assert "no answer" not in str(error.value)
