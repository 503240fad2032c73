"""Set up what all tests share: one thread per process, loopback only, and `torchrun`.

Benchmarks run only with `-m benchmark`, and tests of other frameworks with `-m frameworks` or
`-m trackers`. Tests
marked `slow` run only with `--exhaustive`, with `-m slow`, or when they are named
(`tests/file.py::test`). Likewise, tests marked `study` run only with `--studies`. Tests marked
`gpu` are skipped with a reason if there is no CUDA device. Tests that need Chromium use the
`chromium` fixture.
"""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from hypothesis import settings

from tests import forked_ranks
from tests.s3_server import ENVIRONMENT as S3_ENVIRONMENT, FaultyProxy, serve_proxy, serve_s3
from tests.scheduling import Scheduling

# Set before anything imports torch, and inherited by every process that a test starts: two ranks on
# two cores must not compete with many threads, and gloo must not depend on the machine's host name.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# torch.compile would start a pool of processes that import torch, for a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Without vector instructions the C++ compiler needs half the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Tests do not use the cache of the user's dashboards.
os.environ.setdefault("FSDP_INSPECT_CACHE", "")
os.environ.setdefault("FSDP_INSPECT_DATA", "")

# A job that a script starts with `&` ignores Ctrl-C, and its child processes would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
REQUIRE_BROWSER = "FSDP_INSPECT_REQUIRE_BROWSER"
EXHAUSTIVE = "--exhaustive"
STUDIES = "--studies"

Torchrun = Callable[..., subprocess.CompletedProcess[str]]


@dataclass
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Ended]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests marked slow, too: those that check many cases of one kind"
    parser.addoption(EXHAUSTIVE, action="store_true", help=text)
    text = "run the tests marked study, too: those that repeat a measurement many times"
    parser.addoption(STUDIES, action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    # No deadline for an example, because its duration depends on other load.
    # `make test` tries the same examples each time. The nightly run tries others, and keeps the
    # counterexamples that it finds in `.hypothesis`.
    guard = {"max_examples": 10, "derandomize": True, "database": None}
    settings.register_profile("guard", deadline=None, **guard)
    settings.register_profile("exhaustive", deadline=None, print_blob=True)
    settings.load_profile("exhaustive" if config.getoption(EXHAUSTIVE) else "guard")
    config.pluginmanager.register(Scheduling(config), "fsdp-inspect-scheduling")


@pytest.hookimpl(optionalhook=True)  # absent without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Use one more worker than processors for `-n logical`, since many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Restore `__main__`: Streamlit leaves a page's script there, and `multiprocessing` runs it."""
    main = sys.modules["__main__"]
    try:
        return (yield)
    finally:
        sys.modules["__main__"] = main


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the modules without collecting garbage, which took a third of the time.

    The modules are never garbage. Streamlit collects garbage after each run of a page's script.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in ("benchmark", "frameworks", "trackers"):
        if marker not in config.option.markexpr:
            _deselect(config, items, marker)
    is_named = any("::" in argument for argument in config.args)
    for marker, option in (("slow", EXHAUSTIVE), ("study", STUDIES)):
        if not (config.getoption(option) or marker in config.option.markexpr or is_named):
            _deselect(config, items, marker)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    left_out = [item for item in items if item.get_closest_marker(marker)]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=left_out)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium. Without one the test is skipped, or fails if it is required."""
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    message = f"no browser: none of {', '.join(CHROMIUM_NAMES)} is on PATH; install chromium"
    if os.environ.get(REQUIRE_BROWSER) == "1":
        pytest.fail(f"{message} ({REQUIRE_BROWSER}=1 forbids skipping)", pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The endpoint of a real S3 server on loopback, started once."""
    pytest.importorskip("s3fs", reason="needs the extra [s3]")
    with serve_s3() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def s3_proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    """A proxy in front of the S3 server, which can delay requests and let them fail."""
    with serve_proxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def s3_environment(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Credentials and endpoint of the server, and a new cache."""
    import s3fs

    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_INSPECT_CACHE", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3_bucket(s3_environment: None, s3_endpoint: str) -> str:
    """The URL of a new bucket."""
    import s3fs

    name = f"bucket-{uuid4().hex[:12]}"
    s3fs.S3FileSystem(endpoint_url=s3_endpoint, skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Returns an unused loopback port at each call."""

    def find() -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return int(listener.getsockname()[1])

    return find


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """The command line in this process, which is faster: `invoke("show", folder, "summary")`."""
    from fsdp_inspect.cli import main

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fsdp-inspect", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Run `torchrun ARGUMENTS` to its end on a free loopback port, for example

    torchrun("-m", "instrumented_trainer", "--steps", "3", num_ranks=4, cwd=tmp_path)

    The result has `returncode`, `stdout` and `stderr` of all ranks together. A non-zero exit fails
    the test and shows the end of both, unless `check=False`. A run longer than `timeout_s` also
    fails, after all its processes were killed. `environment` adds variables, and `python` is
    another interpreter than that of the tests. Without `cwd` it runs in an empty folder.
    """

    def run(
        *arguments: str | Path,
        num_ranks: int = 2,
        timeout_s: float = 500,
        check: bool = True,
        cwd: Path | None = None,
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        logs = tmp_path_factory.mktemp("torchrun")
        command = [*_torchrun_command(python, num_ranks), *map(str, arguments)]
        with (logs / "stdout").open("w") as stdout, (logs / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                command,
                cwd=cwd or tmp_path_factory.mktemp("cwd"),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
            ended = _wait(process, timeout_s)
        done = subprocess.CompletedProcess(
            command,
            process.returncode,
            (logs / "stdout").read_text(),
            (logs / "stderr").read_text(),
        )
        return _judged(done, ended=ended, timeout_s=timeout_s, check=check)

    return run


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Run ranks like `torchrun`, without its agent: ranks are forked from a process with torch.

    Use it for a script that only needs to run on some ranks. Tests about `torchrun` or about a
    fresh interpreter need the fixture `torchrun`.
    """

    def run(
        *arguments: str | Path,
        num_ranks: int = 2,
        timeout_s: float = 500,
        check: bool = True,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done, ended = forked_ranks.run_ranks(
            tuple(map(str, arguments)),
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            cwd=cwd or tmp_path_factory.mktemp("cwd"),
            logs=tmp_path_factory.mktemp("ranks"),
            environment=environment or {},
        )
        return _judged(done, ended=ended, timeout_s=timeout_s, check=check)

    return run


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Run `python ARGUMENTS` as one process without a rank, forked from a process with torch."""

    def run(
        *arguments: str | Path,
        timeout_s: float = 500,
        check: bool = True,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done, ended = forked_ranks.run_all(
            tuple(map(str, arguments)),
            [{**os.environ, **(environment or {})}],
            timeout_s=timeout_s,
            cwd=cwd or tmp_path_factory.mktemp("cwd"),
            logs=tmp_path_factory.mktemp("python"),
        )
        return _judged(done, ended=ended, timeout_s=timeout_s, check=check)

    return run


def _judged(
    done: subprocess.CompletedProcess[str], *, ended: bool, timeout_s: float, check: bool
) -> subprocess.CompletedProcess[str]:
    if not ended:
        pytest.fail(f"still running after {timeout_s} s: {_describe(done)}", pytrace=False)
    if check and done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}: {_describe(done)}", pytrace=False)
    return done


def _torchrun_command(python: Path | str, num_ranks: int) -> list[str]:
    local = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    module = [str(python), "-m", "torch.distributed.run"]
    return [*module, f"--nproc-per-node={num_ranks}", *local]


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the process; on a timeout or Ctrl-C, end all its processes."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            _kill_with_descendants(process)
    return True


def _kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    # torchrun starts its workers in separate sessions, which a signal to the group does not reach.
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(60)


def _describe(done: subprocess.CompletedProcess[str]) -> str:
    command: Sequence[str] = done.args
    return (
        f"{' '.join(command)}\n--- end of stdout\n{done.stdout[-3000:]}"
        f"\n--- end of stderr\n{done.stderr[-6000:]}"
    )
