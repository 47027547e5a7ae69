"""What can go wrong, and whose fault it is.

* ExpertstreamError
  x ConfigError              the user asked for something that cannot be
    * BackendNotFound        the configuration names no installed backend
    * BudgetTooSmall         less memory asked for than one step needs
    * DoesNotFit             more memory asked for than the machine has
    * ContextOverflow        more tokens than the context holds
  x CheckpointError          the file is not what it should be
    * UnsupportedCheckpoint  whole, but of a kind that this version cannot stream
  x ReadFailed               the storage did not deliver bytes that the file has
  x MachineError             this machine cannot do it now
    * BackendUnavailable     installed, but this machine cannot run it
    * DeviceOutOfMemory      (also a MemoryError)
    * CommitFailed           the bytes never reached the device; the slot is empty
  x BackendContractError     a backend broke a rule of `expertstream.hookspecs`
  x UsageError               the caller broke a rule of this library
    * StoreClosed            used after `close`
"""


class ExpertstreamError(Exception):
    """Base of every error raised here on purpose."""


class ConfigError(ExpertstreamError):
    """The user asked for something that cannot be."""


class BackendNotFound(ConfigError):
    """The configuration names no installed backend."""


class BudgetTooSmall(ConfigError):
    """Less expert memory was asked for than one step needs; `smallest_bytes` would do."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class DoesNotFit(ConfigError):
    """More memory is needed than the machine has; the message shows the sum."""


class ContextOverflow(ConfigError):
    """Prompt and answer together need more positions than the context holds."""


class CheckpointError(ExpertstreamError):
    """A checkpoint file is missing, damaged or not what it says; the message names file, tensor and offset."""


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint is whole, but of a kind that this version cannot stream."""


class ReadFailed(ExpertstreamError):
    """The storage did not deliver bytes that the file has; the message names path, offset and length."""


class MachineError(ExpertstreamError):
    """This machine cannot do what was asked of it now."""


class BackendUnavailable(MachineError):
    """The backend is installed, but this machine cannot run it."""


class DeviceOutOfMemory(MachineError, MemoryError):
    """The memory that slots live in cannot hold what was asked of it."""


class CommitFailed(MachineError):
    """The staged bytes never reached the device; the slot is empty again."""


class BackendContractError(ExpertstreamError):
    """A backend broke a rule of `expertstream.hookspecs`."""


class UsageError(ExpertstreamError):
    """The caller broke a rule of this library."""


class StoreClosed(UsageError):
    """A store or streamer was used after `close`."""
