"""Read and write the state of a tuning session. A session can be resumed from its folder.

`session.json` is replaced after each run. The folder also contains the runs, the plans
(`plan-1.toml`) and their predictions (`plan-1.prediction.json`).
"""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import StoreError
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.store.records import replace_file
from fsdp_inspect.trace.records import Record

SESSION_FILE = "session.json"
SESSION_VERSION = 1
BASELINE = 0
"""The number of the unchanged plan."""


class TriedRun(Record):
    """One finished training of the session."""

    plan: NonNegativeInt
    """From 1; `BASELINE`: the sharding of the user's own command."""
    round: NonNegativeInt
    folder: str | None = None
    """The run folder, relative to the session's folder; None: there is no run."""
    failure: str | None = None
    """The reason why the training failed; None: it succeeded."""
    took_s: float


class TuningSession(Record):
    """The settings and the progress of a session."""

    session_version: int = SESSION_VERSION
    command: list[str]
    """Command of a training, with the placeholders `{plan}`, `{runs}`, `{name}` and `{config}`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of a training, in addition to the user's own."""
    budget: PositiveInt
    """The highest number of plans to run."""
    repeats: PositiveInt
    """Rounds: the number of runs of each plan."""
    memory_limit: int | None = None
    allow_dtypes: bool = False
    num_plans: int | None = None
    """The number of chosen plans; None: not chosen yet."""
    tried: list[TriedRun] = Field(default_factory=list)

    def find(self, plan: int, round_: int) -> TriedRun | None:
        """The training of a plan in a round; None: it has not finished."""
        return next((t for t in self.tried if (t.plan, t.round) == (plan, round_)), None)

    def of_plan(self, plan: int) -> list[TriedRun]:
        """All trainings of a plan."""
        return [tried for tried in self.tried if tried.plan == plan]


def write_session(folder: Path, session: TuningSession) -> None:
    """Write the session file.

    Raises:
        StoreError: The folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = session.model_dump_json(indent=1)
        replace_file(folder / SESSION_FILE, f"{text}\n".encode())
    except OSError as error:
        raise StoreError(
            f"Cannot write the session {str(folder)!r}: {error.strerror or error}. Expected a "
            "writable folder. Choose another --runs-dir."
        ) from error


def read_session(folder: Path) -> TuningSession:
    """Read a session.

    Raises:
        StoreError: The file is missing or invalid.
    """
    path = folder / SESSION_FILE
    try:
        session = TuningSession.model_validate(parse_json(read_regular(path, MAX_JSON_BYTES)))
    except OSError as error:
        raise StoreError(
            f"Tuning session not found at {str(folder)!r}: {error.strerror or error} "
            f"({SESSION_FILE}). Expected the folder that `fsdp-inspect tune` printed. Pass that "
            "folder, or start a new session."
        ) from error
    except (InvalidTextError, ValidationError) as error:
        problem = (
            describe_validation_error(error) if isinstance(error, ValidationError) else f"{error}."
        )
        raise StoreError(
            f"Invalid session {str(path)!r}: {problem} Restore the file, "
            "or start a new session with fsdp-inspect tune."
        ) from error
    if session.session_version > SESSION_VERSION:
        raise StoreError(
            f"The session {str(path)!r} has version {session.session_version}. This fsdp-inspect "
            f"reads up to version {SESSION_VERSION}. Update fsdp-inspect."
        )
    return session


def plan_file(folder: Path, plan: int) -> Path:
    """The path of a plan of a session."""
    return folder / f"plan-{plan}.toml"
