import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.errors import PlanError
from fsdp_inspect.trace.plan import (
    SETTINGS,
    Accumulation,
    Checkpointing,
    Fsdp1Settings,
    Plan,
    UnitPlan,
    check_reshard_sizes,
    entry_order,
    lists_of_depth,
    owned_parameters,
)

PARTS = ("attention_norm", "attention", "ffn_norm", "ffn")
MODULES = [
    "",
    "tok_embeddings",
    "layers",
    *(name for i in range(3) for name in (f"layers.{i}", *(f"layers.{i}.{p}" for p in PARTS))),
    "norm",
    "lm_head",
]


def units(*groups: str, **settings: object) -> tuple[UnitPlan, ...]:
    return tuple(UnitPlan(modules=tuple(group.split(", ")), **settings) for group in groups)


BLOCKS = Plan(units=units("", "tok_embeddings", "layers.*", "norm, lm_head"))


def test_a_pattern_is_one_unit_for_each_match_in_the_order_of_the_model():
    assert BLOCKS.resolve(MODULES).unit_names == (
        "",
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "norm, lm_head",
    )


def test_patterns_of_one_unit_match_together():
    plan = Plan(units=units("layers.*.ffn_norm, layers.*.ffn"))
    assert plan.resolve(MODULES).units[1].modules == ("layers.1.ffn_norm", "layers.1.ffn")


def test_a_module_named_in_full_is_left_out_of_a_pattern():
    plan = Plan(
        units=(*units("layers.*"), *units("layers.2", reshard_after_forward=False))
    ).resolve(MODULES)
    assert [unit.reshard_after_forward for unit in plan.units] == [None, None, False]


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ("layers.3", r"module 'layers.3', which the model does not have. Nearest: 'layers.0'"),
        ("layer.*", r"pattern 'layer.\*' matches no module of the model. Nearest: 'layers.0'"),
        ("layers.*.ffn, layers.*.mlp", r"module 'layers.0.mlp', which the model does not have"),
    ],
)
def test_a_name_that_the_model_lacks_is_refused_with_the_nearest(group, complaint):
    with pytest.raises(PlanError, match=complaint):
        Plan(units=units(group)).resolve(MODULES)


def test_a_prefetch_list_that_names_no_unit_is_refused():
    plan = Plan(units=units("norm", "lm_head"), forward_prefetch={"norm": ("lm_heads",)})
    with pytest.raises(PlanError, match=r"no unit 'lm_heads'. Nearest: 'lm_head'"):
        plan.resolve(MODULES)


def test_changed_values_that_do_not_fit_together_are_refused_with_their_place():
    plan = Plan(units=units("layers.0", ""), mesh={"shard": 4})
    changed = [unit.model_copy(update={"reshard_after_forward": 2}) for unit in plan.units]
    assert plan.with_values(units=tuple(changed)) == plan.change(
        plan.unit_names, reshard_after_forward=2
    )
    wrong = [unit.model_copy(update={"reshard_after_forward": 3}) for unit in plan.units]
    with pytest.raises(PlanError, match=r"is 3. Expected true, false or a divisor of the 4 ranks"):
        plan.with_values(units=tuple(wrong))


def test_checkpointing_patterns_are_resolved_too():
    plan = Plan(units=units(""), checkpointing=Checkpointing(full=("layers.*",)))
    assert plan.resolve(MODULES).checkpointing.full == ("layers.0", "layers.1", "layers.2")


def test_forward_and_backward_enter_a_unit_before_those_in_it():
    nested = units("", "layers.0", "layers.0.ffn", "layers.1", "norm, lm_head")
    assert entry_order(nested, "forward") == [
        "",
        "layers.0",
        "layers.0.ffn",
        "layers.1",
        "norm, lm_head",
    ]
    assert entry_order(nested, "backward") == [
        "",
        "norm, lm_head",
        "layers.1",
        "layers.0",
        "layers.0.ffn",
    ]


def test_a_prefetch_depth_names_the_next_units_in_either_direction():
    plan = Plan(
        units=units("", "tok_embeddings", "norm, lm_head"), forward_prefetch=1, backward_prefetch=2
    )
    assert plan.prefetch_lists("forward", without={""}) == {"tok_embeddings": ["norm, lm_head"]}
    assert plan.prefetch_lists("backward") == {
        "": ["norm, lm_head", "tok_embeddings"],
        "norm, lm_head": ["tok_embeddings"],
    }
    assert lists_of_depth(units("a", "b"), "forward", 0) == {}


def test_a_prefetch_depth_stays_within_a_model():
    actor_and_critic = units("actor", "actor.a", "actor.b", "critic", "critic.a")
    assert lists_of_depth(actor_and_critic, "forward", 2) == {
        "actor": ["actor.a", "actor.b"],
        "actor.a": ["actor.b"],
        "critic": ["critic.a"],
    }
    assert lists_of_depth(units("a", "b"), "backward", 1) == {"b": ["a"]}


def test_a_split_unit_leaves_its_settings_to_the_parts():
    plan = Plan(units=units("layers.0", offload="cpu")).split(
        "layers.0", [["layers.0.attention_norm", "layers.0.attention"], ["layers.0.ffn"]]
    )
    assert plan.unit_names == ("layers.0.attention_norm, layers.0.attention", "layers.0.ffn")
    assert {unit.offload for unit in plan.units} == {"cpu"}


def test_merged_units_take_the_settings_of_the_first():
    plan = Plan(units=(*units("norm", reshard_after_forward=False), *units("lm_head", "")))
    merged = plan.merge(["norm", "lm_head"])
    assert merged.unit_names == ("norm, lm_head", "")
    assert merged.units[0].reshard_after_forward is False


def test_changed_settings_are_checked():
    assert BLOCKS.change(["layers.*"], offload="cpu").unit("layers.*").offload == "cpu"
    with pytest.raises(PlanError, match=r"offload is 'disk'. Expected 'none', 'cpu'"):
        BLOCKS.change(["layers.*"], offload="disk")


def test_parameters_belong_to_the_innermost_unit():
    owned = owned_parameters(
        units("", "layers.0", "layers.0.ffn"), ["w", "layers.0.n.w", "layers.0.ffn.w1.w"]
    )
    assert owned == {"": ["w"], "layers.0": ["layers.0.n.w"], "layers.0.ffn": ["layers.0.ffn.w1.w"]}


def test_a_block_split_without_its_norms_is_a_risk():
    shapes = {"layers.0.ffn.w": (8, 8), "layers.0.ffn_norm.w": (8,), "norm.w": (8, 8)}
    (risk,) = Plan(units=units("", "layers.0", "layers.0.ffn")).find_risks(shapes)
    assert "'layers.0' holds only vectors ('layers.0.ffn_norm.w')" in risk
    good = Plan(units=units("", "layers.0.ffn_norm, layers.0.ffn"))
    assert good.find_risks(shapes) == []


def test_a_merged_unit_whose_first_input_needs_no_gradient_is_a_risk():
    shapes = {"tok_embeddings.w": (8, 8), "layers.0.w": (8, 8)}
    plan = Plan(units=units("tok_embeddings, layers.0"))
    (risk,) = plan.find_risks(shapes, inputs_without_gradient={"tok_embeddings"})
    assert "begins with 'tok_embeddings', whose input needs no gradient" in risk
    assert plan.find_risks(shapes) == []


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"units": []}, "A plan has no units"),
        ({"units": [{"modules": []}]}, "A unit has no modules"),
        ({"units": [{"modules": ["a b"]}]}, "Invalid module name 'a b'"),
        ({"units": [{"modules": ["a", "a"]}]}, "names a module twice"),
        ({"units": [{"modules": ["a", ""]}]}, "groups the model itself with its parts"),
        ({"units": [{"modules": ["a", "a.b"]}]}, "groups 'a' with its submodule 'a.b'"),
        ({"units": [{"modules": ["a.*", "b"]}]}, "patterns with different numbers of stars"),
        ({"units": [{"modules": ["a"]}, {"modules": ["a"]}]}, "Module 'a' is in two units"),
        ({"units": [{"modules": ["a"], "reshard": 1}]}, "no key 'reshard'.*reshard_after_forward"),
        ({"unit": []}, "There is no key 'unit'. Nearest: 'units'"),
        ({"version": 2}, "Unsupported plan version 2. Expected a version up to 1. Update"),
        (
            {"units": [{"modules": ["a"], "mesh": {"shard": 3}}], "world_size": 4},
            "mesh of 3 ranks does not fit a world size of 4",
        ),
        (
            {"units": [{"modules": ["a"]}], "mesh": {"shard": 3}, "world_size": 4},
            "mesh of 3 ranks does not fit a world size of 4",
        ),
        (
            {"units": [{"modules": ["a"], "reshard_after_forward": 3}], "mesh": {"shard": 8}},
            "divisor of the 8 ranks that shard: 2, 4, 8",
        ),
        ({"units": [{"modules": ["a"], "reshard_after_forward": "on"}]}, "is 'on'. Expected true"),
        ({"units": [{"modules": ["a"]}], "forward_prefetch": -1}, "A prefetch is -1. Expected"),
    ],
)
def test_what_cannot_be_a_plan_is_refused(fields, complaint):
    with pytest.raises(PlanError, match=complaint):
        Plan.from_dict(fields)


def test_groups_that_keep_a_copy_divide_the_ranks_that_shard_where_the_plan_does_not_tell_them():
    plan = Plan(units=units("a", reshard_after_forward=3))
    check_reshard_sizes(plan, 6)
    with pytest.raises(PlanError, match=r"is 3, and 8 ranks shard.* a divisor of 8: 2, 4, 8"):
        check_reshard_sizes(plan, 8)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(
        PlanError, match=r"The plan .*plan.toml' cannot be read: .*Name an existing"
    ):
        Plan.load(tmp_path / "plan.toml")


def test_a_broken_plan_file_is_named_with_the_place(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("version = 1\nunits = ]")
    with pytest.raises(PlanError, match=r"plan.toml' is invalid. Invalid TOML: .*line 2"):
        Plan.load(path)


segments = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["layers", "ffn", "a-b", "_x"]))
names = st.lists(segments, min_size=1, max_size=3).map(".".join)
dtypes = st.sampled_from([None, "float32", "bfloat16"])


@st.composite
def settings_of_a_unit(draw: st.DrawFn) -> dict[str, object]:
    values = {
        "reshard_after_forward": st.sampled_from([None, True, False, 1, 2]),
        "reshard_after_backward": st.booleans(),
        "unshard_async_op": st.booleans(),
        "reduce_scatter_max_input_buffers": st.integers(1, 2),
        "param_dtype": dtypes,
        "reduce_dtype": dtypes,
        "offload": st.sampled_from(["none", "cpu", "cpu_pinned"]),
    }
    return {name: draw(value) for name, value in values.items() if draw(st.booleans())}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with complete or partial runs of numbered blocks and common settings."""
    kinds = draw(st.lists(settings_of_a_unit(), min_size=1, max_size=2))
    groups: list[tuple[str, ...]] = [(name,) for name in draw(st.lists(names, max_size=4))]
    for stem in draw(st.lists(st.sampled_from(["layers", "encoder.layers", "b"]), max_size=2)):
        first, count = draw(st.integers(0, 11)), draw(st.integers(1, 5))
        parts = draw(st.sampled_from([[("",)], [(".n1", ".a"), (".n2", ".f")], [(".a",), (".f",)]]))
        groups += [
            tuple(f"{stem}.{number}{part}" for part in group)
            for number in range(first, first + count)
            for group in parts
        ]
    chosen: list[UnitPlan] = []
    taken: set[str] = set()
    for group in groups:
        if not taken & set(group) and len(set(group)) == len(group):
            taken |= set(group)
            chosen.append(UnitPlan(modules=group, **draw(st.sampled_from(kinds))))
    names_of_units = [unit.name for unit in chosen]
    prefetch = st.one_of(
        st.integers(0, 3),
        st.dictionaries(
            st.sampled_from(names_of_units or ["root"]),
            st.lists(st.sampled_from(names_of_units or ["root"]), max_size=2).map(tuple),
            max_size=2,
        ),
    )
    return Plan(
        units=(*chosen, UnitPlan(modules=("",))),
        world_size=draw(st.sampled_from([None, 4])),
        mesh=draw(st.sampled_from([{}, {"shard": 4}, {"replicate": 2, "shard": 2}])),
        forward_prefetch=draw(prefetch),
        backward_prefetch=draw(prefetch),
        accumulation=draw(st.sampled_from([Accumulation(), Accumulation(microbatches=2)])),
        checkpointing=Checkpointing(full=tuple(sorted(taken))[:3], selective=("x.0", "x.1")),
        notes=tuple(draw(st.lists(st.text(max_size=5), max_size=1))),
    )


@given(plans())
def test_a_plan_written_and_read_is_the_same_plan(plan):
    assert Plan.from_toml(plan.to_toml()) == plan


@given(plans())
def test_a_plan_as_plain_values_is_the_same_plan(plan):
    assert Plan.from_dict(plan.to_dict()) == plan


@given(plans())
def test_reading_distinguishes_true_from_one(plan):
    read = Plan.from_toml(plan.to_toml())
    for before, after in zip(plan.units, read.units, strict=True):
        assert [type(getattr(before, name)) for name in SETTINGS] == [
            type(getattr(after, name)) for name in SETTINGS
        ]


def test_a_plan_file_replaces_the_old_one_as_a_whole(tmp_path):
    path = tmp_path / "new" / "plan.toml"
    BLOCKS.dump(path)
    BLOCKS.change(["layers.*"], offload="cpu").dump(path)
    assert Plan.load(path).unit("layers.*").offload == "cpu"
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.toml"]


def test_the_part_of_a_plan_within_a_module_has_names_relative_to_it():
    plan = Plan(
        units=[
            {"modules": ["actor"]},
            {"modules": ["actor.layers.0"]},
            {"modules": ["actor.norm", "actor.head"]},
            {"modules": ["actors"]},
        ],
        forward_prefetch={"actor.layers.0": ("actor.norm, actor.head",), "actors": ("actor",)},
        checkpointing={"full": ["actor.layers.0", "actors.layers.0"]},
    )
    part = plan.within("actor")
    assert part.unit_names == ("", "layers.0", "norm, head")
    assert part.forward_prefetch == {"layers.0": ("norm, head",)}
    assert part.checkpointing.full == ("layers.0",)
    assert plan.within("") == plan


def test_a_module_without_units_has_no_part_of_the_plan():
    with pytest.raises(PlanError, match="The plan has no unit in the module 'critic'"):
        Plan(units=[{"modules": ["actor"]}]).within("critic")


FSDP1 = Plan(
    units=units("", "layers.0", reshard_after_forward=None),
    forward_prefetch=1,
    fsdp1=Fsdp1Settings(backward_prefetch="BACKWARD_POST", limit_all_gathers=False),
)


def test_a_plan_of_fsdp1_is_written_and_read():
    text = FSDP1.to_toml()
    assert "[fsdp1]" in text
    assert "fully_shard" not in text
    assert Plan.from_toml(text) == FSDP1 == Plan.from_dict(FSDP1.to_dict())


def test_a_plan_of_fsdp2_has_no_key_that_older_versions_reject():
    assert "fsdp1" not in Plan(units=units("")).to_dict()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"units": units("layers.0, layers.1")}, "wraps one module"),
        (
            {"units": units("layers.0", unshard_async_op=True)},
            "unshard_async_op of unit",
        ),
        ({"units": units("", reshard_after_forward=True)}, "FSDP1 keeps the root"),
        ({"units": units("layers.0", reshard_after_forward=2)}, "a part of the ranks"),
        ({"forward_prefetch": 2}, "Expected 0 or 1"),
        ({"backward_prefetch": 1}, r"backward_prefetch in \[fsdp1\]"),
        ({"accumulation": Accumulation(microbatches=2, sync="all_reduce_last")}, "replicas"),
    ],
)
def test_a_plan_of_fsdp1_has_only_settings_of_fsdp1(changes: dict[str, object], complaint: str):
    with pytest.raises(PlanError, match=complaint):
        FSDP1.with_values(**changes)
