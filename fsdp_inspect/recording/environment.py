"""Describe the process of a run: versions, settings, command line, commit and clocks.

Only data that explains a run is stored. Environment variables are stored if they change the
behaviour of torch and its backends. The values of command-line options with a secret's name, and
values that look like a secret, are masked.
"""

import functools
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_inspect.formatting import plural
from fsdp_inspect.recording.torch_api.modules import Dropout
from fsdp_inspect.trace.run import ClockPair
from fsdp_inspect.version import __version__

MASK = "***"
"""The replacement of a secret."""

VARIABLES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
    }
)
"""Environment variables that change how a step runs."""

VARIABLE_PREFIXES = ("FSDP_", "GLOO_", "NCCL_", "TORCH_")
"""Prefixes of such variables; `accelerate launch` sets the `FSDP_` variables, and `TORCH_` includes
`TORCH_NCCL_`."""

_GIT_TIMEOUT_S = 5.0
_CLOCK_READINGS = 16

_SECRET_NAMES = frozenset(
    {
        "auth",
        "authorization",
        "bearer",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
        "token",
    }
)
_SECRET_KINDS_OF_KEY = frozenset({"access", "api", "auth", "private", "secret", "signing"})

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_ASSIGNMENT = re.compile(r"""([A-Za-z][\w.-]*)(["']?\s*(?:=|:(?!//))\s*["']?)([^\s"',;&}]+)""")
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|ya29\.|eyJ)[\w.-]{8,}"
)
"""Tokens of well-known services, recognized by their prefix."""


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """The parts of a run's manifest that describe the process and its machine."""

    command: list[str]
    """The command line with secrets masked; the interpreter without its path."""
    device_name: str
    versions: dict[str, str]
    """Versions by package or driver; missing ones have no entry."""
    environment: dict[str, str]


def describe_environment(device_type: str | None = None) -> EnvironmentDescription:
    """Collect the data that is needed to understand or repeat this process's run.

    Args:
        device_type: The device type of the training; None means `cuda` if available, else `cpu`.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return EnvironmentDescription(
        command=describe_command(sys.orig_argv),
        device_name=_device_name(device_type),
        versions=_versions(),
        environment=select_variables(os.environ),
    )


def find_script_commit() -> str | None:
    """The commit of the training script's folder, with `-dirty` when tracked files differ.

    Runs git once per process. Only the rank that writes the manifest calls it.

    Returns:
        None if there is no commit.
    """
    return _commit_at_first_look(_script_folder())


def read_clock_pair() -> ClockPair:
    """Read the monotonic clock of all events (`time.perf_counter_ns`) and the wall clock together.

    Returns the tightest of several readings: the system may pause a thread between two readings.
    """
    return min(
        (_read_clocks() for _ in range(_CLOCK_READINGS)), key=lambda pair: pair.uncertainty_ns
    )


def select_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that change how a step runs, sorted by name, with secrets masked."""
    return {
        name: MASK if _names_secret(name) else mask_secrets(value)
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
    }


def describe_command(arguments: Sequence[str]) -> list[str]:
    """Mask the secrets of a command line: `--token X`, `--api-key=X` and similar options."""
    command = [Path(arguments[0]).name] if arguments else []
    previous_names_secret = False
    for argument in arguments[1:]:
        if previous_names_secret and not argument.startswith("--"):
            command.append(MASK)
        else:
            command.append(mask_secrets(argument))
        is_option = argument.startswith("-") and "=" not in argument
        previous_names_secret = is_option and _names_secret(argument)
    return command


def mask_secrets(text: str) -> str:
    """Mask assignments to secret names, credentials and tokens in a text."""
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _CREDENTIALS_IN_URL.sub(MASK, text)
    text = _KNOWN_TOKENS.sub(MASK, text)
    return _ASSIGNMENT.sub(_mask_assignment, text)


def find_commit(folder: Path) -> str | None:
    """The git commit of a folder, with `-dirty` appended when tracked files differ from it.

    None if there is no repository, no commit or no git, or if git is slow.
    """
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        described = subprocess.run(
            [*command, "--exclude=*"],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _mask_assignment(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    # `--set=token=X`: the value may itself be an assignment.
    masked = MASK if _names_secret(name) else _ASSIGNMENT.sub(_mask_assignment, value)
    return f"{name}{sign}{masked}"


def _names_secret(name: str) -> bool:
    """Whether an option or variable has the name of a secret.

    The last word decides: `--hf-token`, `hub.accessToken` and `--api_key` are secrets;
    `--tokenizer`, `--max-tokens`, `--token-dim` and `--key` are not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if words[-1] in _SECRET_NAMES or words[-1] == "apikey":
        return True
    return words[-1] == "key" and len(words) > 1 and words[-2] in _SECRET_KINDS_OF_KEY


def _read_clocks() -> ClockPair:
    before = time.perf_counter_ns()
    unix_ns = time.time_ns()
    after = time.perf_counter_ns()
    return ClockPair(
        monotonic_ns=(before + after) // 2,
        unix_ns=unix_ns,
        uncertainty_ns=(after - before + 1) // 2,
    )


@functools.cache
def _commit_at_first_look(folder: Path) -> str | None:
    """Cache the first result: later checkouts do not change the code that was loaded."""
    return find_commit(folder)


def _script_folder() -> Path:
    """The folder of the training script or module, else the working directory."""
    script = Path(sys.argv[0])
    return script.resolve().parent if script.is_file() else Path.cwd()


def _device_name(device_type: str) -> str:
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return _cpu_name() if device_type == "cpu" else device_type


@functools.cache
def _cpu_name() -> str:
    """The system's name of the CPU (`AMD EPYC 9654 96-Core Processor`), else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {
        "fsdp_inspect": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _installed("numpy"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _cudnn_version(),
        "nccl": _nccl_version(),
        "driver": _driver_version(),
    }
    return {name: str(value) for name, value in found.items() if value}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cudnn_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return None if number is None else str(number)


def _nccl_version() -> str | None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


@functools.cache
def _driver_version() -> str | None:
    """The version of NVIDIA's kernel driver; None without one."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # the library, the bindings or the permission is missing: unknown
        return None


# --- Read the command that started the ranks of a job: `torchrun`, `accelerate launch` or Python.

_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_PROGRAMS = ("torchrun", "accelerate")


def describe_launch() -> tuple[list[str], int]:
    """The command that started the ranks, with secrets masked, and the start of a rank's part.

    Returns:
        The words, and the number of words of the starter. Without a known starter, the words are
        the command of this process, and the number is 0.
    """
    own = describe_command(sys.orig_argv)
    try:
        import psutil

        starter = psutil.Process(os.getppid()).cmdline() if "RANK" in os.environ else []
    except Exception:  # no psutil, or the parent has ended
        starter = []
    words = shorten_starter(starter)
    if not words:
        return own, 0
    return describe_command(words), _start_of_rank(words, sys.orig_argv)


def shorten_starter(words: Sequence[str]) -> list[str]:
    """The command line of a starter without the paths of the interpreter and the program.

    Returns:
        Empty if the starter is unknown.
    """
    for at, word in enumerate(words[:6]):
        if word == "-m" and at + 1 < len(words):
            module = words[at + 1]
            name = _MODULES.get(module)
            if name is not None:
                return [name, *words[at + 2 :]]
            return ["accelerate", "launch", *words[at + 2 :]] if "accelerate" in module else []
        if Path(word).name in _PROGRAMS:
            return [Path(word).name, *words[at + 1 :]]
    return []


def _start_of_rank(words: Sequence[str], own: Sequence[str]) -> int:
    """The index of the rank's own command in the starter's words; 0: not found.

    torchrun starts `python -u SCRIPT ARGUMENTS` for `torchrun OPTIONS SCRIPT ARGUMENTS`.
    """
    tail = list(own[1:])
    while tail:
        if list(words[-len(tail) :]) == tail:
            return len(words) - len(tail)
        tail.pop(0)
    return 0


# --- Observe settings of the model and the loop that affect memory, but are in no configuration.
#
# The gate compares them: a change of dropout, of the attention kernel, of the optimizer or of the
# dtype of the loss explains a change of memory.

_IGNORED_OF_OPTIMIZERS = {"lr", "initial_lr", "weight_decay", "params", "eps", "betas"}
"""Settings that do not change memory, and settings that schedulers change."""


def observe_settings(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    loss_dtype: str,
    inputs: str,
    *,
    skips_reduction: bool,
    gradients_between: str = "",
) -> dict[str, str]:
    """Describe the settings of the model and the loop that affect memory; unknown ones are missing.

    Args:
        model: The recorded model.
        optimizers: The optimizers that have stepped.
        loss_dtype: The dtype of the tensor of the first backward; empty: unknown.
        inputs: The tensors that the first unit received; empty: unknown.
        skips_reduction: Whether a backward left gradients unreduced.
        gradients_between: See `Session.gradients_between`; empty: unknown.
    """
    found = {
        "dropout": _describe_dropout(model),
        "attention": _describe_attention(model),
        "optimizer": "; ".join(dict.fromkeys(map(_describe_optimizer, optimizers))),
        "loss_dtype": loss_dtype,
        "inputs": inputs,
        "gradients_between_backwards": gradients_between,
        "gradient_sync": "some microbatches" if skips_reduction else "every microbatch",
    }
    known = {name: text for name, text in found.items() if text}
    return known | {"gradient_hooks": _describe_gradient_hooks(model)}  # known also if empty


def describe_recomputation(num_repeated: int, backwards: Mapping[int, int]) -> str:
    """The forwards that a backward repeats: `3 forwards a backward`, or `none`.

    Args:
        num_repeated: Such forwards in some steps.
        backwards: The number of these steps, by the number of their backwards.
    """
    num_backwards = sum(number * steps for number, steps in backwards.items())
    number = round(num_repeated / num_backwards)
    return f"{plural(max(number, 1), 'forward')} a backward" if num_repeated else "none"


def _describe_dropout(model: nn.Module) -> str:
    """The dropout, such as `0.1 in 12 modules`; `none` without dropout."""
    counts = Counter(
        module.p for module in model.modules() if isinstance(module, Dropout) and module.p > 0
    )
    for module in model.modules():  # attention has a number: Transformers, nn.Multihead...
        value = getattr(module, "attention_dropout", getattr(module, "dropout", None))
        if isinstance(value, float) and value > 0:
            counts[value] += 1
    return ", ".join(f"{p:g} in {count} modules" for p, count in sorted(counts.items())) or "none"


def _describe_gradient_hooks(model: nn.Module) -> str:
    """The parameters whose gradients a hook of the script may change; empty: none does."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    count = sum(any(getattr(each, name, None) for name in names) for each in model.parameters())
    return plural(count, "parameter") if count else ""


def _describe_attention(model: nn.Module) -> str:
    """The attention implementation of each configuration of Transformers in the model."""
    configs = {id(config): config for config in _configs(model)}.values()
    names = [getattr(config, "_attn_implementation", None) for config in configs]
    return ", ".join(sorted({name for name in names if isinstance(name, str)}))


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            yield config


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The class and the settings that affect its state: `AdamW(amsgrad=False, fused=None)`."""
    defaults = getattr(optimizer, "defaults", {})
    values = [
        f"{name}={value}"
        for name, value in sorted(defaults.items())
        if name not in _IGNORED_OF_OPTIMIZERS and isinstance(value, bool | int | float | str | None)
    ]
    return f"{type(optimizer).__name__}({', '.join(values)})"
