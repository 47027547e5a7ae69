"""Decode speed with all experts in slots, against llama.cpp on the same file with as many threads.

usage: python bench/decode.py MODEL [--tokens 48] [--prompt-tokens 32] [--threads 2] [--rounds 5] [--json]

Needs the `bench` extra. Both arms run greedy from the same prompt ids, each in a fresh process, in turn; a process
loads, takes the prompt, and times the passes after the first token. llama.cpp runs with its defaults (F16 KV cache,
repacked weights). The ratio is ours to theirs, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    arguments = _arguments()
    if arguments.arm:
        run = {"expertstream": _expertstream, "llama.cpp": _llama_cpp}[arguments.arm]
        print(json.dumps(run(arguments)))
        return
    speeds: dict[str, list[dict[str, float]]] = {"expertstream": [], "llama.cpp": []}
    for number in range(arguments.rounds + 1):
        for arm, found in speeds.items():
            answer = subprocess.run([sys.executable, *sys.argv, "--arm", arm], check=True, stdout=subprocess.PIPE)
            if number:  # the first round warms the kernels' cache and the page cache
                found.append(json.loads(answer.stdout.splitlines()[-1]))
    ours, theirs = speeds["expertstream"], speeds["llama.cpp"]
    result: dict[str, object] = {
        "model": arguments.model.name,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
    }
    for phase in ("prefill", "decode"):
        ratios = [our[phase] / their[phase] for our, their in zip(ours, theirs, strict=True)]
        result[phase] = {
            "expertstream_tokens_per_s": statistics.median(run[phase] for run in ours),
            "llama_cpp_tokens_per_s": statistics.median(run[phase] for run in theirs),
            "ratio_median": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
        }
    if arguments.json:
        print(json.dumps(result))
        return
    for phase in ("prefill", "decode"):
        figures = result[phase]
        assert isinstance(figures, dict)
        print(
            f"{phase}: {figures['expertstream_tokens_per_s']:.2f} tokens/s, llama.cpp"
            f" {figures['llama_cpp_tokens_per_s']:.2f}; ratio {figures['ratio_median']:.3f}"
            f" ({figures['ratio_lowest']:.3f} to {figures['ratio_highest']:.3f})"
        )


def _prompt(arguments: argparse.Namespace) -> list[int]:
    return [17 + 31 * place % 251 for place in range(arguments.prompt_tokens)]


def _expertstream(arguments: argparse.Namespace) -> dict[str, float]:
    from expertstream_engine import open_model

    context = arguments.prompt_tokens + arguments.tokens + 8
    with open_model(
        arguments.model, expert_memory="all", threads=arguments.threads, context=context, io_mode="buffered"
    ) as model:
        for _ in range(2):  # the first generation brings the experts in
            generation = model.generate(_prompt(arguments), arguments.tokens, ignore_eos=True)
            for _ in generation:
                pass
        report = generation.report
        assert report.decode.misses == 0, "every expert that decode needs must be in its slot"
        return {
            "prefill": arguments.prompt_tokens / report.prefill_seconds,
            "decode": report.decode_tokens_per_second or 0.0,
        }


def _llama_cpp(arguments: argparse.Namespace) -> dict[str, float]:
    import ctypes

    import llama_cpp
    import numpy as np

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    model_options = llama_cpp.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(arguments.model), model_options)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = 512 if arguments.prompt_tokens + arguments.tokens < 512 else 4096
    options.n_threads = options.n_threads_batch = arguments.threads
    context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def evaluate(tokens: list[int]) -> int:
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama_decode failed")
        logits = ctypes.cast(llama_cpp.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float * vocabulary))
        return int(np.frombuffer(logits.contents, np.float32).argmax())

    for _ in range(2):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began = time.perf_counter()
        token = evaluate(_prompt(arguments))
        prefill_s, began = time.perf_counter() - began, time.perf_counter()
        for _ in range(arguments.tokens - 1):
            token = evaluate([token])
        decode_s = time.perf_counter() - began
    return {"prefill": arguments.prompt_tokens / prefill_s, "decode": (arguments.tokens - 1) / decode_s}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", choices=("expertstream", "llama.cpp"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
