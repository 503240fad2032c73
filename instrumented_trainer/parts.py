"""Find the parts of a model by its structure.

The blocks are the elements of its longest `ModuleList`, and of all other lists that neither contain
these blocks nor are inside one: the decoder of an encoder-decoder, the other stages of a vision
model. Other modules with parameters are an embedding (`nn.Embedding`) or belong to the head (the
last norm, the output projection).
"""

from dataclasses import dataclass

from torch import nn

from fsdp_inspect.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """The modules of a model, by name, in the order of registration."""

    modules: tuple[str, ...]
    """Every module, in the order of `named_modules()`."""
    containers: tuple[str, ...]
    """Lists and dictionaries of modules, which are never called and so cannot be units."""
    embeddings: tuple[str, ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    """The other modules that own parameters: the last norm, the output projection."""
    halves: dict[str, tuple[tuple[str, ...], ...]]
    """The (norm, attention) and (norm, feed-forward) of each block that can be split."""
    numel: dict[str, int]
    """Number of parameters of each module, with all modules below it."""
    is_tied: bool
    """Whether embedding and output projection share one matrix."""


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts of a model; works on the meta device.

    Raises:
        ConfigError: The model has no list of blocks.
    """
    modules = dict(model.named_modules())
    stacks = _find_stacks(modules)
    blocks = tuple(name for name in modules if any(_is_child(name, stack) for stack in stacks))
    outside: list[str] = []
    for name, module in modules.items():
        owns_parameters = any(True for _ in module.parameters(recurse=False))
        # The parameters of a module around the blocks belong to the unit of the whole model.
        if owns_parameters and not any(
            _is_below(name, each) or _is_below(each, name) for each in (*stacks, *outside)
        ):
            outside.append(name)
    embeddings = tuple(name for name in outside if isinstance(modules[name], nn.Embedding))
    numel = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    return ModelParts(
        modules=tuple(modules),
        containers=tuple(
            name for name, m in modules.items() if isinstance(m, nn.ModuleList | nn.ModuleDict)
        ),
        embeddings=embeddings,
        blocks=blocks,
        head=tuple(name for name in outside if name not in embeddings),
        halves={name: halves for name in blocks if (halves := _halve(name, modules[name]))},
        numel=numel,
        is_tied=_is_tied(modules, outside),
    )


def _find_stacks(modules: dict[str, nn.Module]) -> list[str]:
    lists = {name: len(m) for name, m in modules.items() if isinstance(m, nn.ModuleList)}
    stacks: list[str] = []
    for name in sorted(lists, key=lambda name: -lists[name]):
        # Experts do not run in every step, and not on every rank.
        is_stack = lists[name] > 0 and "expert" not in name.rpartition(".")[2].lower()
        if is_stack and not any(_is_below(name, s) or _is_below(s, name) for s in stacks):
            stacks.append(name)
    if not stacks:
        kind = type(modules[""]).__name__
        raise ConfigError(
            f"{kind} has no list of blocks. Expected a model with its blocks in a ModuleList. "
            "Choose another model, or shard it with --wrap root."
        )
    return stacks


def _is_child(name: str, parent: str) -> bool:
    return name.rpartition(".")[0] == parent and name != parent


def _is_below(name: str, parent: str) -> bool:
    return name == parent or not parent or name.startswith(f"{parent}.")


def _halve(name: str, block: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Pair each norm of a block with the module that it feeds, in the order of registration.

    Empty if the numbers of norms and of other modules differ: a split would then leave parameters
    outside.
    """
    children = [
        (child, m) for child, m in block.named_children() if any(True for _ in m.parameters())
    ]
    norms = [child for child, m in children if all(p.ndim == 1 for p in m.parameters())]
    bodies = [child for child, _ in children if child not in norms]
    if any(True for _ in block.parameters(recurse=False)) or len(norms) != len(bodies):
        return ()
    return tuple(
        (f"{name}.{norm}", f"{name}.{body}") for norm, body in zip(norms, bodies, strict=True)
    )


def _is_tied(modules: dict[str, nn.Module], names: list[str]) -> bool:
    owners: dict[int, str] = {}
    for name in names:
        for parameter in modules[name].parameters():
            if owners.setdefault(id(parameter), name) != name:
                return True
    return False
