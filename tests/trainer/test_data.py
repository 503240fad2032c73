import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, strategies as st

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.data import Loader, open_corpus


def counting_corpus(folder: Path, count: int = 400):
    path = folder / "tokens.npy"
    np.save(path, np.arange(count, dtype=np.int32))
    return open_corpus(str(path))


def loader(corpus, **changes) -> Loader:
    settings = {
        "seq_len": 4,
        "batch_size": 2,
        "microbatches": 2,
        "rank": 0,
        "world_size": 2,
        "seed": 0,
        "vocab_size": 1000,
    }
    return Loader(corpus=corpus, **(settings | changes))


@given(st.integers(0, 30), st.integers(1, 30))
def test_files_are_read_end_to_end(tmp_path_factory, start, count):
    folder = tmp_path_factory.mktemp("text")
    for name, text in {"a.txt": "abcdefg", "b.txt": "", "c.txt": "hijklmnopqrstuvwxyz" * 3}.items():
        (folder / name).write_text(text)
    corpus = open_corpus(str(folder))
    whole = ("abcdefg" + "hijklmnopqrstuvwxyz" * 3).encode()
    assert corpus.num_tokens == len(whole)
    assert bytes(corpus.read(start, count).tolist()) == whole[start : start + count]


def test_hidden_and_binary_files_of_a_folder_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    assert open_corpus(str(tmp_path)).num_tokens == 4


def test_the_default_corpus_is_the_source_of_the_standard_library():
    corpus = open_corpus("stdlib")
    assert corpus.num_tokens > 1_000_000
    assert {"argparse.py", "ast.py"} <= {path.name for path in corpus.paths}
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in corpus.paths)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_raw_token_ids_are_read_in_their_dtype(tmp_path, dtype):
    path = tmp_path / "tokens.bin"
    np.array([1, 40_000, 3], dtype=dtype).tofile(path)
    assert open_corpus(str(path), dtype).read(0, 3).tolist() == [1, 40_000, 3]


def test_targets_are_the_inputs_one_token_later(tmp_path):
    batch = loader(counting_corpus(tmp_path)).train_batch(0, 0)
    assert batch.tokens.shape == batch.targets.shape == (2, 4)
    assert torch.equal(batch.targets, batch.tokens + 1)


def first_tokens(of: Loader, step: int) -> list[int]:
    batches = [of.train_batch(step, microbatch) for microbatch in range(of.microbatches)]
    return [int(token) for batch in batches for token in batch.tokens[:, 0]]


def test_ranks_see_different_windows_and_each_window_once_in_an_epoch(tmp_path):
    corpus = counting_corpus(tmp_path, 4 * 50 + 1)
    ranks = [loader(corpus, rank=rank) for rank in (0, 1)]
    seen = [first for step in range(6) for rank in ranks for first in first_tokens(rank, step)]
    assert len(seen) == len(set(seen)) == 48
    assert {first % 4 for first in seen} == {0}


def test_a_batch_depends_on_the_step_alone_not_on_what_was_read_before(tmp_path):
    corpus = counting_corpus(tmp_path)
    straight, jumping = loader(corpus), loader(corpus)
    steps = [first_tokens(straight, step) for step in range(60)]  # over epochs
    assert first_tokens(jumping, 59) == steps[59]
    assert first_tokens(jumping, 3) == steps[3]


def test_the_global_batch_is_the_same_on_one_rank_as_on_two(tmp_path):
    corpus = counting_corpus(tmp_path)
    two = [loader(corpus, rank=rank, microbatches=1) for rank in (0, 1)]
    one = loader(corpus, world_size=1, batch_size=4, microbatches=1)
    for step in (0, 1, 30):
        together = first_tokens(two[0], step) + first_tokens(two[1], step)
        assert first_tokens(one, step) == together


def test_the_seed_decides_the_order(tmp_path):
    corpus = counting_corpus(tmp_path)
    assert first_tokens(loader(corpus), 0) != first_tokens(loader(corpus, seed=1), 0)


def test_evaluation_windows_are_never_trained_on(tmp_path):
    corpus = counting_corpus(tmp_path)
    of = loader(corpus)
    trained = {first for step in range(60) for first in first_tokens(of, step)}
    held_out = {
        int(token)
        for rank in (0, 1)
        for index in range(3)
        for token in replace(of, rank=rank).evaluation_batch(index).tokens[:, 0]
    }
    assert held_out
    assert not trained & held_out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "Data not found: "),
        ("", "has no tokens. Expected text or token ids"),
        ("short", "has 5 tokens: 0 windows of 4 to train on. Expected at least 8"),
    ],
)
def test_a_corpus_too_small_to_train_on_is_refused(tmp_path, content, complaint):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        loader(open_corpus(str(path)))


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.zeros((2, 2), dtype=np.int64), r"contains int64 of shape \(2, 2\). Expected one row"),
        (np.zeros(3), r"contains float64 of shape \(3,\). Expected one row of integers"),
    ],
)
def test_an_array_that_is_no_row_of_tokens_is_refused(tmp_path, array, complaint):
    path = tmp_path / "tokens.npy"
    np.save(path, array)
    with pytest.raises(ConfigError, match=complaint):
        open_corpus(str(path))


def test_a_file_that_is_only_called_npy_is_refused(tmp_path):
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"not an array at all")
    with pytest.raises(ConfigError, match=r"is an invalid NumPy file"):
        open_corpus(str(path))


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    corpus = counting_corpus(tmp_path)
    with pytest.raises(ConfigError, match=r"but vocab_size is 3. Set --vocab-size above"):
        loader(corpus, vocab_size=3).train_batch(0, 0)


def test_a_folder_of_many_files_does_not_use_up_the_descriptors(tmp_path):
    for number in range(600):
        (tmp_path / f"{number:03}.txt").write_text("some text of a file")
    corpus = open_corpus(str(tmp_path))
    before = psutil.Process().num_fds()
    corpus.read(0, corpus.num_tokens)
    opened = psutil.Process().num_fds() - before
    assert opened <= 256 < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
