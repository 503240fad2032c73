import pytest
import torch
from torch import nn

from fsdp_inspect.recording.loop_hooks import MOST_STEPS, OptimizerRound
from fsdp_inspect.recording.models import Models, as_one_module, class_name_of, name_models


class Actor(nn.Linear):
    pass


def make(kind: type[nn.Linear] = Actor) -> nn.Linear:
    return kind(2, 2)


def test_one_model_is_itself():
    model = make()
    assert as_one_module(model) is model
    assert as_one_module([model]) is model


def test_models_have_the_names_of_their_variables():
    actor, critic = make(), make()
    models = as_one_module([actor, critic])
    assert isinstance(models, Models)
    assert dict(models.named_children()) == {"actor": actor, "critic": critic}
    assert class_name_of(models) == "Actor + Actor"


def test_models_without_a_variable_have_the_names_of_their_classes():
    models = as_one_module([make(), make(), make(nn.Linear)])
    assert [name for name, _ in models.named_children()] == ["actor", "actor_2", "linear"]


class Trainer:
    def __init__(self) -> None:
        self.policy, self.value = make(), make()

    def models(self) -> nn.Module:
        return as_one_module([self.policy, self.value])


def test_models_of_an_object_have_the_names_of_its_attributes():
    assert [name for name, _ in Trainer().models().named_children()] == ["policy", "value"]


def test_a_mapping_gives_the_names():
    models = as_one_module({"generator": make(), "discriminator": make()})
    assert [name for name, _ in models.named_children()] == ["generator", "discriminator"]
    assert name_models([make()]) == ["actor"]


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([], "contain no model"),
        ([make(), 3], "contain a int"),
        ([model := make(), model], "given twice"),
        ({"a.b": make()}, "'a.b' is not an identifier"),
    ],
)
def test_what_is_no_list_of_models_is_refused(models, complaint):
    with pytest.raises(ValueError, match=complaint):
        as_one_module(models)


# --- rounds


def optimizers(number: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(make().parameters(), lr=0.1) for _ in range(number)]


def ends(steps: list[torch.optim.Optimizer], given: list[torch.optim.Optimizer] | None) -> str:
    """One letter for each step: `|` ends a round."""
    notes: list[str] = []
    round_ = OptimizerRound(given, notes.append)
    return "".join("|" if round_.is_complete(each) else "." for each in steps)


def test_a_round_ends_when_every_given_optimizer_has_stepped():
    generator, discriminator = optimizers(2)
    steps = [discriminator, discriminator, generator] * 3
    assert ends(steps, [generator, discriminator]) == "..|..|..|"


def test_learned_rounds_end_with_the_last_optimizer_from_the_second_one_on():
    first, second, third = optimizers(3)
    steps = [first, second, third] * 4
    assert ends(steps, None) == "|....|..|..|"


def test_a_single_learned_optimizer_ends_every_step():
    (only,) = optimizers(1)
    assert ends([only] * 4, None) == "||||"


def test_an_optimizer_that_stops_leaves_the_round():
    first, second = optimizers(2)
    notes: list[str] = []
    round_ = OptimizerRound([first, second], notes.append)
    ended = [round_.is_complete(first) for _ in range(MOST_STEPS + 3)]
    assert ended == [False] * (MOST_STEPS - 1) + [True] * 4
    assert len(notes) == 1


def test_an_optimizer_that_the_script_drops_leaves_the_round():
    first, second = optimizers(2)
    round_ = OptimizerRound([first, second], lambda _: None)
    assert not round_.is_complete(first)
    del second
    assert round_.is_complete(first)
