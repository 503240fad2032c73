"""Test that the module of result classes is complete, lazy and free of torch."""

import subprocess
import sys

import pytest

from fsdp_inspect import result_types
from fsdp_inspect.analysis.summary import Summary

_IMPORT = """
import sys
from fsdp_inspect.result_types import Summary
assert "fsdp_inspect.analysis.summary" in sys.modules
print([name for name in ("torch", "streamlit", "plotly", "fsdp_inspect.advice.advise",
                         "fsdp_inspect.simulation.simulate") if name in sys.modules])
"""


def test_every_name_is_the_class_of_that_name():
    names = [getattr(result_types, name).__name__ for name in result_types.__all__]
    assert names == result_types.__all__


def test_a_class_is_the_one_of_its_own_module():
    assert result_types.Summary is Summary


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Sumary'"):
        _ = result_types.Sumary


def test_importing_one_class_loads_neither_torch_nor_the_other_packages():
    printed = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "[]"


def test_the_names_are_listed_in_order():
    assert sorted(result_types.__all__) == result_types.__all__ == dir(result_types)
