"""Define the record of the code that sharded a model: calls, source lines, framework and launch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class UserStatement(_Record):
    """The statement of the user's code in which a framework called `fully_shard`."""

    file: str
    line: int
    end_line: int
    model: str = ""
    """The variable that holds the model there; empty: unknown."""
    model_after: str = ""
    """The variable to which the statement assigns the sharded model; empty: none."""
    made_at: int = 0
    """The last line of the statement before it that assigns `model`; 0: not found."""


class ShardingCall(_Record):
    """One line that called `fully_shard`, and the units that it made."""

    function: str
    """`fully_shard`, `replicate` or `apply_plan`."""
    file: str
    """The file: relative to the working directory if it is below it, and for a package relative to
    the package."""
    line: int
    units: list[str]
    """The names of the units, in the order of the calls."""
    package: str = ""
    """The package that contains the line; empty: the user's own code."""
    argument: str = ""
    """The first argument as written; empty: the statement could not be read. This also holds for
    the following fields."""
    keywords: dict[str, str] = Field(default_factory=dict)
    """The keyword arguments as written; `**` for an unpacked mapping."""
    first_line: int = 0
    end_line: int = 0
    """The lines of the statement."""
    removed_from: int = 0
    removed_to: int = 0
    """The lines to remove with the call: the statement, or the loop that only shards."""
    leaves_block_empty: bool = False
    """Whether the removed lines are the whole body of a function, `if` or `with`."""
    user: UserStatement | None = None
    """The user's statement around a call in a package."""


class SourceLines(_Record):
    """Consecutive lines of the user's code."""

    file: str
    first_line: int
    lines: list[str]


class TrainingCode(_Record):
    """The code that sharded the recorded models, as far as the recorder saw it."""

    calls: list[ShardingCall] = Field(default_factory=list)
    """The calls in the order of their first call; empty: the models were sharded before the
    recorder was imported, or by an older version."""
    sources: list[SourceLines] = Field(default_factory=list)
    frameworks: list[str] = Field(default_factory=list)
    """The packages around the calls, innermost first: the package that called `fully_shard`, or the
    packages that ran the user's own call."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The sharding settings of the framework."""
    launch: list[str] = Field(default_factory=list)
    """The command that started the ranks; empty: unknown."""
    launched_at: int = 0
    """The number of words of `launch` before the command of one rank; 0: unknown."""
