"""A drafter's folder as other projects write it: `config.json`, and tensors in safetensors or in PyTorch's own file.

Neither is trusted: of PyTorch's pickles tensors alone are read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from paceline.models.config_limits import refuse_numbers
from paceline.protocol.errors import DamagedFile, InvalidInput, require
from paceline.protocol.given_files import read_json

CONFIG_FILE = "config.json"
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""What such a file may be called; a folder has one."""
_SAFE_FILES = "*.safetensors"


def read_config(folder: Path) -> Mapping[str, Any]:
    """A folder's configuration.

    Raises:
        InvalidInput: there is none, or one of numbers that no model has.
    """
    config = read_json("model", folder / CONFIG_FILE)
    refuse_numbers(f"model {folder.name}", config)
    return config


def read_config_if_any(folder: Path) -> Mapping[str, Any]:
    """A folder's configuration, empty where it has none: some formats are told from their tensors.

    Raises:
        InvalidInput: it can't be read.
    """
    return read_config(folder) if (folder / CONFIG_FILE).is_file() else {}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, on the host. safetensors are taken first, where there are both.

    Raises:
        InvalidInput: there are none.
        DamagedFile: naming the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(_SAFE_FILES)):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise DamagedFile.at(file, str(error)) from error
    return tensors or _unpickled(folder)


def tensor_names(folder: Path) -> Iterable[str]:
    """Names of a folder's tensors, without reading them; none where it has no such files.

    Raises:
        DamagedFile: naming the file.
    """
    names: list[str] = []
    for file in sorted(folder.glob(_SAFE_FILES)):
        try:
            with safe_open(file, "pt") as opened:
                names += opened.keys()
        except SafetensorError as error:
            raise DamagedFile.at(file, str(error)) from error
    if names or _pickled_file(folder) is None:
        return names
    return _unpickled(folder).keys()


def _pickled_file(folder: Path) -> Path | None:
    return next((folder / name for name in PICKLED_FILES if (folder / name).is_file()), None)


def _unpickled(folder: Path) -> dict[str, torch.Tensor]:
    file = _pickled_file(folder)
    if file is None:
        raise InvalidInput.of("model", str(folder), f"a folder with {_SAFE_FILES} or {' or '.join(PICKLED_FILES)}")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise DamagedFile.at(file, str(error).partition("\n")[0]) from error
    tensors = isinstance(found, dict) and all(isinstance(each, torch.Tensor) for each in found.values())
    require(tensors, f"file {file.name}", type(found).__name__, "tensors by their names")
    return dict(found)
