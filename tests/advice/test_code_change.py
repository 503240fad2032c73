"""The change of the code: a diff, a framework's settings, or the place to insert the plan."""

import ast
from types import SimpleNamespace

import pytest

from fsdp_inspect.advice.call_edits import Change
from fsdp_inspect.advice.code_change import CodeChange, write_code_change
from fsdp_inspect.recording.sharding_calls import read_calls
from fsdp_inspect.trace.plan import Accumulation, Plan, UnitPlan
from fsdp_inspect.trace.run import (
    ModelInfo,
    RunManifest,
    ShardingCall,
    SourceLines,
    TrainingCode,
    UserStatement,
)
from tests.builders import RunBuilder

BLOCKS = tuple(f"layers.{at}" for at in range(3))
PLAN = Plan(units=tuple(UnitPlan(modules=(name,)) for name in (*BLOCKS, "")))
RESHARDED = PLAN.change(BLOCKS, reshard_after_forward=False)
MERGED = PLAN.merge(["layers.0", "layers.1"])


def manifest_of(code: TrainingCode) -> RunManifest:
    command = ["python", "-u", "train.py"]
    return RunBuilder((*BLOCKS, ""), command=command, code=code).build().manifest


def own_calls(text: str, *lines: tuple[int, tuple[str, ...]]) -> TrainingCode:
    """The code of a script with calls in these lines, each with its units."""
    calls = [
        ShardingCall(function="fully_shard", file="train.py", line=line, units=list(units))
        for line, units in lines
    ]
    source = SourceLines(file="train.py", first_line=1, lines=text.splitlines())
    return TrainingCode(calls=read_calls(text, calls), sources=[source])


def changed(text: str, after: Plan, *lines: tuple[int, tuple[str, ...]]) -> CodeChange:
    return write_code_change(manifest_of(own_calls(text, *lines)), Change(PLAN, after))


def added(change: CodeChange) -> list[str]:
    return [line[1:] for line in change.diff.splitlines()[2:] if line.startswith("+")]


def removed(change: CodeChange) -> list[str]:
    return [line[1:] for line in change.diff.splitlines()[2:] if line.startswith("-")]


LOOP = """\
def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""
CALLS = ((3, BLOCKS), (4, ("",)))


def test_a_keyword_is_added_to_the_call():
    change = changed(LOOP, RESHARDED, *CALLS)
    assert added(change) == ["        fully_shard(layer, mesh=mesh, reshard_after_forward=False)"]
    assert not change.plan_file
    assert change.where == "The diff changes train.py, line 3."


@pytest.mark.parametrize(
    "call",
    [
        "fully_shard(layer, reshard_after_forward=True, mesh=mesh)",
        "fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=policy == 'always')",
    ],
)
def test_another_value_replaces_the_old_one(call):
    (line,) = added(changed(LOOP.replace("fully_shard(layer, mesh=mesh)", call), RESHARDED, *CALLS))
    assert line.count("reshard_after_forward=False") == 1
    ast.parse(line.strip())


def test_unpacked_settings_get_lines_after_the_calls():
    text = LOOP.replace("mesh=mesh)", "**settings)")
    lines = added(changed(text, RESHARDED, *CALLS))
    assert lines[0] == '    for name in [*(f"layers.{at}" for at in range(0, 3))]:'
    assert "model.get_submodule(name).set_reshard_after_forward(False, recurse=False)" in lines[1]
    plan = added(changed(text, MERGED, *CALLS))
    assert plan[-1] == '    fsdp_inspect.apply_plan(model, plan, settings.get("mesh"))'


def test_the_mesh_of_the_calls_stays_unless_the_plan_has_another():
    assert added(changed(LOOP, MERGED, *CALLS))[-1].endswith("apply_plan(model, plan, mesh)")
    replicas = MERGED.model_copy(update={"mesh": {"replicate": 2, "shard": 2}})
    assert added(changed(LOOP, replicas, *CALLS))[-1].endswith("apply_plan(model, plan)")


def test_a_loop_that_does_more_than_shard_stays():
    text = LOOP.replace("        fully_shard", "        layer.half()\n        fully_shard")
    change = changed(text, MERGED, (4, BLOCKS), (5, ("",)))
    assert removed(change) == [
        "        fully_shard(layer, mesh=mesh)",
        "    fully_shard(model, mesh=mesh)",
    ]


def test_a_block_that_only_sharded_stays_valid():
    text = """\
if big:
    fully_shard(layers[0])
fully_shard(model)
"""
    change = changed(text, MERGED, (2, BLOCKS), (3, ("",)))
    assert added(change)[0] == "    pass"


@pytest.mark.parametrize(
    "statement",
    ["layers = [fully_shard(layer) for layer in layers]", "wrapped = fully_shard(model)"],
)
def test_a_call_inside_another_statement_is_only_named(statement):
    change = changed(f"{statement}\nfully_shard(model)\n", MERGED, (1, BLOCKS), (2, ("",)))
    assert not change.diff
    assert change.where.startswith("Replace the calls in train.py, lines 1 and 2 with these lines.")
    assert "No diff can be written" in change.where
    ast.parse(change.lines)


def test_settings_that_a_plan_cannot_express_are_not_lost():
    text = LOOP.replace("fully_shard(layer, ", "fully_shard(layer, ignored_params=ignored, ")
    assert not changed(text, MERGED, *CALLS).diff
    assert changed(text, RESHARDED, *CALLS).diff


def test_a_plan_that_joins_models_without_a_common_root_applies_to_the_whole_model():
    """Each call shards an outermost unit, and the plan makes one unit of two of them."""
    before = Plan(units=(UnitPlan(modules=("norm",)), UnitPlan(modules=("head",))))
    after = Plan(units=(UnitPlan(modules=("norm", "head")),))
    code = own_calls("fully_shard(norm)\nfully_shard(head)\n", (1, ("norm",)), (2, ("head",)))
    change = write_code_change(manifest_of(code), Change(before, after))
    assert not change.diff
    assert change.lines.splitlines()[-1] == "fsdp_inspect.apply_plan(model, plan)"


def test_a_plan_keeps_the_placement_of_the_calls_that_it_replaces():
    text = LOOP.replace("fully_shard(layer, ", "fully_shard(layer, shard_placement_fn=place, ")
    change = changed(text, MERGED, *CALLS)
    assert not change.diff
    assert "shard_placement_fn=shard_placement_fn)" in change.lines
    assert "shard_placement_fn" not in changed(LOOP, MERGED, *CALLS).diff


def test_lines_with_a_masked_secret_give_no_diff():
    code = own_calls(LOOP, *CALLS)
    lines = ["token = '***'", *LOOP.splitlines()[1:]]
    masked = code.model_copy(
        update={"sources": [SourceLines(file="train.py", first_line=1, lines=lines)]}
    )
    change = write_code_change(manifest_of(masked), Change(PLAN, MERGED))
    assert not change.diff
    assert change.lines


def test_one_helper_that_shards_several_models_is_only_named():
    names = tuple(f"{model}.{name}" for model in ("actor", "critic") for name in ("0", "1"))
    plan = Plan(units=tuple(UnitPlan(modules=(name,)) for name in ("actor", "critic", *names)))
    code = own_calls(LOOP, (3, names), (4, ("actor", "critic")))
    merged = plan.merge(["actor.0", "actor.1"])
    assert not write_code_change(manifest_of(code), Change(plan, merged)).diff
    kept = plan.change(names, reshard_after_forward=False)
    assert write_code_change(manifest_of(code), Change(plan, kept)).diff


def of_two_models() -> tuple[Plan, Plan, tuple[str, ...]]:
    """The plan of two equal models, the same change of both, and the units of their blocks."""
    names = tuple(f"{model}.layers.{at}" for model in ("lm", "ref") for at in range(2))
    plan = Plan(units=tuple(UnitPlan(modules=(name,)) for name in (*names, "lm", "ref")))
    merged = plan.merge(["lm.layers.0", "lm.layers.1"]).merge(["ref.layers.0", "ref.layers.1"])
    return plan, merged, names


def test_one_helper_that_shards_equal_models_gets_the_plan_of_the_first():
    plan, merged, names = of_two_models()
    code = own_calls(LOOP.replace("mesh=mesh", "**options"), (3, names), (4, ("lm", "ref")))
    change = write_code_change(manifest_of(code), Change(plan, merged))
    assert added(change)[-2:] == [
        '    plan = fsdp_inspect.Plan.load("plan.toml").within("lm")',
        '    fsdp_inspect.apply_plan(model, plan, options.get("mesh"))',
    ]
    ahead = plan.model_copy(update={"forward_prefetch": 1})
    lines = added(write_code_change(manifest_of(code), Change(plan, ahead)))
    assert lines[0].startswith("    names = [")
    assert "lm" not in lines[0]


def manifest_of_two(code: TrainingCode) -> RunManifest:
    """Two recorded models, `lm` and `ref`, with a block each and the given code."""
    builder = RunBuilder(("lm.layers.0", "lm", "ref.layers.0", "ref"), code=code)
    model = ModelInfo(class_name="Decoder + Decoder")
    return builder.build().manifest.model_copy(update={"model": model})


def run_lines(lines: str, **variables: object) -> list[object]:
    """Run printed lines; returns the models to which they apply a plan."""
    applied: list[object] = []
    inspect = SimpleNamespace(
        Plan=Plan, apply_plan=lambda model, plan, *mesh: applied.append((model, plan.unit_names))
    )
    exec(lines.replace("import fsdp_inspect", ""), {"fsdp_inspect": inspect, **variables})
    return applied


@pytest.mark.parametrize("models", ["(lm_net, self.ref)", "[lm_net, self.ref, ]"])
def test_printed_lines_have_the_names_of_the_loop_that_shards_the_models(models, tmp_path):
    """The recorded names are those of classes: the script has no such variables."""
    text = f"""\
for net in {models}:
    for b in net.layers: fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
"""
    plan, merged, names = of_two_models()
    after = merged.change(["ref"], reshard_after_forward=True)
    after.dump(tmp_path / "plan.toml")
    code = own_calls(text, (2, names), (3, ("lm", "ref")))
    file = str(tmp_path / "plan.toml")
    change = write_code_change(manifest_of_two(code), Change(plan, after, plan_file=file))
    own = SimpleNamespace(ref="second")
    applied = run_lines(change.lines, lm_net="first", self=own, mesh="mesh")
    blocks = ("layers.0, layers.1", "")
    assert applied == [("first", blocks), ("second", blocks)]


@pytest.mark.parametrize(
    ("head", "place"),
    [
        ("for net in make_models():", ", model 1 of 2 that train.py:3 shards"),
        ("for net in (a, b, c):", ", model 1 of 2 that train.py:3 shards"),
        ("", ""),
    ],
)
def test_unknown_variables_of_models_are_placeholders_that_a_note_explains(head, place):
    """A name that the script lacks stops it with a NameError."""
    text = f"{head}\n    for b in net.layers: fully_shard(b)\n    fully_shard(net)\n"
    plan, merged, names = of_two_models()
    after = merged.change(["ref"], reshard_after_forward=True)
    code = own_calls(text, (2, names), (3, ("lm", "ref"))) if head else TrainingCode()
    change = write_code_change(manifest_of_two(code), Change(plan, after))
    first, second, *rest = change.lines.splitlines()
    size = "(200 parameters"
    assert first == (f"# MODEL_1: your variable of the model that is recorded as lm {size}{place})")
    assert second.startswith("# MODEL_2: your variable of the model that is recorded as ref (")
    assert rest[2] == "fsdp_inspect.apply_plan(MODEL_1, plan)"
    assert rest[4].endswith('.within("ref")')
    assert rest[5] == "fsdp_inspect.apply_plan(MODEL_2, plan)"
    assert "mesh" not in change.lines


def test_the_unknown_variable_of_one_model_is_explained():
    """The outermost units `norm` and `head` are modules of one model, not variables."""
    before = Plan(units=(UnitPlan(modules=("norm",)), UnitPlan(modules=("head",))))
    change = Change(before, before.change(["norm"], reshard_after_forward=True))
    lines = write_code_change(manifest_of(TrainingCode()), change).lines.splitlines()
    assert lines[0] == "# model: your variable of the recorded model, a Decoder"
    assert lines[-1] == "fsdp_inspect.apply_plan(model, plan)"


def test_a_call_that_shares_its_line_is_the_reason_for_no_diff():
    text = """\
def shard(m, **k):
    for b in m.layers: b.half(); fully_shard(b, **k)
    fully_shard(m, **k)
"""
    change = changed(text, MERGED, (2, BLOCKS), (3, ("",)))
    assert not change.diff
    assert change.where.endswith(
        "No diff can be written: the call in train.py, line 2, shares its line or statement with "
        "other code."
    )
    assert change.lines.splitlines()[-1] == 'fsdp_inspect.apply_plan(m, plan, k.get("mesh"))'


def test_accumulation_is_left_to_the_loop():
    after = RESHARDED.model_copy(update={"accumulation": Accumulation(microbatches=2, sync="last")})
    change = changed(LOOP, after, *CALLS)
    assert change.diff
    assert change.where.endswith(
        "The training loop must also reduce gradients as the plan states: "
        "`model.set_requires_gradient_sync(is_last_microbatch)  # before each backward`."
    )


@pytest.mark.parametrize("is_changed", [True, False])
def test_the_script_s_own_prefetch_would_undo_that_of_a_plan(is_changed):
    before = PLAN.model_copy(update={"forward_prefetch": 2})
    update = {} if is_changed else {"forward_prefetch": 2}
    manifest = manifest_of(own_calls(LOOP, *CALLS))
    change = write_code_change(manifest, Change(before, RESHARDED.model_copy(update=update)))
    assert ("Remove the script's own calls of set_modules" in change.where) is is_changed


def test_an_older_run_says_that_the_place_is_unknown():
    change = write_code_change(manifest_of(TrainingCode()), Change(PLAN, MERGED))
    assert "unknown, because the run does not contain it" in change.where
    assert "apply_plan(model, plan)" in change.lines


def test_a_model_sharded_before_the_recorder_was_imported_is_reported():
    code = TrainingCode(launch=["torchrun", "train.py"], launched_at=1)
    change = write_code_change(manifest_of(code), Change(PLAN, MERGED))
    assert "sharded before the script imported the recorder" in change.where


# --- frameworks


def of_package(package: str, **fields: object) -> TrainingCode:
    calls = [
        ShardingCall(
            function="fully_shard",
            file=f"{package}/parallelize.py",
            line=line,
            units=list(units),
            package=package,
            user=fields.get("user"),  # type: ignore[arg-type]
        )
        for line, units in CALLS
    ]
    return TrainingCode(
        calls=calls,
        frameworks=fields.get("frameworks", [package]),  # type: ignore[arg-type]
        settings=fields.get("settings", {}),  # type: ignore[arg-type]
        launch=["torchrun", "-m", f"{package}.train", "--training.steps", "9"],
        launched_at=1,
    )


def test_torchtitan_gets_its_own_option_in_the_launch_line():
    change = write_code_change(manifest_of(of_package("torchtitan")), Change(PLAN, RESHARDED))
    assert change.where == "torchtitan makes this change by its own settings."
    assert change.launch == (
        "torchrun -m torchtitan.train --training.steps 9 "
        "--parallelism.fsdp_reshard_after_forward never"
    )
    back = RESHARDED.change(BLOCKS, reshard_after_forward=True)
    again = write_code_change(manifest_of(of_package("torchtitan")), Change(RESHARDED, back))
    assert again.launch.endswith("--parallelism.fsdp_reshard_after_forward always")


def test_torchtitan_gets_options_for_dtypes():
    after = PLAN.change(PLAN.unit_names, reduce_dtype="bfloat16")
    change = write_code_change(manifest_of(of_package("torchtitan")), Change(PLAN, after))
    assert change.launch.endswith("--training.mixed_precision_reduce bfloat16")


def test_a_change_without_a_setting_of_torchtitan_names_its_calls():
    code = of_package("torchtitan")
    merged = write_code_change(manifest_of(code), Change(PLAN, MERGED))
    assert merged.where == (
        "torchtitan shards the model in torchtitan/parallelize.py:3. Replace its calls with these "
        "lines."
    )
    assert merged.plan_file == "plan.toml"
    prefetching = PLAN.model_copy(update={"forward_prefetch": 1})
    after = write_code_change(manifest_of(code), Change(PLAN, prefetching))
    assert "Add these lines after its calls." in after.where
    assert "set_modules_to_forward_prefetch" in after.lines
    assert not after.plan_file


def test_accelerate_under_the_trainer_of_transformers_is_set_in_its_arguments():
    user = UserStatement(file="train.py", line=9, end_line=9)
    code = of_package(
        "accelerate",
        frameworks=["accelerate", "transformers"],
        settings={"reshard_after_forward": True},
        user=user,
    )
    before = PLAN.change(BLOCKS, reshard_after_forward=True)
    after = before.change(BLOCKS, reshard_after_forward=False)
    change = write_code_change(manifest_of(code), Change(before, after))
    assert change.settings.startswith("TrainingArguments(..., fsdp_config=")
    assert '"reshard_after_forward": False' in change.settings
    merged = write_code_change(manifest_of(code), Change(before, before.merge(BLOCKS[:2])))
    assert '"auto_wrap_policy": "NO_WRAP"' in merged.settings
    assert "called from train.py:9" in merged.where


@pytest.mark.parametrize("has_own_mesh", [False, True])
def test_a_diff_before_accelerate_names_no_mesh_that_the_script_lacks(has_own_mesh):
    user = UserStatement(file="train.py", line=2, end_line=2, model="net", made_at=1)
    code = of_package("accelerate", user=user)
    lines = ["net = Net()", "net = accelerator.prepare(net)", "train(net)"]
    source = SourceLines(file="train.py", first_line=1, lines=lines)
    manifest = manifest_of(code.model_copy(update={"sources": [source]}))
    mesh = {"shard": 2} if has_own_mesh else {}
    plans = [plan.change(["layers.2"], mesh=mesh) for plan in (PLAN, MERGED)]
    change = write_code_change(manifest, Change(*plans))
    assert bool(change.diff) is not has_own_mesh
    if has_own_mesh:
        note, *_, last = change.lines.splitlines()
        assert note == "# mesh: your variable of the data-parallel mesh"
        assert last == "fsdp_inspect.apply_plan(net, plan, mesh)"
    else:
        assert added(change)[-1] == "fsdp_inspect.apply_plan(net, plan)"
