"""Where did training stand? Saved whole or not at all, and read back to the last bit.

A checkpoint is a folder `step-000010` as torch.distributed.checkpoint writes it, with a
`trainer.json` beside its data. It is written under another name and renamed by rank 0 when every
rank is done: a folder of that name is always complete.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.config import TrainerConfig

_FACTS = "trainer.json"
_MODEL_SETTINGS = (
    "preset",
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "vocab_size",
    "hf",
    "hf_config",
)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is there and fits."""

    path: Path
    step: int
    """Steps that were done when it was saved."""


def find_checkpoint(config: TrainerConfig) -> SavedCheckpoint | None:
    """The checkpoint that the settings ask to resume from, if any.

    Raises:
        ConfigError: There is none at the path, or it is of another model.
    """
    if config.resume == "no":
        return None
    if config.resume == "latest":
        if config.checkpoint_dir is None:
            raise ConfigError(
                "resume is 'latest' and checkpoint_dir is not set. Expected a folder to look in. "
                "Set --checkpoint-dir, or --resume to the path of a checkpoint."
            )
        saved = list_checkpoints(Path(config.checkpoint_dir))
        return _read_facts(saved[-1], config) if saved else None
    return _read_facts(Path(config.resume), config)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, by step; empty if there is no such folder."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int
) -> Path:
    """Write a checkpoint after so many steps; all ranks call it together."""
    assert config.checkpoint_dir is not None
    target = Path(config.checkpoint_dir) / f"step-{step:06d}"
    unfinished = target.with_name(f"{target.name}.unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        facts = {"step": step, "config": config.model_dump(mode="json")}
        (unfinished / _FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    dist.barrier()
    save(_state(model, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        unfinished.replace(target)
    dist.barrier()
    return target


def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint
) -> None:
    """Read a checkpoint into a model and an optimizer; all ranks call it together.

    It may have been saved by another number of ranks, on another mesh. Random number generators
    go on where they stood if it was the same number.
    """
    state = _state(model, optimizer)
    known = FileSystemReader(saved.path).read_metadata().state_dict_metadata
    generator = state["generators"]
    if not all(f"generators.{key}" in known for key in generator):
        del state["generators"]
    load(state, checkpoint_id=saved.path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for key, value in state.get("generators", {}).items():
        (torch.cuda.set_rng_state if "cuda" in key else torch.set_rng_state)(value)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    name = f"rank{dist.get_rank()}of{dist.get_world_size()}"
    generators = {f"cpu-{name}": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators[f"cuda-{name}"] = torch.cuda.get_rng_state()
    return {"model": model_state, "optimizer": optimizer_state, "generators": generators}


def _read_facts(path: Path, config: TrainerConfig) -> SavedCheckpoint:
    try:
        facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        step, saved = int(facts["step"]), dict(facts["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"There is no checkpoint at {str(path)!r}: {error}. Expected a folder with "
            f"{_FACTS!r}, such as 'step-000010'. Set --resume to one, or to 'latest'."
        ) from error
    wanted = config.model_dump(mode="json")
    differing = [name for name in _MODEL_SETTINGS if saved.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"The checkpoint {str(path)!r} is of another model: its {name} is "
            f"{saved.get(name)!r}, and {wanted[name]!r} is asked for. Resume with the same model "
            "settings, or set --resume to a checkpoint of this model."
        )
    if step >= config.steps:
        raise ConfigError(
            f"The checkpoint {str(path)!r} was saved after {step} steps, and {config.steps} are "
            f"asked for in all. Set --steps above {step}."
        )
    return SavedCheckpoint(path=path, step=step)
