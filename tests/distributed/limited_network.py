"""Run two ranks on a slow network: two network namespaces, a veth pair, `tc tbf`.

    with limited_network(rate_mbit=400) as network:
        network.run("train.py", "--steps", "10")

Each rank runs in a separate namespace. gloo sends over TCP through the pair, whose ends limit the
bits per second. Nothing outside the two namespaces is changed, and everything is removed
afterwards. This requires root, `ip` and `tc`; `why_not` names a missing part.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PORT = 29400  # inside the namespaces no other process listens
_BURST = "32kb"
"""Bytes that an idle link may send immediately: few compared with a message, but enough that small
messages are cheap."""
_QUEUE = "200ms"
_KEEPS_ITS_WINDOW = "net.ipv4.tcp_slow_start_after_idle=0"
"""Without it, a message after a pause of computing starts slowly, unlike on a network for
training."""
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


class LimitedNetwork:
    """Two connected namespaces."""

    def __init__(self, name: str) -> None:
        self.namespaces = (f"{name}a", f"{name}b")
        self.interfaces = (f"v{name}a", f"v{name}b")

    def run(
        self, *arguments: str | Path, timeout_s: float = 300
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run `python ARGUMENTS` as rank 0 and rank 1, to its end.

        Returns:
            The two processes, by rank. A non-zero exit code raises an error.
        """
        processes = [self._start(rank, [str(word) for word in arguments]) for rank in (0, 1)]
        try:
            ended = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, ended, strict=True):
            assert process.returncode == 0, errors[-3000:]
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out, errors)
            for process, (out, errors) in zip(processes, ended, strict=True)
        ]

    def _start(self, rank: int, arguments: list[str]) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": _ADDRESSES[0],
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": self.interfaces[rank],
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", self.namespaces[rank], sys.executable, *arguments]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def why_not() -> str | None:
    """The reason why this machine cannot have such a network; None if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} on this machine (package iproute2)"
    try:
        with limited_network(rate_mbit=100):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def limited_network(rate_mbit: int) -> Iterator[LimitedNetwork]:
    """Create a network for the block; each direction carries `rate_mbit` megabits per second.

    Raises:
        subprocess.CalledProcessError: The machine does not allow it.
    """
    network = LimitedNetwork(f"fi{os.getpid()}")
    with ExitStack() as undo:
        for namespace in network.namespaces:
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "delete", namespace)
        first, second = network.interfaces
        _ip("link", "add", first, "type", "veth", "peer", "name", second)
        undo.callback(_ip_quietly, "link", "delete", first)
        for namespace, interface, address in zip(
            network.namespaces, network.interfaces, _ADDRESSES, strict=True
        ):
            _ip("link", "set", interface, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            for name in ("lo", interface):
                _ip("-n", namespace, "link", "set", name, "up")
            _limit(namespace, interface, rate_mbit)
            _ip("netns", "exec", namespace, "sysctl", "-w", _KEEPS_ITS_WINDOW)
        yield network


def _limit(namespace: str, interface: str, rate_mbit: int) -> None:
    shape = ["tbf", "rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _QUEUE]
    _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", *shape)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _ip_quietly(*arguments: str) -> None:
    """Run `ip` for objects that disappear with their namespace."""
    subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
