"""CUDA kernels by name, compiled by NVRTC for the device at hand when first asked for.

CuPy caches what is compiled on disk, by source and device. It owns no memory and launches nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import resources

import cupy

from expertstream_engine.cuda.launching import Kernel
from expertstream_engine.cuda.tiling import Tiling

_EARLY_FROM = 90  # compute capability from which a kernel can begin before the one ahead has ended


class Kernels:
    """Kernels for one device, which is current whenever one is asked for.

    Integers and floats of the arguments are 64 bits wide, so that Python's own can be passed. CUDA is called inside of
    `calls`, which may give its errors another class.
    """

    def __init__(self, calls: AbstractContextManager[None] | None = None) -> None:
        self._calls = calls or nullcontext()
        self._kernels: dict[str, Kernel] = {}
        self._modules: dict[tuple[str, str | None], cupy.RawModule] = {}

    def layer(self, name: str) -> Kernel:
        """A kernel of layer.cu that has no parameters."""
        return self._kernel("layer.cu", name)

    def attention(self, head_size: int) -> Kernel:
        """Attention for heads of that size."""
        return self._kernel("layer.cu", f"attention<{head_size}>")

    def multiply(self, type_name: str, tiling: Tiling) -> Kernel:
        """Products of resident matrices."""
        return self._kernel("products.cu", f"multiply<{type_name}, {_parameters(tiling)}>")

    def embed(self, type_name: str) -> Kernel:
        """Rows of a table as floats."""
        return self._kernel("products.cu", f"embed<{type_name}>")

    def down(self, type_name: str, tiling: Tiling) -> Kernel:
        """The last projection of experts."""
        return self._kernel("products.cu", f"down<{type_name}, {_parameters(tiling)}>")

    def gate_up(self, gate_type: str, up_type: str, tiling: Tiling) -> Kernel:
        """The first two projections of experts, and the gating."""
        return self._kernel("products.cu", f"gate_up<{gate_type}, {up_type}, {_parameters(tiling)}>")

    def _kernel(self, file: str, name: str) -> Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            with self._calls:
                module = self._module(file, name if "<" in name else None)
                is_early = int(cupy.cuda.Device().compute_capability) >= _EARLY_FROM
                kernel = self._kernels[name] = Kernel(module.get_function(name).kernel, is_early)
        return kernel

    def _module(self, file: str, template: str | None) -> cupy.RawModule:
        """All kernels of a file that have no parameters are one module; one with parameters is a module by itself."""
        module = self._modules.get((file, template))
        if module is None:
            module = self._modules[file, template] = cupy.RawModule(
                code=_source(file),
                options=("-std=c++17",),
                backend="nvrtc",
                name_expressions=None if template is None else (template,),
            )
        return module


def _parameters(tiling: Tiling) -> str:
    return f"{tiling.columns}, {tiling.lanes}, {tiling.rows}, {tiling.tokens}"


@cache
def _source(file: str) -> str:
    here = resources.files("expertstream_engine.cuda")
    headers = ["launches.cuh", *(["weights.cuh"] if file == "products.cu" else [])]
    return "".join(here.joinpath(each).read_text() for each in (*headers, file))
