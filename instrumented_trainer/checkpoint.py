"""Save and load checkpoints: each is complete or absent, and exact to the last bit.

A checkpoint is a folder `step-000010` in the format of torch.distributed.checkpoint, plus a
`trainer.json`. It is written under another name, and rank 0 renames it when every rank is done. A
folder with the final name is therefore always complete.
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
from fsdp_inspect.reading import MAX_JSON_BYTES, parse_json, read_regular
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
    """An existing checkpoint that fits the settings."""

    path: Path
    step: int
    """Completed steps at the time of saving."""


def find_checkpoint(config: TrainerConfig) -> SavedCheckpoint | None:
    """Find the checkpoint that `resume` names; None if the run starts from step 0.

    Raises:
        ConfigError: The path has no checkpoint, or a checkpoint of another model.
    """
    if config.resume == "no":
        return None
    if config.resume == "latest":
        if config.checkpoint_dir is None:
            raise ConfigError(
                "resume is 'latest' but checkpoint_dir is not set. Expected a folder to search. "
                "Set --checkpoint-dir, or set --resume to the path of a checkpoint."
            )
        saved = list_checkpoints(Path(config.checkpoint_dir))
        return _read_facts(saved[-1], config) if saved else None
    return _read_facts(Path(config.resume), config)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, by step; empty if the folder does not exist."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int
) -> Path:
    """Write a checkpoint after this many steps; all ranks call it together."""
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
    """Load a checkpoint into a model and an optimizer; all ranks call it together.

    The checkpoint may come from another number of ranks or another mesh. Random number generators
    continue from their saved state if the number of ranks is the same.
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
        facts = parse_json(read_regular(path / _FACTS, MAX_JSON_BYTES))
        step, saved = int(facts["step"]), dict(facts["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Checkpoint not found: {str(path)!r}: {error}. Expected a folder with "
            f"{_FACTS!r}, such as 'step-000010'. Set --resume to one, or to 'latest'."
        ) from error
    wanted = config.model_dump(mode="json")
    differing = [name for name in _MODEL_SETTINGS if saved.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"The checkpoint {str(path)!r} belongs to another model: its {name} is "
            f"{saved.get(name)!r}, but {wanted[name]!r} is set. Resume with the same model "
            "settings, or set --resume to a checkpoint of this model."
        )
    if step >= config.steps:
        raise ConfigError(
            f"The checkpoint {str(path)!r} was saved after {step} steps, but steps is "
            f"{config.steps}. Expected more steps in total. Set --steps above {step}."
        )
    return SavedCheckpoint(path=path, step=step)
