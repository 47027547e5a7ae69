"""Text becomes the ids that the model was trained on, and comes back byte for byte."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from expertstream.errors import CheckpointError, UnsupportedCheckpoint, UsageError
from expertstream_engine.tokenizer import Tokenizer, UnsupportedTokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PRE_TOKENIZERS = json.loads((DATA / "vocab" / "pre_tokenizers.json").read_text())
TEXT = st.text(st.characters(codec="utf-8"))
untimed = settings(deadline=None)  # the first example may load a vocabulary


@functools.cache
def file_metadata(name: str) -> dict[str, Any]:
    return {key: value.contents() for key, value in gguf.GGUFReader(DATA / name).fields.items()}


@functools.cache
def file_tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(file_metadata(name))


GPT2, SPM = "vocab/ggml-vocab-gpt-2.gguf", "vocab/ggml-vocab-llama-spm.gguf"


@functools.lru_cache(maxsize=1)
def gpt2_cut_by(pre: str) -> Tokenizer:
    return load_tokenizer(file_metadata(GPT2) | {"tokenizer.ggml.pre": pre})


@pytest.fixture
def log_events() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as events:
        yield events
    structlog.reset_defaults()


def byte_characters() -> dict[int, str]:
    """GPT-2's spelling of a byte, from the tokens 0 to 255 of its published vocabulary: printable bytes first."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    return dict(zip(order, file_metadata(GPT2)["tokenizer.ggml.tokens"][:256], strict=True))


def spelled(text: str) -> str:
    return "".join(byte_characters()[byte] for byte in text.encode())


def byte_level(
    *extra: tuple[str, int], merges: Sequence[str] = ("a b",), pre: str | None = "gpt-2", **keys: object
) -> dict[str, Any]:
    """Metadata of a vocabulary of the 256 bytes, "ab", and `extra` tokens with their types."""
    tokens = [(char, NORMAL) for char in byte_characters().values()] + [("ab", NORMAL), *extra]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": np.array([kind for _, kind in tokens], np.int32),
        "tokenizer.ggml.merges": list(merges),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece(*pieces: tuple[str, float], **keys: object) -> dict[str, Any]:
    """Metadata of a vocabulary of unknown, BOS, EOS, the 256 bytes and `pieces` with their scores."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"]
        + [f"<0x{byte:02X}>" for byte in range(256)]
        + [text for text, _ in pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [score for _, score in pieces],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode() for token in ids]


# The ids of the reference


def reference_cases() -> list[Any]:
    cases = []
    for name in (GPT2, SPM):
        texts = (DATA / f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = (DATA / f"{name}.out").read_text().split("\n")
        cases += [
            pytest.param(name, text, [int(token) for token in line.split()], id=f"{Path(name).stem}-{number}")
            for number, (text, line) in enumerate(zip(texts, lines, strict=True))
        ]
    return cases


@pytest.mark.parametrize(("name", "text", "ids"), reference_cases())
def test_a_text_has_the_ids_of_the_vocabularys_reference_file(name: str, text: str, ids: list[int]) -> None:
    assert file_tokenizer(name).encode(text, add_bos=False) == ids
    assert file_tokenizer(name).decode(ids) == text


def test_the_prompts_of_the_reference_model_have_its_ids() -> None:
    cases = json.loads((DATA / "reference" / "tiny15m-f32.json").read_text())["cases"]
    tokenizer = file_tokenizer("tiny15m-q8_0.gguf")
    assert [tokenizer.encode(case["text"], add_bos=False) for case in cases] == [case["tokens"] for case in cases]
    assert tokenizer.encode(cases[0]["text"]) == [tokenizer.bos_id, *cases[0]["tokens"]]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS["ids"])
def test_a_pre_tokenizer_cuts_as_the_reference_does(pre: str) -> None:
    for text, ids in zip(PRE_TOKENIZERS["texts"], PRE_TOKENIZERS["ids"][pre], strict=True):
        if ids is not None:  # deepseek-llm's file isolates digits, which the reference leaves to a vocabulary without
            assert gpt2_cut_by(pre).encode(text, add_bos=False) == ids, (pre, text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-llm", "123", ["1", "2", "3"]),
        ("deepseek-coder", "12", ["1", "2"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("falcon", "1234", ["123", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("qwen2", "e\u0301x", ["e", "\u0301x"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("qwen2", "!\na", ["!\n", "a"]),
        ("seed-coder", "!\na", ["!", "\n", "a"]),
        ("gpt-4o", "!\n/", ["!\n/"]),
        ("kimi-k2", "!\n/", ["!\n", "/"]),
        ("kimi-k2", "日a", ["日", "a"]),
        ("gpt-4o", "日a", ["日a"]),
        ("gpt-4o", "aBc", ["a", "Bc"]),
        ("gpt-4o", "it's", ["it's"]),
        ("gpt-4o", "e\u0301's", ["e\u0301's"]),
        ("tekken", "it's", ["it", "'s"]),
        ("llama-bpe", "IT'S", ["IT", "'S"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("exaone-moe", "a b", ["a b"]),
        ("bailingmoe", "a b", ["a", " b"]),
    ],
)
def test_a_word_of_the_pre_tokenizer_is_what_merges_stay_within(pre: str, text: str, words: list[str]) -> None:
    characters = spelled(text)
    places = range(len(characters) + 1)
    parts = sorted({characters[a:b] for a in places for b in places if b - a > 1}, key=len)
    # Any two neighbours merge, so that every word becomes one token whatever the order.
    merges = [f"{part[:cut]} {part[cut:]}" for part in parts for cut in range(1, len(part))]
    extra = [(part, NORMAL) for part in parts if part != "ab"]
    tokenizer = load_tokenizer(byte_level(*extra, merges=merges, pre=pre))
    assert texts_of(tokenizer, tokenizer.encode(text, add_bos=False)) == words


def test_a_whole_word_wins_over_merges_only_where_the_pre_tokenizer_says_so() -> None:
    word = ("abc", NORMAL)  # no merge leads there
    assert load_tokenizer(byte_level(word, pre="llama-bpe")).encode("abc") == [257]
    assert load_tokenizer(byte_level(word, pre="dbrx")).encode("abc") == [
        256,
        byte_level()["tokenizer.ggml.tokens"].index("c"),
    ]


PIECES = {
    "a": -3.0,
    "b": -9.0,
    "aa": -1.0,
    "ab": -1.0,
    "aaa": -2.0,
    "ba": -1.0,
    "aab": -0.5,
    "\u2581a": -1.0,
    "bb": -4.0,
}


@untimed
@given(st.text("ab c", max_size=12))
def test_sentencepiece_merges_the_best_scored_pair_and_the_leftmost_of_equals(text: str) -> None:
    pieces = [char.replace(" ", "\u2581") for char in " " + text] if text else []
    while unions := [
        (PIECES[left + right], -place)
        for place, (left, right) in enumerate(itertools.pairwise(pieces))
        if left + right in PIECES
    ]:
        place = -max(unions)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    ids = {piece: [259 + place] for place, piece in enumerate(PIECES)}
    expected = [token for piece in pieces for token in ids.get(piece, [3 + byte for byte in piece.encode()])]
    tokenizer = load_tokenizer(sentencepiece(*PIECES.items()))
    assert tokenizer.encode(text, add_bos=False) == expected


# There and back


@pytest.mark.parametrize("pre", PRE_TOKENIZERS["ids"])
@untimed
@given(text=TEXT)
def test_byte_level_text_survives_the_round_trip(pre: str, text: str) -> None:
    assert gpt2_cut_by(pre).decode(gpt2_cut_by(pre).encode(text)) == text


@untimed
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581")))
def test_sentencepiece_text_survives_the_round_trip(text: str) -> None:
    assert file_tokenizer(SPM).decode(file_tokenizer(SPM).encode(text)) == text


@untimed
@given(data=st.data(), name=st.sampled_from([GPT2, SPM]), continues=st.booleans(), show_control=st.booleans())
def test_a_stream_gives_the_text_of_the_whole_piece_by_piece(
    data: st.DataObject, name: str, continues: bool, show_control: bool
) -> None:
    tokenizer = file_tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300)))
    stream = tokenizer.stream(continues=continues, show_control=show_control)
    streamed = "".join([stream.push(token) for token in ids]) + stream.finish()
    assert streamed == tokenizer.decode(ids, continues=continues, show_control=show_control)
    raw = b"".join(tokenizer.token_bytes(token, show_control=show_control) for token in ids)
    if name == SPM and not continues:
        raw = raw.removeprefix(b" ")
    assert streamed == raw.decode("utf-8", "replace")


@untimed
@given(text=TEXT.filter(lambda text: "\ufffd" not in text), name=st.sampled_from([GPT2, SPM]))
def test_a_stream_never_gives_half_a_character(text: str, name: str) -> None:
    stream = file_tokenizer(name).stream()
    pushed = [stream.push(token) for token in file_tokenizer(name).encode(text)]
    assert not any("\ufffd" in piece for piece in pushed)
    assert stream.finish() == ""


def test_an_unfinished_character_is_told_at_the_end() -> None:
    tokenizer = file_tokenizer(GPT2)
    first, *_ = tokenizer.encode("🙂")
    stream = tokenizer.stream()
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")
    assert stream.push(tokenizer.encode("a")[0]) == "a"


def test_the_space_that_begins_a_continuation_is_kept() -> None:
    tokenizer = file_tokenizer(SPM)
    ids = tokenizer.encode("world", add_bos=False)
    assert tokenizer.decode(ids) == "world"
    assert tokenizer.decode(ids, continues=True) == " world"


def test_a_normal_token_that_is_not_spelled_in_bytes_stands_for_itself() -> None:
    tokenizer = load_tokenizer(byte_level(("日本", NORMAL), ("never used", UNUSED)))
    assert tokenizer.decode([257, 258]) == "日本"


# Special tokens


def test_a_control_token_in_the_text_is_text_unless_asked_for() -> None:
    tokenizer = file_tokenizer(GPT2)
    text = "a<|endoftext|>b"
    assert 50256 not in tokenizer.encode(text)
    assert tokenizer.encode(text, parse_special=True) == [*tokenizer.encode("a"), 50256, *tokenizer.encode("b")]
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == "ab"
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True), show_control=True) == text


def test_no_text_spells_a_control_or_byte_token_by_merging() -> None:
    pieces = [(text, -1.0) for text in ("\u2581", *"</s>0x41", "</", "s>", "<0", "<0x", "<0x4", "<0x41")]
    tokenizer = load_tokenizer(sentencepiece(*pieces))
    assert not {2, 3 + 0x41} & set(tokenizer.encode("</s><0x41>"))
    assert tokenizer.decode(tokenizer.encode("</s><0x41>")) == "</s><0x41>"
    control = load_tokenizer(byte_level(("abc", CONTROL), merges=["a b", "ab c"], pre="llama-bpe"))
    assert 257 not in control.encode("abc")


def test_user_defined_tokens_are_found_before_words_are_cut_and_the_longest_first() -> None:
    tokenizer = load_tokenizer(byte_level((" b", USER_DEFINED), (" b c", USER_DEFINED), ("b c", USER_DEFINED)))
    assert tokenizer.encode("ab b c ab", add_bos=False)[:2] == [256, 258]
    assert tokenizer.decode([256, 258]) == "ab b c"


def test_a_special_token_of_sentencepiece_is_followed_by_the_prefix_space() -> None:
    tokenizer = file_tokenizer(SPM)
    word = tokenizer.encode("a", add_bos=False)
    assert tokenizer.encode("a</s>a", parse_special=True) == [1, *word, 2, *word]
    without = load_tokenizer(file_metadata(SPM) | {"tokenizer.ggml.add_space_prefix": False})
    assert without.encode("a", add_bos=False) == [file_metadata(SPM)["tokenizer.ggml.tokens"].index("a")]


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        (byte_level(bos_token_id=7), False),
        (byte_level(bos_token_id=7, add_bos_token=True), True),
        (byte_level(bos_token_id=7, pre="llama-bpe"), True),
        (byte_level(bos_token_id=7, pre="llama-bpe", add_bos_token=False), False),
        (byte_level(add_bos_token=True), False),
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
    ],
)
def test_bos_comes_first_where_the_file_or_else_its_kind_says_so(metadata: dict[str, Any], begins: bool) -> None:
    tokenizer = load_tokenizer(metadata)
    assert (tokenizer.encode("x") != tokenizer.encode("x", add_bos=False)) == begins
    if tokenizer.bos_id is None:
        with pytest.raises(UsageError, match="BOS"):
            tokenizer.encode("x", add_bos=True)
    else:
        assert tokenizer.encode("x", add_bos=True)[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        (byte_level(), set()),
        (byte_level(eos_token_id=1, eot_token_id=2, eom_token_id=3), {1, 2, 3}),
        (byte_level(("<|im_end|>", CONTROL), ("<|endoftext|>", CONTROL), eos_token_id=257), {257, 258}),
        (byte_level(("<|im_end|>", NORMAL)), set()),
        (byte_level(("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)), {258, 259}),
        (byte_level(("<|end|>", CONTROL)), {257}),
        (sentencepiece(), {2}),
    ],
)
def test_generation_ends_at_what_the_file_names_or_marks_as_an_end(metadata: dict[str, Any], ends: set[int]) -> None:
    assert load_tokenizer(metadata).eos_ids == ends


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    tokenizer = file_tokenizer(GPT2)
    assert tokenizer.vocab_size == 50257
    for token in (-1, 50257):
        with pytest.raises(UsageError, match="0 to 50256"):
            tokenizer.decode([token])
        with pytest.raises(UsageError, match="0 to 50256"):
            tokenizer.token_bytes(token)


def test_a_stream_goes_on_over_ids_that_a_padded_embedding_has_and_the_vocabulary_has_not() -> None:
    tokenizer = file_tokenizer(GPT2)
    first, *rest = tokenizer.encode("🙂")
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (50257, first, 60_000)] == ["", "", ""]
    assert "".join([stream.push(token) for token in rest]) == "🙂"
    assert stream.finish() == ""


@untimed
@given(text=TEXT, name=st.sampled_from([GPT2, SPM]), parse_special=st.booleans())
def test_a_text_has_no_fewer_tokens_than_were_told_beforehand(text: str, name: str, parse_special: bool) -> None:
    tokenizer = file_tokenizer(name)
    for repeated in (text, text * 40, " " * len(text)):
        least = tokenizer.fewest_tokens(repeated)
        assert least <= len(tokenizer.encode(repeated, add_bos=False, parse_special=parse_special))
        assert least > 0 or not repeated


def test_no_number_of_tokens_is_told_beforehand_where_characters_may_vanish() -> None:
    metadata = byte_level() | {"tokenizer.ggml.tokens": ["a", "b", "ab"]}
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = load_tokenizer(metadata)
    assert (tokenizer.fewest_tokens("c" * 100), tokenizer.encode("c" * 100)) == (0, [])


# What is not supported, and what is wrong


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens"),
        (byte_level(pre="unheard-of"), "'unheard-of'"),
        (byte_level(merges=()), "tokenizer.ggml.merges"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_with_the_reason(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=says) as refusal:
        load_tokenizer(metadata)
    assert isinstance(refusal.value, UnsupportedCheckpoint)


def test_a_character_without_bytes_in_a_sentencepiece_vocabulary_is_unknown() -> None:
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["a", "<s>", "?"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
            "tokenizer.ggml.token_type": [NORMAL, CONTROL, UNKNOWN],
            "tokenizer.ggml.unknown_token_id": 2,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert tokenizer.encode("aéa") == [1, 0, 2, 0]
    assert tokenizer.encode("?", parse_special=True) == [1, 2]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (byte_level(("a", NORMAL)), "'a' twice"),
        (byte_level(token_type=[NORMAL]), "token_type has the length 1, .* 257"),
        (byte_level(bos_token_id=257), "bos_token_id is 257.*0 to 256"),
        (byte_level(merges=("ab",)), "'ab'"),
        (byte_level(token_type=[NORMAL] * 256 + [7]), "token_type has 7 for the id 256"),
        (byte_level(token_type=[-1] * 257), "token_type has -1 for the id 0"),
        (sentencepiece(scores=[0.0] * 258 + [float("nan")]), "scores has nan for the id 258"),
        (sentencepiece(scores=None), "no tokenizer.ggml.scores"),
        (byte_level(("<0xG0>", BYTE)), "'<0xG0>' with the id 257"),
        (byte_level(("<0x 1>", BYTE)), "'<0x 1>' with the id 257"),
        (byte_level(("", BYTE)), "'' with the id 257"),
        (sentencepiece(scores=[0.0]), "scores has the length 1, .* 259"),
    ],
)
def test_metadata_that_contradict_themselves_are_refused(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as refusal:
        load_tokenizer(metadata)
    assert not isinstance(refusal.value, UnsupportedTokenizer)


LONG = "x" * 10_000


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        (byte_level, "model", 5, "is 5, and should be a text"),
        (byte_level, "model", ("gpt2",), r"is \('gpt2',\), and should be a text"),
        (byte_level, "pre", np.zeros(2, np.int32), "is array.*, and should be a text"),
        (byte_level, "tokens", "abc", "is 'abc', and should be a list of texts"),
        (byte_level, "tokens", LONG, r"is 'x{30,40}\.\.\.x{30,40}', and should be a list of texts"),
        (byte_level, "tokens", np.arange(257), r"is array\(.*, and should be a list of texts"),
        (byte_level, "tokens", ["a", 3], r"tokens\[1\] is 3, and should be a text"),
        (byte_level, "merges", 1.5, "is 1.5, and should be a list of texts"),
        (byte_level, "merges", ["a b", True], r"merges\[1\] is True, and should be a text"),
        (byte_level, "token_type", "a" * 257, "should be a list of whole numbers"),
        (byte_level, "token_type", ["1"] * 257, "should be a list of whole numbers"),
        (byte_level, "token_type", np.ones(257, np.float32), "should be a list of whole numbers"),
        (byte_level, "token_type", np.ones(257, np.bool_), "should be a list of whole numbers"),
        (byte_level, "token_type", [[1], [1, 2]], "should be a list of whole numbers"),
        (byte_level, "token_type", [10**30] * 257, "should be a list of whole numbers"),
        (sentencepiece, "scores", 0.5, "is 0.5, and should be a list of numbers"),
        (sentencepiece, "scores", ["0"] * 259, "should be a list of numbers"),
        (byte_level, "bos_token_id", "7", "is '7', and should be a whole number"),
        (byte_level, "bos_token_id", True, "is True, and should be a whole number"),
        (byte_level, "eos_token_id", 7.0, "is 7.0, and should be a whole number"),
        (byte_level, "eot_token_id", np.array([7], np.int32), "should be a whole number"),
        (byte_level, "eom_token_id", float("nan"), "is nan, and should be a whole number"),
        (sentencepiece, "unknown_token_id", float("inf"), "is inf, and should be a whole number"),
        (byte_level, "add_bos_token", "false", "is 'false', and should be true or false"),
        (sentencepiece, "add_bos_token", 0, "is 0, and should be true or false"),
        (sentencepiece, "add_space_prefix", "false", "is 'false', and should be true or false"),
    ],
)
def test_a_value_of_another_type_is_damage_named_with_its_key(kind: Any, key: str, value: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=f"^tokenizer.ggml.{key}") as refusal:
        load_tokenizer(kind() | {f"tokenizer.ggml.{key}": value})
    assert re.search(says, str(refusal.value))
    assert not isinstance(refusal.value, UnsupportedTokenizer)


class ReadKeys(dict[str, Any]):
    """Metadata that remember which keys were looked at."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        super().__init__(metadata)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def anything_that_a_file_can_hold() -> list[Any]:
    dtypes = ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8", "?"]
    arrays = [np.full(length, 1, dtype) for dtype in dtypes for length in (0, 1, 257, 259)]
    extremes = [np.full(259, -np.inf), np.full(259, 1e300), np.full(257, 255, np.uint8), np.full(257, -1)]
    texts = [(), ("",), ("a", "a"), ("",) * 259, ("\x00",), tuple(f"a {number}" for number in range(259))]
    return [*arrays, *extremes, *texts, "", "gpt2", "llama", "true", True, False, 0, 1, -1, 2**63, 0.0, 1e308, np.nan]


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_whatever_stands_at_a_key_is_used_or_refused_as_the_files_fault(kind: Any) -> None:
    sound = ReadKeys(kind())
    load_tokenizer(sound)
    assert len(sound.seen) >= 10
    for key in sound.seen:
        for value in anything_that_a_file_can_hold():
            try:
                tokenizer = load_tokenizer(kind() | {key: value})
            except CheckpointError:
                continue
            assert tokenizer.decode(tokenizer.encode("ab <0x41>", parse_special=True)) is not None


def test_a_missing_pre_tokenizer_is_the_default_with_a_warning(log_events: list[Any]) -> None:
    metadata = file_metadata(GPT2) | {"tokenizer.ggml.pre": "default"}
    expected = load_tokenizer(metadata).encode("it's 12345 $x")
    assert log_events == []
    del metadata["tokenizer.ggml.pre"]
    assert load_tokenizer(metadata).encode("it's 12345 $x") == expected
    assert [(event["event"], event["log_level"]) for event in log_events] == [("tokenizer_pre_missing", "warning")]


def test_merges_and_bytes_outside_the_vocabulary_are_told(log_events: list[Any]) -> None:
    tokens = ["a", "b", "ab"]
    metadata = byte_level(merges=["a b", "ab c", "ab ab"]) | {"tokenizer.ggml.tokens": tokens}
    del metadata["tokenizer.ggml.token_type"]
    assert load_tokenizer(metadata).encode("abab") == [2, 2]
    assert [event["event"] for event in log_events] == ["tokenizer_lacks_bytes", "tokenizer_merges_dropped"]
    assert len(log_events[0]["absent_bytes"]) == 254
    assert (log_events[1]["dropped"], log_events[1]["kept"]) == (2, 1)
