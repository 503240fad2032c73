"""Statements that call `fully_shard` are read with the lines to remove."""

from fsdp_inspect.recording.sharding_calls import read_calls, read_user_statement
from fsdp_inspect.trace.run import ShardingCall, UserStatement


def call(line: int) -> ShardingCall:
    return ShardingCall(function="fully_shard", file="train.py", line=line, units=["a"])


def test_nested_loops_that_only_shard_are_removed_whole():
    text = """\
for model in models:
    for layer in model.layers:
        fully_shard(
            layer,
            mesh=mesh["dp"],
        )
    fully_shard(model, **settings)
done()
"""
    inner, outer = read_calls(text, [call(3), call(7)])
    assert (inner.argument, inner.keywords) == ("layer", {"mesh": 'mesh["dp"]'})
    assert (inner.first_line, inner.end_line) == (3, 6)
    assert (inner.removed_from, inner.removed_to) == (1, 7)
    assert outer.keywords == {"**": "settings"}
    assert (outer.removed_from, outer.removed_to) == (1, 7)
    assert not inner.leaves_block_empty


def test_a_file_that_does_not_parse_leaves_the_calls_unread():
    assert read_calls("def (", [call(1)]) == [call(1)]
    assert read_calls("", [call(1)]) == [call(1)]


def test_the_statement_of_the_user_names_the_model_and_where_it_is_made():
    text = """\
model = build()
model = wrap(model)
optimizer = Adam(model.parameters())
prepared, optimizer = accelerator.prepare(
    model, optimizer
)
"""
    user = read_user_statement(
        text, UserStatement(file="train.py", line=4, end_line=4, model="model")
    )
    assert (user.line, user.end_line, user.made_at) == (4, 6, 2)
    assert user.model_after == "prepared"
