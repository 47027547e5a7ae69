"""What every Ops over host arrays answers alike: its arrays are numpy's, and its work is done when a call returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import numpy as np

from expertstream_engine.ops.protocol import F32, I64, U8, ExpertFfn, T


class HostArrays(ABC):
    """The part of Ops that makes, moves and joins arrays."""

    stream: int | None = None
    held_bytes = 0

    def place(self, data: U8) -> U8:
        return data

    def array(self, host: F32) -> F32:
        return host

    def to_host(self, x: F32) -> F32:
        return x

    def empty(self, *shape: int) -> F32:
        return np.empty(shape, np.float32)

    def zeros(self, *shape: int) -> F32:
        return np.zeros(shape, np.float32)

    def position(self, first: int) -> int:
        return first

    def repeated(self, key: Hashable, work: Callable[[], T]) -> T:
        return work()

    def copy(self, out: F32, x: F32) -> None:
        out[...] = x

    def rows(self, table: F32, first_position: int, count: int) -> F32:
        return table[first_position : first_position + count]

    def add(self, total: F32, addend: F32) -> None:
        total += addend

    def append(self, cache: F32, rows: F32, first_position: int) -> None:
        cache[:, first_position : first_position + len(rows)] = rows.transpose(1, 0, 2)

    def scatter(self, out: F32, places: I64, rows: F32) -> None:
        out[places] = rows

    def add_routed_token(self, total: F32, ffn: ExpertFfn, addresses: I64, x: F32, weights: F32) -> None:
        count = len(addresses)
        zero = np.zeros(count, np.int64)
        rows = self.routed_ffn(ffn, addresses, x, np.arange(count + 1), zero)
        routed = np.zeros_like(total)
        self.add_weighted(routed, rows, zero, weights)
        total += routed

    @abstractmethod
    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32: ...

    @abstractmethod
    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None: ...
