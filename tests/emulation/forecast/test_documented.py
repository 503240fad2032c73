"""The builder in docs/gate.md works."""

import re
from pathlib import Path

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.store.reader import open_run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_builder_of_the_docs_is_forecast(tmp_path: Path) -> None:
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "gate.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "def build(" in block)
    names: dict[str, object] = {"__name__": "my_training"}
    exec(code, names)

    path = forecast_memory(names["build"], tmp_path / "mine", world_size=64)

    fqns = [unit.fqn for unit in open_run(path).manifest.units]
    assert fqns == [f"layers.{layer}" for layer in range(24)]
