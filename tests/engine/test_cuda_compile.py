"""Every CUDA kernel compiles, by the NVRTC that is installed: no device is needed for that. CuPy is a stand-in here."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cupy_stand_in import OF_CUPY, stand_in
from expertstream_engine.cuda.tiling import Tiling
from expertstream_engine.kernels.registry import SUPPORTED_TYPES

HEAD_SIZES = 64, 80, 128, 256
COLUMNS = 768, 2048, 14336  # few lanes to a row, all of them, and several steps of each
ARCHITECTURES = 75, 90  # the oldest that every NVRTC here knows, and the first whose kernels begin early


def found_nvrtc() -> Path | str | None:
    """Of the packages of this Python, of a CUDA toolkit, or the system's; None where there is none."""
    packages = importlib.util.find_spec("nvidia")
    roots = list(packages.submodule_search_locations or ()) if packages else []
    roots += [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    for root in [*map(Path, roots), *sorted(Path("/usr/local").glob("cuda*"), reverse=True)]:
        for folder in ("cuda_nvrtc/lib", "cu*/lib", "lib64", "lib"):
            for library in sorted(root.glob(f"{folder}/libnvrtc.so*"), reverse=True):
                return library
    return ctypes.util.find_library("nvrtc")


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    found = found_nvrtc()
    if found is None:
        pytest.skip("no kernel was compiled: there is no libnvrtc among Python's packages, CUDA toolkits and libraries")
    return ctypes.CDLL(str(found))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Kernels of the engine, and what they ask CuPy to compile."""
    with stand_in(monkeypatch) as fake:
        module = importlib.import_module(OF_CUPY[1])
        modules: list[dict[str, Any]] = []
        make = fake.RawModule
        make.side_effect = lambda **arguments: modules.append(arguments) or make.return_value
        yield module.Kernels(), modules


def compiled(nvrtc: ctypes.CDLL, modules: list[dict[str, Any]], architecture: int) -> None:
    """Compile modules of one file, all at once, or fail with the compiler's words."""
    code, options = modules[0]["code"], modules[0]["options"]
    assert all((module["code"], module["options"], module["backend"]) == (code, options, "nvrtc") for module in modules)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        for module in modules:
            for name in module["name_expressions"] or ():
                assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
        # What CuPy adds.
        every = [*options, f"-arch=sm_{architecture}", "--device-as-default-execution-space"]
        array = (ctypes.c_char_p * len(every))(*map(str.encode, every))
        status = nvrtc.nvrtcCompileProgram(program, len(every), array)
        assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
        log = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetProgramLog(program, log) == 0
        assert (status, log.value.decode()) == (0, "")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def multiply_and_embed(kernels: Any, type_name: str) -> None:
    kernels.embed(type_name)
    for tokens in (1, 8):
        for columns in COLUMNS:
            kernels.multiply(type_name, Tiling.of(columns, tokens, type_name))


def experts(kernels: Any, type_name: str) -> None:
    for tokens in (1, 8):
        kernels.gate_up(type_name, type_name, Tiling.of(2048, tokens, type_name, type_name))
        kernels.down(type_name, Tiling.of(768, tokens, type_name))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_kernels_compile(nvrtc: ctypes.CDLL, asked: Any, architecture: int) -> None:
    kernels, modules = asked
    kernels.layer("rms_norm")
    for head_size in HEAD_SIZES:
        kernels.attention(head_size)
    compiled(nvrtc, modules, architecture)


@pytest.mark.parametrize("ask", [multiply_and_embed, experts])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_products_of_every_type_compile(
    nvrtc: ctypes.CDLL, asked: Any, type_name: str, ask: Callable[[Any, str], None]
) -> None:
    kernels, modules = asked
    ask(kernels, type_name)
    compiled(nvrtc, modules, ARCHITECTURES[-1])
