"""The JSON files of a model's folder, read before any library reads them, within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from paceline.models.resolve import ModelSource
from paceline.protocol.errors import DamagedFile, InvalidInput, Unsupported

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_JSON_FILES = (
    *(CONFIG_FILE, GENERATION_FILE, *_INDEX_FILES),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_ADAPTER_FILE = "adapter_config.json"
_WEIGHTS = "transformers_weights"
_MOST_BYTES = 1 << 28
"""Most bytes of a JSON file; chosen: the largest tokenizers take some 40 MB."""


def model_file(source: ModelSource, name: str) -> Path | None:
    """A file of a model's folder, or of a hub model's, which is fetched; None: there is none, or it is a GGUF.

    Raises:
        OSError: the hub can't be reached and the model has not been fetched.
    """
    if source.gguf is not None:
        return None
    if source.kind == "hub":
        from transformers.utils.hub import cached_file

        path = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)
    file = Path(source.location) / name
    return file if file.exists() else None


def config_of(source: ModelSource) -> str:
    """The name of a model's configuration in an error."""
    return f"model {source.name}: {source.gguf_file or CONFIG_FILE}"


def read_model_json(file: Path) -> dict[str, Any]:
    """The JSON object that a model's file holds.

    Raises:
        DamagedFile: it holds something else.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidInput.of(f"size of file {str(file)!r}", file.stat().st_size, f"at most {_MOST_BYTES} bytes")
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile.at(file, f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile.at(file, f"a JSON {type(value).__name__}, not an object")
    return value


def read_model_json_if_any(source: ModelSource, name: str) -> dict[str, Any]:
    """As `read_model_json`, for a file of a model; empty where it has no such file."""
    file = model_file(source, name)
    return {} if file is None else read_model_json(file)


def unreadable_json(folder: Path) -> DamagedFile | None:
    """The first of a folder's files that should be JSON and isn't, or that the tokenizers library can't read."""
    from tokenizers import Tokenizer

    for name in _JSON_FILES:
        file = folder / name
        if not file.exists():
            continue
        try:
            read_model_json(file)
            if name == "tokenizer.json":
                Tokenizer.from_file(str(file))
        except DamagedFile as error:
            return error
        except BaseException as error:  # noqa: BLE001  # a panic of the library is no Exception
            return DamagedFile.at(file, str(error).partition("\n")[0])
    return None


def refuse_elsewhere(source: ModelSource) -> None:
    """Refuse files that have weights outside the model's folder loaded, or changed by an adapter.

    Raises:
        DamagedFile: an index is none.
        InvalidInput: an index names files outside the model's folder.
        Unsupported: weights that are to be changed by an adapter, or under another name.
    """
    if model_file(source, _ADAPTER_FILE) is not None:
        raise Unsupported(f"model {source.name}: {_ADAPTER_FILE}: an adapter; merge it into the model's weights")
    if read_model_json_if_any(source, CONFIG_FILE).get(_WEIGHTS) is not None:
        raise Unsupported(f"{config_of(source)}: {_WEIGHTS}: weights have their usual names")
    for name in _INDEX_FILES:
        file = model_file(source, name)
        if file is None:
            continue
        shards = read_model_json(file).get("weight_map")
        if not isinstance(shards, Mapping):
            raise DamagedFile.at(file, "no weight_map of tensors to files")
        for tensor, shard in shards.items():
            if not isinstance(shard, str) or not _is_inside(shard):
                limit = "the name of a file in the model's own folder"
                raise InvalidInput.of(f"file {str(file)!r}: weight_map[{tensor!r}]", shard, limit)


def _is_inside(path: str) -> bool:
    kinds = (PurePosixPath(path), PureWindowsPath(path))
    return bool(path) and "\0" not in path and all(not each.anchor and ".." not in each.parts for each in kinds)
