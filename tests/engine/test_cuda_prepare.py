"""What a model launches on a CUDA device is what was compiled while it loaded: by name, without the arithmetic.

The real model runs over the real CupyOps; a stand-in for CuPy allocates in host memory and launches nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import model_files
from cupy_stand_in import OF_CUPY, stand_in
from expertstream_engine import BUNDLED_MODEL, open_model, session
from expertstream_engine.architecture import FAMILIES

PROMPTS = [[1], [1, 2], list(range(1, 40))]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    with stand_in(monkeypatch) as fake:
        yield fake


@pytest.fixture
def cupy_ops(cupy: MagicMock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, for arrays of numpy's."""
    module = importlib.import_module(OF_CUPY[-1])
    monkeypatch.setattr(module, "_address", lambda array: int(array.ctypes.data))
    return module


def compiled_and_launched(cupy_ops: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Names of the kernels that loading asked for, and of those that prompts and decoding did."""
    asked: set[str] = set()

    class Named(cupy_ops.Kernels):  # type: ignore[misc, name-defined]  # a class of a module that is imported late
        def _kernel(self, file: str, name: str) -> object:
            asked.add(name)
            return object()

    class OnTheHost(cupy_ops.CupyOps):  # type: ignore[misc, name-defined]  # as above
        def __init__(self) -> None:
            super().__init__(0)
            self._kernels = Named()

        held_bytes = 0
        stream = 0

        def _new(self, shape: tuple[int, ...], kind: type[Any]) -> Any:
            return np.zeros(shape, kind)

        def _copy_in(self, address: int, host: Any) -> None:
            return None

        def _launch(self, *arguments: object) -> None:
            return None

        def place(self, data: Any) -> Any:
            return data

        def to_host(self, x: Any) -> Any:
            return np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)

        def top_k(self, logits: Any, k: int, normalize: bool) -> tuple[Any, Any]:
            super().top_k(logits, k, normalize)
            random = np.random.default_rng(1)
            tokens, experts = logits.shape
            ids = np.stack([random.permutation(experts)[:k] for _ in range(tokens)])
            return ids.astype(np.int64), np.full((tokens, k), 1 / k, np.float32)

        def repeated(self, key: Hashable, work: Callable[[], Any]) -> Any:
            return work()

    class Answers:
        def room(self, count: int) -> tuple[Any, Any]:
            return np.zeros(count, np.int64), np.zeros(count, np.float32)

    monkeypatch.setattr(cupy_ops, "_Answers", Answers)
    monkeypatch.setattr(session, "ops_for", lambda view, threads, reserved_bytes: OnTheHost())
    with open_model(path, expert_memory="50%") as model:
        compiled = set(asked)
        asked.clear()
        for prompt in PROMPTS:
            for _ in model.generate(prompt, 6, ignore_eos=True):
                pass
            model.logits(prompt, all_positions=True)
    return compiled, asked


@pytest.mark.parametrize("file", ["bundled", "q8_0", "sparse", *sorted(FAMILIES)])
def test_what_is_launched_is_what_was_compiled_while_it_loaded(
    cupy_ops: Any, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == "sparse":
        path = model_files.write_sparse(tmp_path / "sparse.gguf", blocks=2)
    elif file in FAMILIES:
        path = model_files.write_random(file, tmp_path / "random.gguf")
    else:
        path = {"bundled": BUNDLED_MODEL, "q8_0": model_files.TINY_Q8_0}[file]
    compiled, launched = compiled_and_launched(cupy_ops, path, monkeypatch)
    assert launched == compiled
    assert {name.partition("<")[0] for name in launched} >= {
        "attention",
        "embed",
        "multiply",
        "gate_up",
        "down",
        "top_k",
    }


def test_kernels_without_parameters_are_one_module(cupy: MagicMock, cupy_ops: Any) -> None:
    cupy.cuda.Device.return_value.compute_capability = "90"
    kernels = cupy_ops.Kernels()
    for name in ("add", "top_k", "add"):
        kernels.layer(name)
    kernels.attention(64)
    kernels.attention(64)
    templates = [call.kwargs["name_expressions"] for call in cupy.RawModule.call_args_list]
    assert templates == [None, ("attention<64>",)]
