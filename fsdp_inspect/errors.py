"""What can go wrong, as one tree of exceptions.

    FsdpInspectError          caught once, in `cli.main`: message on stderr, exit code 1
    +-- RecordingError        the recorder cannot attach or start
    +-- PlanError             a plan cannot be read, or does not fit the model
    +-- ConfigError           a setting of the trainer is impossible
    +-- EmulationError        ranks cannot be emulated here, or not what the script does
    +-- CheckError            what a check is given cannot be read or judged
    +-- ForecastError         what is to be forecast cannot be built, run or followed
    +-- StoreError
    |   +-- NotARunError          the path holds no run
    |   +-- SchemaVersionError    written by a newer version than this one reads
    |   +-- CorruptFileError      a file of the run is damaged or foreign
    |   +-- IncompleteRunError    what was asked needs ranks or steps that are missing
    +-- MissingDataError      the run exists but was recorded without what is asked
    +-- ImportingError        a trace of another tool cannot be read
    +-- ExportError           an export cannot be written, or not as it was asked for
    +-- PredictionError       a prediction or the ledger of predictions cannot be read

Every message has three parts, in this order: what is wrong (with the value), what was expected
or what exists, what to do. Wrong argument values from Python callers stay `ValueError` and
`TypeError`.
"""


class FsdpInspectError(Exception):
    """Base of every error that FSDP Inspect raises on purpose."""


class RecordingError(FsdpInspectError):
    """The recorder cannot attach to this model, or cannot start."""


class PlanError(FsdpInspectError):
    """A plan cannot be read, or names what the model does not have."""


class ConfigError(FsdpInspectError):
    """A setting of the trainer has an impossible value."""


class EmulationError(FsdpInspectError):
    """Ranks cannot be emulated in this process, or not what the script does with them."""


class CheckError(FsdpInspectError):
    """What a check is given cannot be read, or cannot be judged."""


class ForecastError(FsdpInspectError):
    """What is to be forecast cannot be built, run or followed."""


class StoreError(FsdpInspectError):
    """A run folder cannot be read or written."""


class NotARunError(StoreError):
    """The path holds no run."""


class SchemaVersionError(StoreError):
    """The run was written by a newer version than this one reads."""


class CorruptFileError(StoreError):
    """A file of the run is damaged, cut off, or not ours."""


class IncompleteRunError(StoreError):
    """The question needs ranks or steps that the run does not hold."""


class MissingDataError(FsdpInspectError):
    """The run exists but was recorded without what is asked."""


class ExportError(FsdpInspectError):
    """An export cannot be written, or not as it was asked for."""


class ImportingError(FsdpInspectError):
    """A trace of another tool is damaged, hostile, or holds nothing to import."""


class PredictionError(FsdpInspectError):
    """A prediction, or the ledger that is kept of them, cannot be read or written."""
