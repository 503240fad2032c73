"""The tree of exceptions that FSDP Inspect raises.

    FsdpInspectError          caught once, in `cli.main`: message on stderr, exit code 1
    +-- RecordingError        the recorder cannot attach or start
    +-- PlanError             a plan cannot be read, or does not fit the model
    +-- ConfigError           a setting of the trainer is invalid
    +-- EmulationError        ranks cannot be emulated, or the script does something unsupported
    +-- CheckError            the input of a check cannot be read or judged
    +-- ForecastError         the target of a forecast cannot be built, run or tracked
    +-- StoreError
    |   +-- NotARunError          the path holds no run
    |   +-- SchemaVersionError    written by a newer version than this one reads
    |   +-- CorruptFileError      a file of the run is damaged or has another format
    |   +-- UnreadableFileError   a file exists but cannot be read, or a URL cannot be reached
    |   +-- IncompleteRunError    the analysis needs ranks or steps that are missing
    +-- MissingDataError      the run does not contain the data that the analysis needs
    +-- ImportingError        a trace of another tool cannot be read
    +-- ExportError           an export cannot be written, or not in the requested form
    +-- CatalogError          a catalog of runs is missing, damaged, or cannot be written
    +-- QueryError            a query of the catalog is invalid, forbidden or too large
    +-- ClusterError          a Dask cluster cannot be used, or lost tasks
    +-- PredictionError       a prediction or the prediction history cannot be read

Every message has three parts, in this order: what is wrong (with the value), what is expected or
what exists, what to do. Invalid argument values from Python callers stay `ValueError` and
`TypeError`.
"""


class FsdpInspectError(Exception):
    """Base of every error that FSDP Inspect raises on purpose."""


class RecordingError(FsdpInspectError):
    """The recorder cannot attach to this model, or cannot start."""


class DesyncError(FsdpInspectError):
    """The ranks issued different collectives: `Recorder(on_desync="raise")` stops the training."""


class PlanError(FsdpInspectError):
    """A plan cannot be read, or does not fit the model."""


class ConfigError(FsdpInspectError):
    """A setting of the trainer has an invalid value."""


class EmulationError(FsdpInspectError):
    """Ranks cannot be emulated in this process, or the script does something unsupported."""


class CheckError(FsdpInspectError):
    """The input of a check cannot be read or judged."""


class ForecastError(FsdpInspectError):
    """The target of a forecast cannot be built, run or tracked."""


class StoreError(FsdpInspectError):
    """A run folder cannot be read or written."""


class NotARunError(StoreError):
    """The path holds no run."""


class SchemaVersionError(StoreError):
    """The run was written by a newer version than this one reads."""


class CorruptFileError(StoreError):
    """A file of the run is damaged or truncated, or has another format."""


class UnreadableFileError(StoreError):
    """A file of the run exists but cannot be read, or its URL cannot be reached."""


class IncompleteRunError(StoreError):
    """The analysis needs ranks or steps that the run does not contain."""


class MissingDataError(FsdpInspectError):
    """The run does not contain the data that the analysis needs."""


class ExportError(FsdpInspectError):
    """An export cannot be written, or not in the requested form."""


class ImportingError(FsdpInspectError):
    """A trace of another tool is damaged, hostile, or holds nothing to import."""


class PredictionError(FsdpInspectError):
    """A prediction or the prediction history cannot be read or written."""


class CatalogError(FsdpInspectError):
    """A catalog of runs is missing, damaged, or cannot be written."""


class QueryError(FsdpInspectError):
    """A query of the catalog is invalid, forbidden, or takes too much time or memory."""


class ClusterError(FsdpInspectError):
    """A Dask cluster cannot be used, or lost tasks."""
