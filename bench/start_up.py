"""How long it takes to begin: indexing a large header, and the bundled model's first token from a fresh process.

usage: python bench/start_up.py [--rounds 7] [--json]

The header has 1,000 tensors and a vocabulary of 150,000 tokens with scores, types and merges. The first token is the
wall time of `expertstream run -n 1` on the bundled model, once with an empty kernel cache and then with a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from expertstream import open_checkpoint

LAYERS, TENSORS_OF_A_LAYER, VOCABULARY = 40, 25, 150_000


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        header = _write_header(Path(folder) / "header.gguf")
        environment = os.environ | {"NUMBA_CACHE_DIR": str(Path(folder) / "kernels")}
        command = [
            str(Path(sys.executable).with_name("expertstream")),
            "run",
            "-n",
            "1",
            "--prompt",
            "In the beginning",
        ]

        def first_token() -> None:
            subprocess.run(command, env=environment, check=True, capture_output=True)

        cold_s = _seconds(first_token)
        figures = {
            "index_1000_tensors_s": [_seconds(lambda: open_checkpoint(header)) for _ in range(arguments.rounds)],
            "first_token_s": [_seconds(first_token) for _ in range(arguments.rounds)],
        }
    result: dict[str, object] = {"first_token_with_an_empty_kernel_cache_s": round(cold_s, 3)}
    for name, values in figures.items():
        result[name] = {
            "median": round(statistics.median(values), 3),
            "lowest": round(min(values), 3),
            "highest": round(max(values), 3),
        }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(name, value)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _write_header(path: Path) -> Path:
    """A checkpoint whose tensors are small, because only their number counts."""
    writer = gguf.GGUFWriter(str(path), "bench")
    writer.add_block_count(LAYERS)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    tokens = [f"token{number}" for number in range(VOCABULARY)]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges([f"to ken{number}" for number in range(VOCABULARY)])
    for layer in range(LAYERS):
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.zeros((4, 32, 32), np.float32))
        for number in range(TENSORS_OF_A_LAYER - 3):
            writer.add_tensor(f"blk.{layer}.resident_{number}.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
