"""Text to token ids and back, with one fingerprint that two services can compare."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.models.byte_pieces import piece_bytes
from paceline.models.model_facts import read_tokenizer
from paceline.models.rendering import (
    Scalar,
    Turn,
    keys_and_strings,
    letter_turns,
    refused_by_template,
    render_within_limits,
    template_variables,
)
from paceline.models.resolve import resolve
from paceline.models.table_names import TableSpec, is_table
from paceline.models.vocabulary import vocabulary_fingerprint, without_padding
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.generation import ChatMessage

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

Settings = Mapping[str, Scalar]
"""Values of variables that a chat template reads, by their names."""
NO_SETTINGS: Settings = MappingProxyType({})
REPLACEMENT = "\ufffd"
"""`decode` writes it for bytes that are no whole character."""
_BYTES = 256
_LETTERS = 26
_FURTHER_LETTERS = 0x4E00
"""The letters after z begin here: printable, one code point each, stable under normalisation."""
_LETTER_BYTES = 4
"""Most bytes of a code point in UTF-8: any is read as one letter."""
MAX_SPECIAL_TEXTS = 1000
"""Most texts of special tokens in the contents of one chat: each is a call of the tokenizer, 0.1 ms."""
_MARKERS = re.compile("[\U000f0000\U000f0001]")
"""Private-use characters with which transformers marks special tokens in contents; it drops those that it finds."""


class Tokenizer(Protocol):
    """A vocabulary, as the coordinator uses it."""

    def __hash__(self) -> int:
        """By identity: facts of a vocabulary are cached by it."""

    @property
    def vocab_size(self) -> int:
        """Real ids are [0, vocab_size): the tokenizer's own, never a padded tensor width."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the sorted (token, id) pairs."""

    @property
    def max_token_bytes(self) -> int:
        """Upper bound of a token's text in UTF-8: a text of more than n times as many bytes has more than n tokens.

        Not so where the tokenizer itself drops characters (runs of white space, for example).
        """

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a prompt, with the special tokens that the tokenizer itself puts in front.

        A special token's text in the prompt is that token: who sends a prompt may have rendered a template.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are skipped, bytes that are not UTF-8 become U+FFFD."""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text in UTF-8, parts of a character too; none for a special token."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of a chat, ending where the assistant's answer begins.

        Special tokens are the template's alone: their text in a message's content stays text, so that
        nobody can write another's turn.

        Raises:
            Unsupported: the model has no chat template.
            InvalidInput: a content has the text of a special token that the tokenizer can't read as text.
        """

    def render_turns(
        self, turns: Sequence[Turn], tools: Sequence[Turn] = (), settings: Settings = NO_SETTINGS
    ) -> tuple[int, ...]:
        """As `render_chat`, for turns as chat templates read them, function calls and their results included.

        Args:
            turns: role, content, and whatever else the template reads (`tool_calls`, …).
            tools: functions that may be called, in OpenAI's shape.
            settings: of `template_variables`.

        Raises:
            Unsupported: the model has no chat template.
            InvalidInput: the template refuses the chat, or as `render_chat`.
        """

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads beside the chat, for `render_turns`."""

    def template_text(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn] = (),
        settings: Settings = NO_SETTINGS,
        *,
        answer_follows: bool = True,
    ) -> str:
        """The template's output, special tokens by their names: for inspecting a template, never to be tokenised.

        Raises:
            Unsupported: the model has no chat template.
            InvalidInput: the template refuses the chat.
        """

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Texts that are one token wherever they stand, special ones among them."""

    @property
    def hidden_tokens(self) -> Mapping[int, str]:
        """Special tokens by id: `decode` skips them."""


class TableTokenizer:
    """The tokenizer of table models.

    At 257 ids and more, id < 256 is that byte and the rest are special. Fewer
    ids are letters: a to z, then further code points; a character that is no
    letter of the vocabulary is read as the letter at its code point modulo the
    vocabulary size, so that any prompt can be read. `added_tokens`: ASCII
    texts in the place of letters.
    """

    template_variables: frozenset[str] = frozenset()

    def __init__(
        self, vocab_size: int, eos_token_id: int | None, added_tokens: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset() if eos_token_id is None else frozenset((eos_token_id,))
        self._eos = eos_token_id
        self._bytes = vocab_size > _BYTES
        self.max_token_bytes = 1 if self._bytes else max([_LETTER_BYTES, *(len(text) for text in added_tokens)])
        texts = {i: text for text, i in added_tokens.items()}
        self.added_tokens = added_tokens
        self._letters = () if self._bytes else tuple(texts.get(i) or _letter(i) for i in range(vocab_size))
        self._ids = {letter: i for i, letter in enumerate(self._letters) if i != eos_token_id}
        self.fingerprint = vocabulary_fingerprint((self._name(i), i) for i in range(vocab_size))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:  # noqa: D102
        if self._bytes:
            return tuple(text.encode("utf-8", "replace"))
        return tuple(self._letter_id(character) for character in text)

    def decode(self, ids: Sequence[int]) -> str:  # noqa: D102
        if self._bytes:
            return bytes(i for i in ids if i < _BYTES and i != self._eos).decode("utf-8", "replace")
        return "".join(self._letters[i] for i in ids if i != self._eos)

    def text_bytes(self, token_id: int) -> bytes:  # noqa: D102
        return b"" if self.is_special(token_id) else self.token_bytes(token_id)

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:  # noqa: D102
        return self.render_turns(_turns(messages))

    def render_turns(  # noqa: D102
        self, turns: Sequence[Turn], tools: Sequence[Turn] = (), settings: Settings = NO_SETTINGS
    ) -> tuple[int, ...]:
        return self.encode(self.template_text(turns, tools, settings))

    def template_text(  # noqa: D102
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn] = (),
        settings: Settings = NO_SETTINGS,
        *,
        answer_follows: bool = True,
    ) -> str:
        return letter_turns(turns, tools if self._bytes else ()) + "assistant: " * answer_follows

    @property
    def hidden_tokens(self) -> Mapping[int, str]:  # noqa: D102
        return {i: self._name(i) for i in range(self.vocab_size) if self.is_special(i)}

    def is_special(self, token_id: int) -> bool:
        """Whether an id stands for no text."""
        return token_id == self._eos or token_id >= (_BYTES if self._bytes else self.vocab_size)

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one id, or the name of a special one."""
        if self._bytes and not self.is_special(token_id):
            return bytes((token_id,))
        return self._name(token_id).encode()

    def _letter_id(self, character: str) -> int:
        letter_id = self._ids.get(character)
        if letter_id is not None:
            return letter_id
        index = ord(character) % self.vocab_size
        return index if index != self._eos else (index + 1) % self.vocab_size

    def _name(self, token_id: int) -> str:
        if token_id == self._eos:
            return "<eos>"
        if not self._bytes:
            return self._letters[token_id]
        return f"<0x{token_id:02X}>" if token_id < _BYTES else f"<special {token_id}>"


class TransformersTokenizer:
    """Any tokenizer that transformers loads."""

    def __init__(
        self, inner: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = (), logits_width: int | None = None
    ) -> None:
        """Wrap a tokenizer.

        Args:
            inner: transformers' own.
            eos_token_ids: ids that end a text beside its own.
            logits_width: how many ids the model has logits for; those beyond are no part of the vocabulary, though
                the tokenizer knows them. None: for all.
        """
        every_token: Mapping[str, int] = inner.get_vocab()
        vocabulary = dict(without_padding(every_token.items()))
        self.inner = inner
        # Ids may have holes, so the largest id counts, not the number of tokens.
        self.known_size = max(every_token.values()) + 1
        """The tokenizer's ids, including padding and those that the model has no logits for."""
        self.vocab_size = min(1 + max(vocabulary.values()), self.known_size if logits_width is None else logits_width)
        ends = (*eos_token_ids, inner.eos_token_id)
        self.eos_token_ids = frozenset(int(i) for i in ends if i is not None and 0 <= i < self.vocab_size)
        self.fingerprint = vocabulary_fingerprint(vocabulary)
        self.max_token_bytes = max(len(token.encode("utf-8", "surrogatepass")) for token in vocabulary)
        self.encode("")  # has transformers settle the library's truncation and padding: threads only read from now on
        self._further_special = tuple(inner.chat_control_tokens or ())
        self._special = _any_of(
            token.content
            for token in inner.added_tokens_decoder.values()
            if token.special or token.content in self._further_special
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:  # noqa: D102
        return tuple(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:  # noqa: D102
        text = self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def text_bytes(self, token_id: int) -> bytes:  # noqa: D102
        text = self.decode((token_id,))
        piece = self.inner.convert_ids_to_tokens(token_id)
        assert isinstance(piece, str)
        return piece_bytes(piece) if REPLACEMENT in text else text.encode()

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:  # noqa: D102
        return self.render_turns(_turns(messages))

    def render_turns(  # noqa: D102
        self, turns: Sequence[Turn], tools: Sequence[Turn] = (), settings: Settings = NO_SETTINGS
    ) -> tuple[int, ...]:
        keys, strings = keys_and_strings((turns, tools))
        for name, value in settings.items():
            plain = not (isinstance(value, str) and self._special.search(value))
            require(plain, f"chat_template_kwargs.{name}", value, "without the text of a special token")
        if any(self._special.search(key) for key in keys):
            limit = "without special tokens' text, which can't be read as text there"
            raise InvalidInput.of("names in tools and arguments", "the text of a special token", limit)
        if any(self._special.search(string) for string in strings):
            return self._render_with_special_text(turns, tools, settings, strings)
        # The template writes its own special tokens.
        return tuple(self.inner.encode(self.template_text(turns, tools, settings), add_special_tokens=False))

    @cached_property
    def template_variables(self) -> frozenset[str]:  # noqa: D102
        template = self.inner.chat_template or ""
        templates = template.values() if isinstance(template, dict) else (template,)
        arguments = inspect.signature(self.inner.apply_chat_template).parameters
        names = frozenset[str]().union(*map(template_variables, templates))
        return names - arguments.keys() - self.inner.special_tokens_map.keys()

    def template_text(  # noqa: D102
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn] = (),
        settings: Settings = NO_SETTINGS,
        *,
        answer_follows: bool = True,
    ) -> str:
        arguments = {"add_generation_prompt": answer_follows, "tokenize": False}
        try:
            text = self._apply(self.inner, turns, tools, **settings, **arguments)
        except ValueError as error:
            raise refused_by_template(turns, error) from error
        assert isinstance(text, str)
        return text

    @property
    def added_tokens(self) -> Mapping[str, int]:  # noqa: D102
        return {token.content: token_id for token_id, token in self._added_tokens()}

    @property
    def hidden_tokens(self) -> Mapping[int, str]:  # noqa: D102
        return {token_id: token.content for token_id, token in self._added_tokens() if token.special}

    def _added_tokens(self) -> Iterator[tuple[int, AddedToken]]:
        """Added tokens that the model has logits for."""
        return ((i, token) for i, token in self.inner.added_tokens_decoder.items() if i < self.vocab_size)

    def _render_with_special_text(
        self, turns: Sequence[Turn], tools: Sequence[Turn], settings: Settings, strings: Sequence[str]
    ) -> tuple[int, ...]:
        """As `render_turns`, where a content has a special token's text, which is read piece by piece."""
        count = sum(len(self._special.findall(string)) for string in strings)
        limit = f"at most {MAX_SPECIAL_TEXTS} in all messages"
        require(count <= MAX_SPECIAL_TEXTS, "message content: texts of special tokens", count, limit)
        has_markers = any(_MARKERS.search(string) for string in strings)
        require(not has_markers, "message content", "U+F0000, U+F0001", "without them beside a special token's text")
        inner = copy.copy(self.inner)
        # Unset, whatever added token the template writes would count as special, also `<think>`.
        inner.chat_control_tokens = list(self._further_special)
        arguments = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
        try:
            ids = self._apply(inner, turns, tools, **settings, **arguments)
        except ValueError as error:
            limit = "what the tokenizer can read as text"
            raise InvalidInput.of("message content", "the text of a special token", limit) from error
        return tuple(int(token_id) for token_id in ids)

    def _apply(
        self, inner: PreTrainedTokenizerBase, turns: Sequence[Turn], tools: Sequence[Turn], **arguments: Any
    ) -> Any:  # ids or text, as the arguments say
        if not inner.chat_template:
            raise Unsupported("chat messages: the model has no chat template; send a prompt")
        tool_list: list[Any] | None = [dict(tool) for tool in tools] or None
        messages = [dict(turn) for turn in turns]
        return render_within_limits(turns, lambda: inner.apply_chat_template(messages, tools=tool_list, **arguments))


def _turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts; without texts it matches nothing."""
    return re.compile("|".join(re.escape(text) for text in texts if text) or "(?!)")


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of anything that names a model (`paceline.models.resolve.resolve`).

    Raises:
        InvalidInput: the name resolves to nothing that has a tokenizer.
    """
    if is_table(model):
        spec = TableSpec.parse(model.partition("#")[0])
        return TableTokenizer(spec.vocab, spec.eos_token_id, spec.added_tokens)
    from paceline.models.whole import refusing_files

    source = resolve(model)
    with refusing_files(source, model, "a model with a tokenizer"):
        return TransformersTokenizer(*read_tokenizer(source, trust_remote_code=trust_remote_code))


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < _LETTERS else chr(_FURTHER_LETTERS + index - _LETTERS)
