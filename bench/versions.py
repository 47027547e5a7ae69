"""What a measurement was made with: commit, command, machine and versions, for the first line of its output."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def versions(commit: str | None, devices: object) -> dict[str, Any]:
    """`commit` is that of the code where git cannot tell, `devices` what names them; CuPy's where it is loaded."""
    cupy = sys.modules.get("cupy")
    return {
        "commit": commit or _answer("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        "command": sys.argv,
        "devices": devices,
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_of_driver": cupy.cuda.runtime.driverGetVersion() if cupy else None,
        "cupy": cupy.__version__ if cupy else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _answer(*command: str) -> str | None:
    """The first line that a program prints in this folder, None where there is none or it fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
