"""GGUF files: refused by the name of what can't be honoured, ended by every id that ends, read within bounds."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.loading import load_engine
from paceline.models.gguf import convert_gguf
from paceline.models.tokenizer import load_tokenizer
from paceline.models.vocabulary import without_padding
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny
from tests.engine.llama_engines import llama_settings
from tests.engine.tiny import THREAD
from tests.models import gguf_files
from tests.models.gguf_files import CONTROL, HIDDEN, NORMAL, values
from tests.models.test_gguf_logits import LISTS, LLAMA_3, YARN, biases

HUGE = 10**15
TWICE = ["<turn>" if token == "<more>" else token for token in gguf_files.tokens()]

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(
        (name, {key: value}, {}, rf"{name}\.{key} = {value}")
        for name, key, value in (
            ("llama", "attention.scale", 0.5), ("qwen2", "logit_scale", 0.5), ("gemma3", "residual_scale", 0.5),
            ("llama", "embedding_scale", 2.0), ("qwen2", "attention.causal", False), ("gemma3", "expert_count", 2),
            ("llama", "expert_weights_scale", 2.0), ("qwen2", "nextn_predict_layers", 1),
            ("gemma3", "attention.clamp_kqv", 8.0), ("llama", "rope.dimension_count", 8),
            ("qwen2", "attention.value_length", 8), ("gemma3", "rope.dimension_sections", 2),
            ("llama", "vocab_size", 300),
        )
    ),
    ("llama", {"attention.sliding_window": 8}, {}, r"llama\.attention\.sliding_window = 8: must be 0 or"),
    ("llama", {"attn_logit_softcapping": 5.0}, {}, r"llama\.attn_logit_softcapping"),
    ("gemma2", {"rope.freq_base_swa": 10.0}, {}, r"gemma2\.rope\.freq_base_swa"),
    ("gemma3", YARN, {}, r"gemma3\.rope\.scaling\.type = 'yarn'"),
    ("llama", {"rope.scaling.type": "dynamic"}, {}, r"llama\.rope\.scaling\.type = 'dynamic'"),
    ("llama", {"rope.scaling.type": "longrope"}, {}, r"llama\.rope\.scaling\.type = 'longrope'"),
    ("llama", YARN | {"rope.scaling.yarn_log_multiplier": 0.5}, {}, r"yarn_log_multiplier = 0\.5"),
    ("llama", YARN | {"rope.scaling.yarn_beta_fast": 8.0}, {}, r"yarn_beta_fast = 8\.0"),
    ("llama", YARN, {"rope_freqs.weight": LLAMA_3}, r"llama\.rope\.scaling\.type = 'yarn'"),
    ("llama", {}, {"rope_freqs.weight": LLAMA_3[:4]}, r"shape of tensor rope_freqs\.weight = \[4\]"),
    ("llama", {}, {"rope_freqs.weight": LLAMA_3 * 0}, r"tensor rope_freqs\.weight"),
    ("llama", {}, LISTS, r"llama\.rope\.scaling\.type = 'linear'"),
    ("phi3", {}, {"rope_factors_long.weight": LLAMA_3}, r"tensors = 'rope_factors_long\.weight'"),
    ("qwen2", {}, {"rope_freqs.weight": LLAMA_3}, r"tensor = 'rope_freqs\.weight'"),
    ("qwen2", {}, biases("attn_output"), r"tensor = 'blk\.0\.attn_output\.bias'"),
    ("llama", {}, {"blk.0.attn_sinks.weight": values("s", (4,))}, r"tensor = 'blk\.0\.attn_sinks\.weight'"),
    ("llama", {}, {"blk.7.attn_norm.weight": values("n", (HIDDEN,))}, r"tensor = 'blk\.7\.attn_norm\.weight'"),
    ("gemma2", {}, {"output.weight": values("o", (267, HIDDEN))}, r"tensor = 'output\.weight'"),
    ("llama", {"general.type": "adapter"}, {}, r"general\.type = 'adapter'"),
    ("llama", {"split.count": 3}, {}, r"split\.count = 3: must be 1"),
    ("falcon", {}, {}, r"general\.architecture = 'falcon': must be one of: llama, qwen2"),
    # What no model can be, or no machine hold.
    *(
        ("llama", {key: value}, {}, rf"llama\.{key} = {value}: must be a whole number in")
        for key, value in (
            ("attention.head_count", 0), ("attention.head_count_kv", -1), ("context_length", HUGE),
            ("block_count", 10**7), ("embedding_length", HUGE), ("feed_forward_length", HUGE),
            ("attention.key_length", 0), ("rope.scaling.original_context_length", 0),
        )
    ),
    ("llama", {"attention.head_count_kv": 3}, {}, r"llama\.attention\.head_count_kv = 3: must be a divisor of 4"),
    ("llama", {"attention.head_count": [4, 2]}, {}, r"llama\.attention\.head_count = array"),
    ("llama", {"block_count": "two"}, {}, r"llama\.block_count = 'two'"),
    ("llama", {"context_length": None}, {}, r"llama\.context_length = None: must be in the file"),
    ("llama", {"rope.freq_base": float("nan")}, {}, r"llama\.rope\.freq_base = nan"),
    ("llama", {"embedding_length": 1 << 20}, {}, r"tensors of another shape"),
    ("llama", {"tokenizer.ggml.eos_token_id": 10**6}, {}, r"tokenizer\.ggml\.eos_token_id = 1000000"),
    ("llama", {"tokenizer.ggml.tokens": None}, {}, r"tokenizer\.ggml\.tokens = None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "named"), REFUSED, ids=[f"{each[0]}-{each[3]}" for each in REFUSED]
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any], named: str
) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", architecture, keys, tensors)
    with pytest.raises(InvalidInput, match=named) as caught:
        load_engine(str(file), THREAD)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tokenizer.ggml.model": "klingon"}, "tokenizer.ggml.model = 'klingon'"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre = 'klingon'"),
        ({"tokenizer.ggml.suppress_tokens": [3]}, "tokenizer.ggml.suppress_tokens"),
        ({"tokenizer.ggml.precompiled_charsmap": [3]}, "tokenizer.ggml.precompiled_charsmap"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.tokens": TWICE}, "tokenizer.ggml.tokens = 267: must be all different; 266 are"),
        ({"tokenizer.ggml.merges": ["x y"]}, "tiny.gguf': damaged or truncated (its vocabulary: "),
        ({"tokenizer.ggml.eot_token_id": 267}, "tokenizer.ggml.eot_token_id = 267"),
    ],
)
def test_a_vocabulary_that_is_not_read_is_refused_by_name(
    tmp_path: Path, keys: Mapping[str, Any], named: str
) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", keys=keys)
    with pytest.raises(InvalidInput) as caught:
        load_tokenizer(str(file))
    assert named in caught.value.message


def test_every_id_that_ends_a_turn_ends_a_text_also_once_converted(tmp_path: Path) -> None:
    more = {"eot_token_id": 2, "eom_token_id": 3, "eos_token_ids": [1, 9]}
    file = gguf_files.write(
        tmp_path / "tiny.gguf", keys={f"tokenizer.ggml.{key}": each for key, each in more.items()}
    )
    convert_gguf(file, tmp_path / "converted")
    for name in (file, tmp_path / "converted"):
        tokenizer = load_tokenizer(str(name))
        assert tokenizer.eos_token_ids == {1, 2, 3, 9}
        assert tokenizer.vocab_size == len(gguf_files.tokens()), "transformers adds none of its own"


def test_padding_is_no_part_of_a_vocabulary(tmp_path: Path) -> None:
    listed, spare = gguf_files.tokens(), 5
    size = len(listed) + spare
    kinds = [CONTROL] * len(gguf_files.WORDS) + [NORMAL] * (len(listed) - len(gguf_files.WORDS)) + [5] * spare
    keys = {
        "tokenizer.ggml.tokens": [*listed, *(f"[PAD{i}]" for i in range(len(listed), size))],
        "tokenizer.ggml.token_type": kinds,
    }
    embedding = {"token_embd.weight": values("e", (size, HIDDEN))}
    padded = gguf_files.write(tmp_path / "padded.gguf", keys=keys, tensors=embedding)
    plain = load_tokenizer(str(gguf_files.write(tmp_path / "plain.gguf")))
    convert_gguf(padded, tmp_path / "converted")
    for name in (padded, tmp_path / "converted"):
        tokenizer = load_tokenizer(str(name))
        assert (tokenizer.fingerprint, tokenizer.vocab_size) == (plain.fingerprint, len(listed))
        text = f"the [PAD{size - 1}] 12"
        assert tokenizer.encode(text) == plain.encode(text)
        assert tokenizer.max_token_bytes == plain.max_token_bytes
    for settings in (llama_settings(), THREAD):
        engine = load_engine(str(padded), settings)
        identity = engine.info.fingerprint
        assert (identity.tokenizer, identity.vocab_size) == (plain.fingerprint, len(listed))
        assert tiny.read(engine, (5, 6, 7)).shape == (3, len(listed))


def test_a_vocabulary_of_padding_alone_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"vocabulary.*\[PADn\] alone.*at least one other token"):
        without_padding([("[PAD0]", 0), ("[PAD1]", 1)])
    assert without_padding([("[PAD0]", 0), ("[PAD0]", 1)]) == [("[PAD0]", 1)], "the text of another id is a token"


TEXTS = (
    "a  12 b's\n\n3 the 1234567  the", "<s>the</s>  x\n <turn> the", "HeLLo IT'LL don't \t\t tab\r\n\r\n end   ",
    " lead", "¿qué? 日本語 12٣ ½ naïve e\u0301 🙂", "$1,000.00 == (x+y)^~|`!!\n", "", "  ", " the\n  the the12312",
)  # fmt: skip
PIECES = ("<unk>", "<s>", "</s>", "<end>", "<own>", *(f"<0x{byte:02X}>" for byte in range(256)))
WHOLE = ("▁the", "the", "▁t", "he", "▁▁", "▁", "t", "h", "e", "a", "b", "1", "2", "\n")
"""The best first."""
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*PIECES, *WHOLE],
    "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, CONTROL, 4, *[6] * 256, *[NORMAL] * len(WHOLE)],
    "tokenizer.ggml.scores": [*[0.0] * len(PIECES), *(-float(rank) for rank in range(len(WHOLE)))],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def raw_header(tensors: int, keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def raw_key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "size", "named"),
    [
        (raw_header(1 << 40, 0, b""), 0, "number of tensors = 1099511627776: must be at most 65536"),
        (raw_header(0, 1 << 40, b""), 0, "number of keys = 1099511627776: must be at most 65536"),
        (raw_header(0, 1, raw_key("a", 9, struct.pack("<IQ", 8, 10**8))), 10**9, "number of strings = 100000000"),
        (raw_header(0, 1, raw_key("a", 9, struct.pack("<IQ", 0, 10**8))), 0, "its header needs 100000000 bytes"),
        (raw_header(0, 1, raw_key("a", 9, struct.pack("<IQ", 4, 1 << 62))), 0, "its header needs"),
        (raw_header(0, 1, raw_key("a", 8, struct.pack("<Q", 1 << 27))), 1 << 28, "bytes of a text = 134217728"),
        (raw_header(0, 1, raw_key("a", 9, struct.pack("<IQ", 9, 1))), 0, "an array of values of type 9"),
        (raw_header(0, 1, raw_key("a", 99, b"")), 0, "a value of type 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), 0, "GGUF version = 50331648: must be 2 or 3, little-endian"),
        (raw_header(0, 1, raw_key("general.alignment", 4, struct.pack("<I", 3))), 64, "general.alignment is 3"),
        # An array that is there: it stays in the file, and the file has no model.
        (raw_header(0, 1, raw_key("a", 9, struct.pack("<IQ", 0, 10**8))), 10**8 + 100, "general.architecture = ''"),
    ],
)
def test_absurd_headers_are_refused_at_once(tmp_path: Path, content: bytes, size: int, named: str) -> None:
    file = tmp_path / "absurd.gguf"
    with file.open("wb") as out:
        out.write(content)
        out.truncate(max(size, len(content)))
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    for load in (load_tokenizer, lambda name: load_engine(name, THREAD)):
        with pytest.raises(InvalidInput) as caught:
            load(str(file))
    assert named in caught.value.message
    assert time.thread_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 << 10
    load_tokenizer(str(gguf_files.write(tmp_path / "honest.gguf")))
