import json
from pathlib import Path

import pytest

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.checkpoint import SavedCheckpoint, find_checkpoint, list_checkpoints
from instrumented_trainer.command_line import check_settings


def save(folder: Path, step: int, **settings: object) -> Path:
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    facts = {"step": step, "config": check_settings(settings).model_dump(mode="json")}
    (path / "trainer.json").write_text(json.dumps(facts))
    return path


def find(**settings: object) -> SavedCheckpoint | None:
    return find_checkpoint(check_settings({"steps": 100, **settings}))


def test_nothing_is_resumed_unless_asked_for(tmp_path):
    save(tmp_path, 10)
    assert find(checkpoint_dir=str(tmp_path)) is None


def test_latest_is_the_greatest_step_not_the_last_name(tmp_path):
    for step in (9, 1_000_000, 70):
        save(tmp_path, step)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [9, 70, 1_000_000]


def test_latest_starts_anew_where_there_is_none(tmp_path):
    assert find(checkpoint_dir=str(tmp_path / "absent"), resume="latest") is None


def test_unfinished_checkpoints_are_not_seen(tmp_path):
    (tmp_path / "step-000020.unfinished").mkdir()
    path = save(tmp_path, 10)
    assert find(checkpoint_dir=str(tmp_path), resume="latest") == SavedCheckpoint(path, 10)


def test_a_checkpoint_is_resumed_by_its_path(tmp_path):
    path = save(tmp_path, 10)
    save(tmp_path, 20)
    assert find(resume=str(path)) == SavedCheckpoint(path, 10)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"resume": "latest"}, "checkpoint_dir is not set. Expected a folder to search"),
        ({"resume": "absent"}, "Checkpoint not found: 'absent'"),
        ({"preset": "small"}, "its preset is 'tiny', but 'small' is set"),
        ({"steps": 10}, "was saved after 10 steps, but steps is 10. Expected more steps"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, settings, complaint):
    path = save(tmp_path, 10)
    with pytest.raises(ConfigError, match=complaint):
        find(**{"resume": str(path), **settings})
