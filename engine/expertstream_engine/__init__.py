"""Run Mixture-of-Experts models whose experts are streamed: the Python API.

Names are imported when they are first used, so that the command line need not wait for what it does not use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes time to import, during which an interrupt would be a traceback
if TYPE_CHECKING:
    from expertstream_engine.report import DeviceMemory, GenerationReport
    from expertstream_engine.sampling import LogitsNotFinite, SamplingSettings
    from expertstream_engine.session import BUNDLED_MODEL, Generation, Model, open_model
    from expertstream_engine.settings import RunSettings

__all__ = [
    "BUNDLED_MODEL",
    "DeviceMemory",
    "Generation",
    "GenerationReport",
    "LogitsNotFinite",
    "Model",
    "RunSettings",
    "SamplingSettings",
    "open_model",
]

_MODULES = {
    "DeviceMemory": "report",
    "GenerationReport": "report",
    "LogitsNotFinite": "sampling",
    "RunSettings": "settings",
    "SamplingSettings": "sampling",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'session')}"), name)
