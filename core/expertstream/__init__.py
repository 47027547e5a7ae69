"""Stream expert weights from checkpoint files into slots that a device reads: the public names of the core."""

from expertstream.backends import (
    Backend,
    BackendOffer,
    BackendStatus,
    installed_backends,
    open_backend,
    probe_backends,
)
from expertstream.checkpoint import Checkpoint, ExpertLayer, ExpertPart, TensorInfo, open_checkpoint
from expertstream.config import StreamSettings, load_settings
from expertstream.errors import (
    BackendContractError,
    BackendNotFound,
    BackendUnavailable,
    BudgetTooSmall,
    CheckpointError,
    CommitFailed,
    ConfigError,
    ContextOverflow,
    DeviceOutOfMemory,
    DoesNotFit,
    ExpertstreamError,
    MachineError,
    ReadFailed,
    StoreClosed,
    UnsupportedCheckpoint,
    UsageError,
)
from expertstream.hookspecs import hookimpl
from expertstream.machine import AvailableMemory, available_memory
from expertstream.observers import LogHooks, get_log
from expertstream.planner import Demand, Plan, make_plan
from expertstream.policies import policy_names
from expertstream.resident import load_resident, resident_padding_bytes
from expertstream.size_classes import SizeClass, size_classes
from expertstream.slots import (
    IO_ALIGNMENT_BYTES,
    READY,
    Commit,
    DeviceDescription,
    ExpertKey,
    SlotBudget,
    SlotLayout,
    SlotPart,
    SlotStore,
    Staging,
)
from expertstream.streamer import Counters, ExpertStreamer, Lease
from expertstream.units import MemoryRequest, format_bytes

__all__ = [
    "IO_ALIGNMENT_BYTES",
    "READY",
    "AvailableMemory",
    "Backend",
    "BackendContractError",
    "BackendNotFound",
    "BackendOffer",
    "BackendStatus",
    "BackendUnavailable",
    "BudgetTooSmall",
    "Checkpoint",
    "CheckpointError",
    "Commit",
    "CommitFailed",
    "ConfigError",
    "ContextOverflow",
    "Counters",
    "Demand",
    "DeviceDescription",
    "DeviceOutOfMemory",
    "DoesNotFit",
    "ExpertKey",
    "ExpertLayer",
    "ExpertPart",
    "ExpertStreamer",
    "ExpertstreamError",
    "Lease",
    "LogHooks",
    "MachineError",
    "MemoryRequest",
    "Plan",
    "ReadFailed",
    "SizeClass",
    "SlotBudget",
    "SlotLayout",
    "SlotPart",
    "SlotStore",
    "Staging",
    "StoreClosed",
    "StreamSettings",
    "TensorInfo",
    "UnsupportedCheckpoint",
    "UsageError",
    "available_memory",
    "format_bytes",
    "get_log",
    "hookimpl",
    "installed_backends",
    "load_resident",
    "load_settings",
    "make_plan",
    "open_backend",
    "open_checkpoint",
    "policy_names",
    "probe_backends",
    "resident_padding_bytes",
    "size_classes",
]
