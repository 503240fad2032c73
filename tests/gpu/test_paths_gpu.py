"""Record each path that training takes on CUDA; they also fill rows of the `make gpu` table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.paths import PATHS, NotHereError
from tests.gpu.setting import Setting


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_recorded_on_a_gpu(name: str, tmp_path: Path) -> None:
    setting = Setting("cuda", quick=False, scratch=tmp_path, limit_s=120)
    try:
        PATHS[name](setting, tmp_path / "run")
    except NotHereError as reason:
        pytest.skip(str(reason))
