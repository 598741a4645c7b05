"""The header of a GGUF file: its metadata and where its tensors lie, read within bounds.

The keys of a GGUF file's architecture: typed, within bounds, and none left unread.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from paceline.protocol.errors import DamagedFile, InvalidInput, require

_T = TypeVar("_T")
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of each type of value, in the language of struct and of numpy; bytes of a truth value are read as such."""
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 16
_MOST_DIMENSIONS = 4
_MOST_STRINGS = 1 << 21
"""In all arrays: a vocabulary and its merges are under a million. Arrays of numbers stay views of the file."""
_LONGEST_TEXT = 1 << 26
"""In bytes."""
_ALIGNMENT = 32


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor.

    Attributes:
        shape: outermost dimension first, as torch has it.
        type_id: of ggml.
        data: its bytes, a view of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    data: _Bytes

    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Its values in float32.

        Raises:
            NotImplementedError: gguf unpacks no such type.
        """
        from gguf import GGMLQuantizationType, dequantize

        rows = self.data.reshape(*self.shape[:-1], -1)
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(rows, GGMLQuantizationType(self.type_id))
        return values.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """The part of a file before its tensors' bytes.

    Attributes:
        file: the file.
        metadata: by key; an array is a list of strings or a numpy array.
        tensors: by name.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def float32_bytes(self) -> int:
        """Bytes of all its tensors in float32."""
        return 4 * sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_header(file: Path) -> GgufHeader:
    """Read a GGUF file's header; of its tensors nothing but where they lie.

    Raises:
        DamagedFile: it isn't GGUF, or is cut off, or says what can't be.
        InvalidInput: a version, a size or a type that isn't read.
    """
    if not file.stat().st_size:
        raise DamagedFile.at(file, "empty")
    header = _HeaderBytes(file, np.memmap(file, np.uint8, "r").view(np.ndarray))
    if header.take(4).tobytes() != _MAGIC:
        raise DamagedFile.at(file, "it does not begin as a GGUF file")
    version, tensors, keys = header.unpack("IQQ")
    require(version in _VERSIONS, f"{file.name}: GGUF version", version, "2 or 3, little-endian")
    require(tensors <= _MOST_TENSORS, f"{file.name}: number of tensors", tensors, f"at most {_MOST_TENSORS}")
    require(keys <= _MOST_KEYS, f"{file.name}: number of keys", keys, f"at most {_MOST_KEYS}")
    metadata = header.read_entries(keys, lambda: header.value(*header.unpack("I")))
    places = header.read_entries(tensors, header.place)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise DamagedFile.at(file, f"general.alignment is {alignment!r}, not a power of two")
    header.take(-header.position % alignment)
    data = header.rest()
    return GgufHeader(file, metadata, {name: header.tensor(name, data, *place) for name, place in places.items()})


@functools.cache
def _block_sizes() -> Mapping[int, tuple[int, int]]:
    """Values and bytes of a block of each type."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


class _HeaderBytes:
    """A file's bytes, taken one after the other, none beyond their end."""

    def __init__(self, file: Path, data: _Bytes) -> None:
        self.position = 0
        self._file = file
        self._data = data
        self._strings = 0

    def take(self, size: int) -> _Bytes:
        begin, rest = self.position, len(self._data) - self.position
        if size > rest:
            raise DamagedFile.at(self._file, f"its header needs {size} bytes at {begin}, where {rest} are left")
        self.position += size
        return self._data[begin : begin + size]

    def rest(self) -> _Bytes:
        return self._data[self.position :]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)).data)

    def text(self) -> str:
        (size,) = self.unpack("Q")
        raw = self.take(size)
        require(size <= _LONGEST_TEXT, f"{self._file.name}: bytes of a text", size, f"at most {_LONGEST_TEXT}")
        try:
            return raw.tobytes().decode()
        except UnicodeDecodeError as error:
            raise DamagedFile.at(self._file, str(error)) from error

    def read_entries(self, count: int, read: Callable[[], _T]) -> dict[str, _T]:
        entries: dict[str, _T] = {}
        for _ in range(count):
            name = self.text()
            if name in entries:
                raise DamagedFile.at(self._file, f"it names {name!r} twice")
            entries[name] = read()
        return entries

    def value(self, kind: int) -> Any:  # a scalar, a string or an array
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise DamagedFile.at(self._file, f"a value of type {kind}, which GGUF does not have")
        kind, count = self.unpack("IQ")
        if kind in _SCALARS:
            form = np.dtype("<" + _SCALARS[kind])
            return self.take(count * form.itemsize).view(form)
        if kind != _STRING:
            raise DamagedFile.at(self._file, f"an array of values of type {kind}")
        self._strings += count
        limit = f"at most {_MOST_STRINGS} in its arrays"
        require(self._strings <= _MOST_STRINGS, f"{self._file.name}: number of strings", self._strings, limit)
        return [self.text() for _ in range(count)]

    def place(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, type and offset."""
        (dimensions,) = self.unpack("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise DamagedFile.at(self._file, f"a tensor of {dimensions} dimensions")
        shape = self.unpack(f"{dimensions}Q")  # innermost first
        return (shape[::-1], *self.unpack("IQ"))

    def tensor(self, name: str, data: _Bytes, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        block, block_bytes = _block_sizes().get(type_id, (0, 0))
        require(block > 0, f"{self._file.name}: type of tensor {name}", type_id, "a type that gguf reads")
        size = prod(shape) // block * block_bytes
        if shape[-1] % block or not size:
            raise DamagedFile.at(self._file, f"tensor {name} of shape {list(shape)} in blocks of {block}")
        if offset + size > len(data):
            raise DamagedFile.at(self._file, f"tensor {name} ends {offset + size - len(data)} bytes beyond the file")
        return GgufTensor(shape, type_id, data[offset : offset + size])


MOST_LAYERS = 512
_HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys that llama.cpp shows and does not use."""
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "pooling_type": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
"""Values without effect, of keys that llama.cpp does not use for the architectures that are read."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


class GgufKeys:
    """The keys of a file's architecture. It notes which have been read.

    Every reader raises `InvalidInput` with the key, its value and what it must be.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._prefix = header.architecture + "."
        entries = header.metadata.items()
        self._values = {
            key.removeprefix(self._prefix): value for key, value in entries if key.startswith(self._prefix)
        }
        self._read_keys: set[str] = set()

    def require(self, condition: bool, key: str, value: object, limit: str) -> None:
        """Refuse a key's value unless the condition holds."""
        require(condition, self._prefix + key, value, limit)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; without a default it must be in the file."""
        value = self._one(key, default)
        if is_whole(value) and low <= value <= high:
            return value
        raise InvalidInput.of(self._prefix + key, value, f"a whole number in [{low}, {high}]")

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """As `integer`, for any number."""
        value = self._one(key, default)
        number = value if isinstance(value, float) or is_whole(value) else math.nan
        self.require(low <= number <= high, key, value, f"a number in [{low:g}, {high:g}]")
        return float(number)

    def text(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of some words."""
        value = str(self._one(key, default))
        self.require(value in choices, key, value, f"one of: {', '.join(choices)}")
        return value

    def only(self, key: str, neutral: object) -> None:
        """Refuse any other value, if there is one."""
        if key in self._values:
            value = self._one(key, None)
            self.require(not isinstance(value, np.ndarray) and value == neutral, key, value, f"{neutral} or absent")

    def windows(self, layers: int, every: int) -> list[bool]:
        """Whether each layer has a window: all but each `every`th, if the file doesn't say."""
        key = "attention.sliding_window_pattern"
        value = self._values.get(key)
        if isinstance(value, np.ndarray):
            self._read_keys.add(key)
            self.require(len(value) == layers, key, value, f"one for each of {layers} layers")
            return [bool(each) for each in value]
        every = self.integer(key, 0, MOST_LAYERS, every)
        return [every == 0 or layer % every < every - 1 for layer in range(layers)]

    def refuse_others(self) -> None:
        """Refuse by name keys that have not been read."""
        for key in self._values.keys() - self._read_keys - set(_HARMLESS):
            if key not in _NEUTRAL:
                raise InvalidInput.of(self._prefix + key, self._values[key], "absent: nothing here computes it")
            self.only(key, _NEUTRAL[key])

    def _one(self, key: str, default: object) -> object:
        """A value, also where an array gives the same to each layer."""
        self._read_keys.add(key)
        value = self._values.get(key, default)
        if isinstance(value, np.ndarray) and 0 < len(value) <= MOST_LAYERS and (value == value[0]).all():
            return value[0].item()
        self.require(value is not None, key, value, "in the file")
        return value
