"""Which tensors are routed experts, and what is refused when they do not fit together."""

import re

import pytest

from checkpoint_files import Tensor, nbytes_of, resident, write_checkpoint
from expertstream.checkpoint import open_checkpoint
from expertstream.errors import CheckpointError, UnsupportedCheckpoint

PLAIN = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}


def refusal(path: object, error: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert type(caught.value) is error
    return str(caught.value)


def routed(name: str, columns: int, rows: int, experts: int = 8, type_name: str = "Q8_0") -> Tensor:
    return Tensor(name, type_name, (columns, rows, experts), bytes(nbytes_of(type_name, experts, rows, columns)))


def test_shared_experts_routers_and_biases_are_resident(tmp_path):
    names = [
        "blk.0.ffn_gate_shexp.weight",
        "blk.0.ffn_up_shexp.weight",
        "blk.0.ffn_down_shexp.weight",
        "blk.0.exp_probs_b.bias",
        "blk.0.ffn_gate_exps.bias",
        "blk.0.ffn_gate_exps.scale",
        "blk.0.ffn_gate_chexps.weight",
        "blk.0.ffn_norm_exps.weight",
        "v.blk.0.ffn_gate_exps.weight",
        "blk.00.ffn_gate_exps.weight",
        "blk.٣.ffn_gate_exps.weight",
        "blk.0.ffn_gate_exps.weight\n",
    ]
    plain = open_checkpoint(write_checkpoint(tmp_path / "P.gguf", [PLAIN, PLAIN]).path)
    more = [resident(name, "F32", 256, 8) for name in names]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf", [PLAIN, PLAIN], more_tensors=more).path)
    assert checkpoint.tensors.keys() == plain.tensors.keys() | set(names)
    assert "blk.0.ffn_gate_inp.weight" in checkpoint.tensors
    assert checkpoint.routed_bytes == plain.routed_bytes
    assert [layer.expert_count for layer in checkpoint.layers] == [8, 8]
    assert checkpoint.resident_bytes == plain.resident_bytes + len(names) * 256 * 8 * 4


def test_dense_first_layers_are_resident(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf", [{}, {}, PLAIN, {}, PLAIN]).path)
    assert [layer.layer for layer in checkpoint.layers] == [2, 4]
    assert "blk.0.ffn_up.weight" in checkpoint.tensors


def test_layers_are_ascending_by_number_whatever_the_file_s_order(tmp_path):
    late = [routed(f"blk.{layer}.ffn_{part}_exps.weight", 256, 256) for layer in (10, 0) for part in PLAIN]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf", [{}, {}, PLAIN, PLAIN], more_tensors=late).path)
    assert [layer.layer for layer in checkpoint.layers] == [0, 2, 3, 10]


def test_parts_come_in_one_order_whatever_the_file_s(tmp_path):
    layers = [{"down": "Q6_K", "up": "Q4_K", "gate": "Q8_0"}, {"down": "Q4_K", "gate_up": "Q8_0"}]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf", layers).path)
    assert [[part.name for part in layer.parts] for layer in checkpoint.layers] == [
        ["gate", "up", "down"],
        ["gate_up", "down"],
    ]


def test_a_single_expert_is_streamed_like_many(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "T.gguf", [PLAIN], expert_count=1, top_k=1).path)
    assert checkpoint.layers[0].expert_count == checkpoint.experts_per_token == 1


@pytest.mark.parametrize("expert_count", [None, 0, 8])
def test_no_routed_tensors_is_said_with_what_was_looked_for(tmp_path, expert_count):
    written = write_checkpoint(tmp_path / "T.gguf", [{}, {}], metadata={"testmoe.expert_count": expert_count})
    message = refusal(written.path, UnsupportedCheckpoint)
    assert "no routed experts found" in message
    assert "blk.N.ffn_gate_exps.weight" in message
    assert f"testmoe.expert_count is {'absent' if expert_count is None else expert_count}" in message


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        (("gate", "up"), ["down"]),
        (("down",), ["gate", "up"]),
        (("gate_up",), ["down"]),
        (("gate", "down"), ["up"]),
        (("gate", "gate_up", "down"), []),
        (("gate", "gate_up"), ["down"]),
    ],
)
def test_an_incomplete_layer_is_named_with_what_is_missing(tmp_path, parts, missing):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN, dict.fromkeys(parts, "Q4_K")])
    message = refusal(written.path)
    assert f"layer 1 has the routed parts {', '.join(sorted(parts))}" in message
    listed = ", ".join(f"blk.1.ffn_{part}_exps.weight" for part in missing)
    assert message.endswith(f"missing: {listed or 'none'}")


@pytest.mark.parametrize("value", [None, 0, 7, 9, True, 8.0, "8", [8, 8]], ids=repr)
def test_an_expert_count_that_contradicts_the_tensors_is_refused(tmp_path, value):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], metadata={"testmoe.expert_count": value})
    assert "testmoe.expert_count is" in refusal(written.path)


@pytest.mark.parametrize("value", [None, 0, 9, "2", [2, 2], True], ids=repr)
def test_experts_per_token_must_be_a_number_from_one_to_the_expert_count(tmp_path, value):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], metadata={"testmoe.expert_used_count": value})
    assert "testmoe.expert_used_count is" in refusal(written.path)


@pytest.mark.parametrize("value", [None, 5, ["testmoe"] * 1000], ids=["absent", "number", "long list"])
def test_an_architecture_that_is_no_name_is_refused_briefly(tmp_path, value):
    written = write_checkpoint(tmp_path / "T.gguf", [PLAIN], metadata={"general.architecture": value})
    message = refusal(written.path)
    assert "general.architecture is" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (routed("blk.0.ffn_up_exps.weight", 256, 224), "(224, 256)"),
        (routed("blk.0.ffn_up_exps.weight", 224, 256), "(256, 224)"),
        (routed("blk.0.ffn_up_exps.weight", 256, 256, experts=7), "holds 7 experts"),
        (Tensor("blk.0.ffn_up_exps.weight", "F32", (256, 8), bytes(8192)), "the shape (8, 256)"),
        (Tensor("blk.0.ffn_up_exps.weight", "F32", (2, 2, 2, 8), bytes(256)), "the shape (8, 2, 2, 2)"),
    ],
    ids=["rows", "columns", "experts", "2-D", "4-D"],
)
def test_parts_of_other_shapes_are_refused(tmp_path, tensor, said):
    written = write_checkpoint(tmp_path / "T.gguf", [{"gate": "Q4_K", "down": "Q4_K"}], more_tensors=[tensor])
    message = refusal(written.path)
    assert re.escape(said) in re.escape(message)
    assert tensor.name in message


def test_a_merged_part_must_be_twice_as_high(tmp_path):
    more = [routed("blk.0.ffn_gate_up_exps.weight", 256, 256)]
    written = write_checkpoint(tmp_path / "T.gguf", [{"down": "Q4_K"}], more_tensors=more)
    assert "must be (512, 256)" in refusal(written.path)
