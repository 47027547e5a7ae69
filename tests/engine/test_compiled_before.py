"""Everything that a generation runs is compiled while the model is loaded, so that no token waits for a compiler."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, because what other tests have compiled already would not be compiled again.
CODE = """
import gc
from numba.core.dispatcher import Dispatcher
from expertstream_engine import open_model

def compiled():
    found = [function for function in gc.get_objects() if isinstance(function, Dispatcher)]
    ours = [function for function in found if function.py_func.__module__.startswith("expertstream")]
    return {f"{function.py_func.__module__}.{function.__name__}": set(function.signatures) for function in ours}

with open_model(expert_memory="25%") as model:
    before = compiled()
    assert before
    for _ in model.generate(list(range(100, 140)), 3, ignore_eos=True):
        pass
    for name, signatures in compiled().items():
        new = signatures - before.get(name, set())
        if new:
            print(name, new)
"""


def test_a_first_generation_compiles_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
