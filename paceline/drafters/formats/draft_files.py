"""A drafter's folder as other projects write it: `config.json`, and tensors in safetensors or in PyTorch's own file.

Neither is trusted: only tensors are read from PyTorch's pickles.
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
from paceline.protocol.errors import DamagedFile, InvalidInput, Unsupported, require
from paceline.protocol.given_files import read_json

CONFIG_FILE = "config.json"
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Names that such a file may have; a folder has one."""
_SAFE_FILES = "*.safetensors"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    return tensors or _read_pickle(folder)


def tensor_names(folder: Path) -> Iterable[str]:
    """Names of a folder's tensors, without reading them; none where it has no such files.

    Raises:
        DamagedFile: naming the file.
    """
    if any(folder.glob(_SAFE_FILES)):
        return TensorFiles(folder).names
    return () if _pickled_file(folder) is None else _read_pickle(folder).keys()


class TensorFiles:
    """The tensors of a folder's `*.safetensors`, by name; read off the files themselves, never their index."""

    def __init__(self, folder: Path) -> None:
        """List the tensors.

        Raises:
            InvalidInput: there are no such files.
            DamagedFile: naming the file.
        """
        self._folder = folder
        self._files: dict[str, Path] = {}
        files = sorted(folder.glob(_SAFE_FILES))
        require(bool(files), "model", str(folder), f"a folder with {_SAFE_FILES}")
        for file in files:
            try:
                with safe_open(file, "pt") as reader:
                    self._files |= dict.fromkeys(reader.keys(), file)
            except SafetensorError as error:
                raise DamagedFile.at(file, str(error)) from error

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        """One tensor of plain numbers.

        Raises:
            InvalidInput: there is none of that name.
            Unsupported: its numbers are quantised.
        """
        require(name in self._files, "model", str(self._folder), f"whole; tensor {name} is missing")
        with safe_open(self._files[name], "pt") as reader:
            tensor: torch.Tensor = reader.get_tensor(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise Unsupported(f"tensor {name} of {tensor.dtype}: quantised tensors of a drafter are not served")
        return tensor


def _pickled_file(folder: Path) -> Path | None:
    return next((folder / name for name in PICKLED_FILES if (folder / name).is_file()), None)


def _read_pickle(folder: Path) -> dict[str, torch.Tensor]:
    file = _pickled_file(folder)
    if file is None:
        raise InvalidInput.of("model", str(folder), f"a folder with {_SAFE_FILES} or {' or '.join(PICKLED_FILES)}")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise DamagedFile.at(file, str(error).partition("\n")[0]) from error
    is_valid = isinstance(tensors, dict) and all(isinstance(each, torch.Tensor) for each in tensors.values())
    require(is_valid, f"file {file.name}", type(tensors).__name__, "tensors by their names")
    return dict(tensors)
