"""The tokenizer that a GGUF file describes, splitting text as llama.cpp does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.models.gguf_config import spare_id, token_id, vocabulary
from paceline.models.gguf_header import GgufHeader
from paceline.protocol.errors import DamagedFile, InvalidInput, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PREFIX = "tokenizer."
_SPACE = "\u2581"
"""A space in vocabularies of model llama."""
_READ_KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids", "padding_token_id",
    "unknown_token_id",
)  # fmt: skip
KIND_KEYS = (f"{_PREFIX}ggml.model", f"{_PREFIX}ggml.pre")
"""Keys that name a kind of vocabulary, or of splitting into words."""
_KINDS = {"model": str, "pre": str, "add_bos_token": bool, "add_eos_token": bool, "add_space_prefix": bool}
_HARMLESS = (
    "add_sep_token", "cls_token_id", "mask_token_id", "seperator_token_id", "token_type_count",
    "remove_extra_whitespaces", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
    "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
)  # fmt: skip
"""Keys of `tokenizer.ggml` that llama.cpp does not use for these models, or only for filling in the middle."""
_OUTSIDE = ("chat_template", "chat_templates", "huggingface.json", "rwkv.world")
"""Keys without `ggml`, of which the first is read, the others repeat what the rest says."""
_BEGINS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    "tekken",
)  # fmt: skip
"""Pre-tokenizers whose texts begin with a token for it, unless the file says otherwise; whole words are never cut."""
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_WORDS = (
    "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "exaone4", "mpt", "olmo", "jais",
    "trillion", "granite-docling",
)  # fmt: skip
_WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPLITS = dict.fromkeys(_DIGITS, (r"\p{N}", _WORD)) | dict.fromkeys(_WORDS, (_WORD,)) | {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORD, r"\p{N}+", r"[0-9][0-9][0-9]")
}  # fmt: skip


def file_tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a file.

    Raises:
        InvalidInput: naming the key that isn't read, or its value.
    """
    from transformers import TokenizersBackend

    _refuse_others(header)
    fields = {key: header.metadata.get(f"{_PREFIX}ggml.{key}") for key in _READ_KEYS}
    for key, kind in _KINDS.items():
        right = fields[key] is None or isinstance(fields[key], kind)
        require(right, f"{_PREFIX}ggml.{key}", fields[key], f"a {kind.__name__}")
    backend = _backend(header, fields)
    special = special_tokens(header)
    begins = fields["model"] == "llama" or fields["pre"] in _BEGINS
    return TokenizersBackend(
        tokenizer_object=backend,
        add_bos_token=special["bos_token"] is not None
        and (begins if fields["add_bos_token"] is None else fields["add_bos_token"]),
        add_eos_token=special["eos_token"] is not None and bool(fields["add_eos_token"]),
        chat_template=chat_template(header),
        **special,
    )


def special_tokens(header: GgufHeader) -> dict[str, str | None]:
    """Tokens for beginning, end, padding and what is unknown, by transformers' names for them.

    Raises:
        InvalidInput: the id of one that a text needs is outside the vocabulary.
    """
    tokens = vocabulary(header)
    ids = {name: token_id(header, f"{name}_token_id") for name in ("bos", "eos")}
    ids |= {"pad": spare_id(header, "padding_token_id"), "unk": spare_id(header, "unknown_token_id")}
    return {f"{name}_token": None if i is None else tokens[i] for name, i in ids.items()}


def chat_template(header: GgufHeader) -> str | None:
    """A file's chat template, if it has one.

    Raises:
        InvalidInput: it is no text.
    """
    template = header.metadata.get(f"{_PREFIX}chat_template")
    require(template is None or isinstance(template, str), f"{_PREFIX}chat_template", template, "a text")
    return template


def distinct_vocabulary(header: GgufHeader) -> list[str]:
    """As `vocabulary`.

    Raises:
        InvalidInput: as `vocabulary`, or two tokens are the same.
    """
    tokens = vocabulary(header)
    different = len(set(tokens))
    require(different == len(tokens), f"{_PREFIX}ggml.tokens", len(tokens), f"all different; {different} are")
    return tokens


def _backend(header: GgufHeader, fields: Mapping[str, Any]) -> Tokenizer:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    tokens, kind = distinct_vocabulary(header), fields["model"]
    require(kind in ("gpt2", "llama"), KIND_KEYS[0], kind, "gpt2 or llama")
    description = {"tokenizer_type": kind, "tokens": tokens} | _lists(fields, len(tokens))
    try:
        backend = _without_made_up(convert_gguf_tokenizer(header.architecture, description)[0], len(tokens))
    except Exception as error:  # merges of tokens that aren't there, for one, are a bare Exception
        raise DamagedFile.at(header.file, f"its vocabulary: {error}") from error
    if kind == "gpt2":
        _split_as(backend, str(fields["pre"] or "default"))
    else:
        _spaces_as(backend, adds_prefix=fields["add_space_prefix"] is not False)
    return backend


def _refuse_others(header: GgufHeader) -> None:
    known_keys = {f"{_PREFIX}ggml.{key}" for key in (*_READ_KEYS, *_HARMLESS)} | {_PREFIX + key for key in _OUTSIDE}
    for key, value in header.metadata.items():
        named_template = key.startswith(f"{_PREFIX}chat_template.")
        if key.startswith(_PREFIX) and key not in known_keys and not named_template:
            raise InvalidInput.of(key, value, "absent: nothing here reads it")


def _lists(fields: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The lists with an entry for each token, and the merges."""
    lists: dict[str, Any] = {}
    for key in ("token_type", "scores"):
        if fields[key] is not None:
            lists[key] = token_numbers(key, fields[key], size)
    list_key = "merges" if fields["model"] == "gpt2" else "scores"
    lists |= {"merges": fields["merges"]} if list_key == "merges" else {}
    limit = f"a list, for a vocabulary of model {fields['model']}"
    require(isinstance(lists.get(list_key), list), f"{_PREFIX}ggml.{list_key}", fields[list_key], limit)
    return lists


def token_numbers(key: str, value: object, size: int) -> list[Any]:
    """The list `tokenizer.ggml.KEY`.

    Raises:
        InvalidInput: it hasn't a number for each token.
    """
    fits = isinstance(value, np.ndarray) and len(value) == size
    require(fits, f"{_PREFIX}ggml.{key}", value, f"one number for each of {size} tokens")
    numbers: list[Any] = np.asarray(value).tolist()
    return numbers


def _without_made_up(backend: Tokenizer, size: int) -> Tokenizer:
    """Without tokens that transformers adds beyond the vocabulary."""
    from tokenizers import Tokenizer

    if backend.get_vocab_size() <= size:
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _split_as(backend: Tokenizer, kind: str) -> None:
    """Split text into words as the file says."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    patterns = _SPLITS.get(kind) or ((GGUF_PRE_TOKENIZER_SPLITS[kind],) if kind in GGUF_PRE_TOKENIZER_SPLITS else ())
    names = ", ".join(sorted({*_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS}))
    require(len(patterns) > 0, KIND_KEYS[1], kind, f"one of: {names}")
    backend.model.ignore_merges = kind in _BEGINS
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_words])


def _spaces_as(backend: Tokenizer, *, adds_prefix: bool) -> None:
    """Write spaces as the vocabulary does, and one before each text between special tokens."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_prefix else spaces
    backend.pre_tokenizer = None
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_prefix else steps)
