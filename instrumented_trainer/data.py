"""Read the training tokens of this rank from memory-mapped files; they depend only on the step.

A corpus is one long sequence of tokens: all files in order. It is cut into windows of `seq_len + 1`
tokens (inputs, and targets one token later). The last windows are held out for evaluation. The seed
shuffles the windows of an epoch. The windows of a rank depend only on the step, the microbatch and
the rank, and the global batch of a step depends only on the step. A resumed run, or a run on other
ranks with the same global batch, therefore sees the same tokens.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.config import STDLIB

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
_HELD_OUT_SHARE = 0.02
_MAX_OPEN_FILES = 256

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The token files of a corpus, in order."""

    paths: tuple[Path, ...]
    starts: npt.NDArray[np.int64]
    """Position of each file's first token, then the end of the last file: (files + 1,)."""
    dtype: str
    """The type of a token; `npy` for files that contain their type."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all files together."""
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Read `count` tokens from position `start`, across file boundaries."""
        pieces = list(self._pieces(start, start + count))
        return np.concatenate(pieces).astype(np.int64)

    def _pieces(self, start: int, end: int) -> Iterator[Tokens]:
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < end:
            first, behind = int(self.starts[index]), int(self.starts[index + 1])
            until = min(end, behind)
            if until > start:
                tokens = _map_file(self.paths[index], self.dtype)
                yield tokens[start - first : until - first]
            start, index = until, index + 1


def open_corpus(source: str, token_dtype: TokenDtype = "uint16") -> Corpus:
    """Find the tokens of a corpus without reading them.

    Args:
        source: `stdlib`; a text file or a folder of text files (bytes are tokens); a `.npy` file
            of token ids; or a `.bin` file of raw token ids.
        token_dtype: The type of a token in a `.bin` file.

    Raises:
        ConfigError: The path does not exist, or has no tokens.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return _corpus(source, sorted(_source_files(root)))
    path = Path(source)
    if path.is_dir():
        return _corpus(source, [p for p in sorted(path.rglob("*")) if _is_text(p, path)])
    if not path.is_file():
        raise ConfigError(
            f"Data not found: {source!r}. Expected {STDLIB!r}, a text file, a folder of text "
            "files, or a .bin or .npy file of token ids. Set --data to one of them."
        )
    dtype = {".npy": "npy", ".bin": token_dtype}.get(path.suffix, "uint8")
    return _corpus(source, [path], dtype)


def _corpus(source: str, paths: Sequence[Path], dtype: str = "uint8") -> Corpus:
    counts = [_num_tokens(path, dtype) for path in paths]
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64)
    if starts[-1] == 0:
        raise ConfigError(
            f"The data at {source!r} has no tokens. Expected text or token ids. Set --data to "
            f"files with content, or to {STDLIB!r}."
        )
    return Corpus(paths=tuple(paths), starts=starts, dtype=dtype)


def _num_tokens(path: Path, dtype: str) -> int:
    if dtype == "npy":
        return len(_map_file(path, dtype))
    return path.stat().st_size // np.dtype(dtype).itemsize


def _source_files(root: Path) -> Iterator[Path]:
    """Python files below a folder, without installed packages, which may have thousands."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_SOURCE]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())


def _is_text(path: Path, root: Path) -> bool:
    """Whether the path is a regular file, not hidden, and without NUL in its first bytes."""
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


# Each mapped file holds a descriptor, so the number of mapped files is limited.
@lru_cache(maxsize=_MAX_OPEN_FILES)
def _map_file(path: Path, dtype: str) -> Tokens:
    if dtype != "npy":
        return np.memmap(path, dtype=dtype, mode="r")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ConfigError(
            f"{str(path)!r} is an invalid NumPy file: {error}. Expected token ids from numpy.save. "
            "Write it again, or set --data to another file."
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"{str(path)!r} contains {tokens.dtype} of shape {tokens.shape}. Expected one row of "
            "integers. Write token ids with numpy.save(path, ids.ravel())."
        )
    return tokens  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a microbatch; both int64 (B, T)."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclass(kw_only=True)
class Loader:
    """The batches of one rank, by step and microbatch; there is no state to save."""

    corpus: Corpus
    seq_len: int
    batch_size: int
    """Sequences per rank and microbatch."""
    microbatches: int
    rank: int
    world_size: int
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        num_windows = (self.corpus.num_tokens - 1) // self.seq_len
        self._num_held_out = max(1, int(num_windows * _HELD_OUT_SHARE))
        self._num_windows = num_windows - self._num_held_out
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self._check_size()

    def train_batch(self, step: int, microbatch: int) -> Batch:
        """This rank's part of a microbatch of a step (both from 0).

        Raises:
            ConfigError: The corpus contains a token outside the model's vocabulary.
        """
        first = (step * self.microbatches + microbatch) * self.world_size + self.rank
        samples = range(first * self.batch_size, (first + 1) * self.batch_size)
        return self._batch([self._window_of(sample) for sample in samples])

    def evaluation_batch(self, index: int) -> Batch:
        """This rank's part of an evaluation batch, from windows that are never trained on."""
        first = (index * self.world_size + self.rank) * self.batch_size
        samples = range(first, first + self.batch_size)
        return self._batch([self._num_windows + s % self._num_held_out for s in samples])

    def _window_of(self, sample: int) -> int:
        epoch, position = divmod(sample, self._num_windows)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self._num_windows)
            self._epoch = epoch
        return int(self._order[position])

    def _batch(self, windows: Sequence[int]) -> Batch:
        rows = [self.corpus.read(w * self.seq_len, self.seq_len + 1) for w in windows]
        tokens = np.stack(rows)
        if int(tokens.max()) >= self.vocab_size:
            raise ConfigError(
                f"The data contains token {int(tokens.max())}, but vocab_size is "
                f"{self.vocab_size}. Set --vocab-size above the largest token, or --data to other "
                "tokens."
            )
        both = torch.from_numpy(tokens)
        return Batch(tokens=both[:, :-1].contiguous(), targets=both[:, 1:].contiguous())

    def _check_size(self) -> None:
        wanted = self.batch_size * self.world_size * self.microbatches
        if self._num_windows < wanted:
            raise ConfigError(
                f"The data has {self.corpus.num_tokens} tokens: {self._num_windows} windows of "
                f"{self.seq_len} to train on. Expected at least {wanted}, for one step. "
                "Set --data to more text, or lower --seq-len or --batch-size."
            )
