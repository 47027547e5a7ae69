"""`expertstream inspect`: what a checkpoint holds, read from its header alone, whether or not it can be run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from expertstream_engine.cli.consoles import print_json, print_table, put, starting
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import AsJson, Debug, ModelArgument, model_from

if TYPE_CHECKING:
    from expertstream import Checkpoint


@guarded
def inspect(model: ModelArgument = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show a model's experts: how many, how large, how quantized; what stays resident; and whether it can be run."""
    with starting():
        from expertstream import open_checkpoint

        record = _record(open_checkpoint(model_from(model)))
    if as_json:
        print_json(record)
    else:
        _print(record)


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    from expertstream import size_classes, smallest_expert_memory_bytes
    from expertstream_engine.demand import check_runnable
    from expertstream_engine.tokenizer import load_tokenizer

    classes = size_classes(checkpoint)
    metadata = checkpoint.metadata
    return {
        "files": [str(file) for file in checkpoint.files],
        "name": str(metadata.get("general.name", "")),
        "architecture": str(metadata.get("general.architecture", "")),
        "cannot_run_because": _refusal(lambda: check_runnable(checkpoint)),
        "no_text_because": _refusal(lambda: load_tokenizer(metadata)),
        "expert_count": sum(layer.expert_count for layer in checkpoint.layers),
        "experts_per_token": checkpoint.experts_per_token,
        "routed_bytes": checkpoint.routed_bytes,
        "resident_bytes": checkpoint.resident_bytes,
        "smallest_expert_memory_bytes": smallest_expert_memory_bytes(checkpoint),
        "layers": [
            {
                "layer": layer.layer,
                "expert_count": layer.expert_count,
                "expert_bytes": layer.expert_bytes,
                "quantization": {part.name: part.type_name for part in layer.parts},
            }
            for layer in checkpoint.layers
        ],
        "size_classes": [
            {
                "layers": list(size_class.layers),
                "expert_count": size_class.expert_count,
                "expert_bytes": size_class.expert_bytes,
                "slot_bytes": size_class.layout.slot_bytes,
            }
            for size_class in classes
        ],
    }


def _refusal(attempt: Callable[[], object]) -> str | None:
    """Why the checkpoint does not allow it, None if it does."""
    from expertstream import CheckpointError

    try:
        attempt()
    except CheckpointError as error:
        return str(error)
    return None


def _print(record: dict[str, Any]) -> None:
    runs, text = record["cannot_run_because"], record["no_text_because"]
    print_table(
        ("", ""),
        [
            ("file", record["files"][0]),
            *([("files", str(len(record["files"])))] if len(record["files"]) > 1 else []),
            ("name", record["name"]),
            ("architecture", record["architecture"]),
            ("runs", f"no: {runs}" if runs else "yes"),
            ("text", f"no: {text}" if text else "yes"),
            ("routed experts", f"{record['expert_count']} in {len(record['layers'])} layers"),
            ("used by a token", f"{record['experts_per_token']} a layer"),
            ("routed bytes", _amount(record["routed_bytes"])),
            ("resident bytes", _amount(record["resident_bytes"])),
            ("smallest expert memory", _amount(record["smallest_expert_memory_bytes"])),
        ],
    )
    put("\n")
    alike = groupby(
        record["layers"], key=lambda layer: (layer["quantization"], layer["expert_count"], layer["expert_bytes"])
    )
    print_table(
        ("layers", "experts a layer", "one expert", "quantization"),
        [
            (
                _ranges([layer["layer"] for layer in layers]),
                str(count),
                _amount(size),
                ", ".join(f"{part} {kind}" for part, kind in kinds.items()),
            )
            for (kinds, count, size), layers in alike
        ],
    )
    put("\n")
    print_table(
        ("size class of layers", "experts", "one slot"),
        [
            (_ranges(group["layers"]), str(group["expert_count"]), _amount(group["slot_bytes"]))
            for group in record["size_classes"]
        ],
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs joined: "0-2, 5"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _amount(size_bytes: int) -> str:
    from expertstream import format_bytes

    return format_bytes(size_bytes)
