"""Two small tokenizers that cut text differently, and one that writes its tokens as SentencePiece does."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.models.tokenizer import TransformersTokenizer

TARGET_TEXT = ["the quick brown fox jumps over the lazy dog"]
TARGET_TEXT += ["def fox(dog):\n    return quick + lazy;\n\n", "été 漢字 漢"]
DRAFT_TEXT = ["a brown dog is quicker than lazy foxes\n", "brow brow brow jumping jumping"]
DRAFT_TEXT += ["return the overlay; def x():\n  "]
SPECIAL = ("<end>", "<turn>")


def byte_level(texts: list[str], size: int, special: tuple[str, ...]) -> TransformersTokenizer:
    """Byte-level BPE, trained on a few words."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    inner.train_from_iterator(texts, trainer)
    ends = {"eos_token": special[0], "additional_special_tokens": [*special]}
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, **ends))


def target_tokenizer() -> TransformersTokenizer:
    return byte_level(TARGET_TEXT, 330, (*SPECIAL, "<only the target's>"))


def draft_tokenizer() -> TransformersTokenizer:
    return byte_level(DRAFT_TEXT, 310, ("<only the draft's>", *SPECIAL[::-1]))


def sentencepiece_tokenizer() -> TransformersTokenizer:
    """Pieces with U+2581 for a space, one put in front of every text, bytes by their numbers, a beginning token."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzé"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("f", "o"), ("▁", "fo"), ("▁fo", "x"), ("o", "x")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    return TransformersTokenizer(fast)
