"""What a layer step costs on a full hit: the compiled step called from Python, and the streamer's whole lease.

usage: python bench/layer_step.py [--slots 8000] [--top-k 8] [--rounds 15] [--json]

The step runs on tables of that many slots, all full. The streamer runs on a small checkpoint written to a temporary
folder, with every expert resident; its figure is acquire and release together. Microseconds a call; a round is 5,000
calls, and rounds of the arms take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from expertstream import (
    Demand,
    ExpertStreamer,
    MemoryRequest,
    available_memory,
    make_plan,
    open_backend,
    open_checkpoint,
    residency,
)
from expertstream.policies import make_policy, policy_names

CALLS = 5000
LAYERS, EXPERTS = 8, 64


def main() -> None:
    arguments = _arguments()
    arms: dict[str, Callable[[], object]] = {
        f"step, {policy}": _compiled_step(policy, arguments.slots, arguments.top_k) for policy in policy_names()
    }
    with tempfile.TemporaryDirectory() as folder, _streamer(Path(folder) / "small.gguf", arguments.top_k) as streamer:
        experts = np.arange(arguments.top_k) * (EXPERTS // arguments.top_k)
        streamer.acquire(LAYERS - 1, experts).release()
        arms["streamer, acquire and release"] = lambda: streamer.acquire(LAYERS - 1, experts, wait=False).release()
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(arguments.rounds):
            for name, call in arms.items():
                times[name].append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
    result = {
        name: {"median_us": statistics.median(values), "lowest_us": min(values), "highest_us": max(values)}
        for name, values in times.items()
    }
    if arguments.json:
        print(json.dumps({"slots": arguments.slots, "top_k": arguments.top_k, "calls": CALLS, "arms": result}))
        return
    print(f"{arguments.slots} slots, top-{arguments.top_k}, {arguments.rounds} rounds of {CALLS} calls, us a call")
    for name, figures in result.items():
        print(
            f"{name:32} median {figures['median_us']:6.2f}   {figures['lowest_us']:.2f} to {figures['highest_us']:.2f}"
        )


def _compiled_step(policy_name: str, slots: int, top_k: int) -> Callable[[], object]:
    layers = -(-slots // 128)
    tables = residency.make_tables(layers, 128, np.array([[0, slots]] * layers, np.int64))
    policy = make_policy(policy_name, layers * 128)
    chosen, found = np.empty(128, np.int64), np.empty(128, np.uint8)
    for layer in range(layers):
        experts = np.arange(min(128, slots - layer * 128))
        residency.lease(tables, policy.ranks, layer, experts, chosen, found)
        for slot in chosen[: experts.size].tolist():
            residency.publish(tables, slot)
        residency.release(tables, chosen[: experts.size])
    assert (tables.state == residency.READABLE).all()
    experts, ones = np.arange(top_k) * 7, np.ones(top_k, np.int64)
    slots_out, found_out = np.empty(top_k, np.int64), np.empty(top_k, np.uint8)
    policy.begin_pass(1)
    return lambda: policy.layer_step(tables, policy.ranks, 3, experts, ones, slots_out, found_out)


def _streamer(path: Path, top_k: int) -> ExpertStreamer:
    writer = gguf.GGUFWriter(str(path), "bench")
    writer.add_block_count(LAYERS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(top_k)
    for layer in range(LAYERS):
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.zeros((EXPERTS, 32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint, backend = open_checkpoint(path), open_backend("cpu")
    nothing_else = Demand(resident_bytes=0, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
    plan = make_plan(checkpoint, nothing_else, MemoryRequest.parse("all"), backend, available_memory())
    return ExpertStreamer(checkpoint, plan, backend)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=8000)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
