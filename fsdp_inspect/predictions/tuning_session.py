"""What has a tuning session done so far? Its folder, from which it is resumed.

`session.json` is rewritten whole after each run; the runs lie beside it, and so do the plans
(`plan-1.toml`) and what is predicted of them (`plan-1.prediction.json`).
"""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.records import replace_file
from fsdp_inspect.trace.run import Record

SESSION_FILE = "session.json"
SESSION_VERSION = 1
BASELINE = 0
"""The number of the plan that runs before any change."""


class TriedRun(Record):
    """One training that the session started, and that ended."""

    plan: NonNegativeInt
    """From 1; `BASELINE`: as the user's own command shards."""
    round: NonNegativeInt
    folder: str | None = None
    """The run's folder, below the session's; None: it left none."""
    failure: str | None = None
    """Why it did not end well; None: it did."""
    took_s: float


class TuningSession(Record):
    """A session's settings and what it has done."""

    session_version: int = SESSION_VERSION
    command: list[str]
    """Of a training, with `{plan}`, `{runs}`, `{name}` and `{config}` in it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """What a training's environment has beside the user's own."""
    budget: PositiveInt
    """Most plans to run."""
    repeats: PositiveInt
    """Rounds: runs of each plan."""
    memory_limit: int | None = None
    allow_dtypes: bool = False
    num_plans: int | None = None
    """Plans that were chosen; None: not yet."""
    tried: list[TriedRun] = Field(default_factory=list)

    def find(self, plan: int, round_: int) -> TriedRun | None:
        """The training of a plan in a round; None: it is still to be done."""
        return next((t for t in self.tried if (t.plan, t.round) == (plan, round_)), None)

    def of_plan(self, plan: int) -> list[TriedRun]:
        """All trainings of a plan."""
        return [tried for tried in self.tried if tried.plan == plan]


def write_session(folder: Path, session: TuningSession) -> None:
    """Keep a session.

    Raises:
        StoreError: The folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = session.model_dump_json(indent=1)
        replace_file(folder / SESSION_FILE, f"{text}\n".encode())
    except OSError as error:
        raise StoreError(
            f"The session {str(folder)!r} cannot be written: {error.strerror or error}. Expected a "
            "folder that this user may write to. Choose another --runs-dir."
        ) from error


def read_session(folder: Path) -> TuningSession:
    """Read a session.

    Raises:
        StoreError: There is none, or it cannot be used.
    """
    path = folder / SESSION_FILE
    try:
        session = TuningSession.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StoreError(
            f"No tuning session at {str(folder)!r}: {error.strerror or error} ({SESSION_FILE}). "
            "Expected the folder that `fsdp-inspect tune` named. Name that, or begin anew."
        ) from error
    except ValidationError as error:
        raise StoreError(
            f"The session {str(path)!r} cannot be used. {describe_validation_error(error)} Restore "
            "the file, or begin anew with fsdp-inspect tune."
        ) from error
    if session.session_version > SESSION_VERSION:
        raise StoreError(
            f"The session {str(path)!r} has version {session.session_version}. This fsdp-inspect "
            f"reads up to version {SESSION_VERSION}. Update fsdp-inspect."
        )
    return session


def plan_file(folder: Path, plan: int) -> Path:
    """Where a plan of a session lies."""
    return folder / f"plan-{plan}.toml"
