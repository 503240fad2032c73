import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from fsdp_inspect.error_text import describe_validation_error, nearest, suggest


class Size(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int
    height: int = 1


def describe(**values: object) -> str:
    with pytest.raises(ValidationError) as refused:
        Size.model_validate(values)
    return describe_validation_error(refused.value, legal_keys={"": ("width", "height")})


def test_the_nearest_names_come_best_first_and_strangers_not_at_all():
    assert nearest("layers.8", ["norm", "layers.0", "layers"]) == ["layers.0", "layers"]
    assert nearest("x", ["norm"]) == []


def test_where_nothing_is_near_all_names_are_offered():
    assert suggest("x", ["width", "height"], what="keys") == "The keys are 'width', 'height'."
    assert suggest("x", [], what="keys") == "There are no keys."


def test_an_unknown_key_is_named_with_its_nearest():
    assert describe(width=1, heigth=2) == "There is no key 'heigth'. Nearest: 'height'."


def test_a_missing_key_and_a_wrong_value_are_named_with_their_place():
    assert describe() == "width is missing."
    assert describe(width="wide").startswith("width is 'wide'. Expected a valid integer")
