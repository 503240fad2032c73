"""Hold several models as one module, so that one recording contains them all."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from torch import nn

from fsdp_inspect.recording.code_places import read_variables


class Models(nn.Module):
    """Several models of one training, such as actor and critic.

    The name of a model is the prefix of the names of its units. The module is never called.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def class_name_of(model: nn.Module) -> str:
    """The class of a model in its source code; for several models, `Actor + Critic`."""
    if isinstance(model, Models):
        return " + ".join(class_name_of(each) for each in model.children())
    # Imported here, because a launcher imports this file during the script's first import of torch.
    from fsdp_inspect.recording.torch_api.modules import original_class

    return original_class(model).__name__


def all_modules() -> list[nn.Module]:
    """The modules of this process, also those that no variable of the script holds.

    The type is compared, not isinstance, because an object of the script may compute its class.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def as_one_module(
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
) -> nn.Module:
    """The module to record: a single model, or a holder of several models.

    In a sequence, each model has the name of the variable that holds it in the calling script, or
    else the name of its class.

    Raises:
        ValueError: No model is given, a value is not a module, or a model is given twice.
    """
    if isinstance(models, nn.Module):
        return models
    named = dict(models) if isinstance(models, Mapping) else None
    given = list(models.values()) if isinstance(models, Mapping) else list(models)
    _check(given)
    if named is None:
        if len(given) == 1:
            return given[0]
        named = dict(zip(name_models(given, _calling_frame()), given, strict=True))
    for name in named:
        if not name.isidentifier():
            raise ValueError(
                f"The model name {name!r} is not an identifier. Expected a name such as 'actor': "
                "it is the prefix of the model's units."
            )
    return Models(named)


def _check(models: Sequence[object]) -> None:
    wrong = next((each for each in models if not isinstance(each, nn.Module)), None)
    if not models or wrong is not None:
        found = "no model" if wrong is None else f"a {type(wrong).__name__}"
        raise ValueError(
            f"The models to record contain {found}. Expected torch modules: Recorder(model), "
            "Recorder([actor, critic]) or Recorder({'actor': actor, 'critic': critic})."
        )
    if len({id(model) for model in models}) < len(models):
        raise ValueError("A model is given twice. Expected each model once.")


def name_models(models: Sequence[nn.Module], frame: FrameType | None = None) -> list[str]:
    """A name for each model, all different.

    Args:
        models: The models.
        frame: A frame of the script; its variables name the models.
    """
    names: list[str] = []
    for model in models:
        name = _variable_of(model, frame) or class_name_of(model).lower()
        number, unique = 2, name
        while unique in names:
            unique, number = f"{name}_{number}", number + 1
        names.append(unique)
    return names


def _variable_of(model: nn.Module, frame: FrameType | None) -> str:
    """The variable of the frame, or the attribute of its `self`, that holds the model."""
    if frame is None:
        return ""
    name, owner = read_variables(frame, lambda found: (_name_in(found, model), found.get("self")))
    has_scope = owner is not None and not isinstance(owner, nn.Module)
    of_owner = getattr(owner, "__dict__", {}) if has_scope else {}
    return name or _name_in(of_owner, model) or _name_in(frame.f_globals, model)


def _name_in(scope: Mapping[str, object], model: nn.Module) -> str:
    names = (name for name, value in scope.items() if value is model)
    return next((each for each in names if each.isidentifier() and each[0] != "_"), "")


def _calling_frame() -> FrameType | None:
    """The innermost frame outside this package."""
    package = __name__.partition(".")[0] + "."
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(package):
        frame = frame.f_back
    return frame
