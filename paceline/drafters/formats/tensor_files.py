"""Tensors of a checkpoint's safetensors files, read one by one: a drafter wants few of a target's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.protocol.errors import DamagedFile, Unsupported, require

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)


class TensorFiles:
    """What a folder's `*.safetensors` hold, by name; the files themselves are asked, never their index."""

    def __init__(self, folder: Path) -> None:
        """List the tensors.

        Raises:
            InvalidInput: there are no such files.
            DamagedFile: naming the file.
        """
        self._folder = folder
        self._files: dict[str, Path] = {}
        files = sorted(folder.glob("*.safetensors"))
        require(bool(files), "model", str(folder), "a folder with *.safetensors")
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
            except SafetensorError as error:
                raise DamagedFile.at(file, str(error)) from error

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
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
        with safe_open(self._files[name], "pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if tensor.dtype not in _PLAIN:
            raise Unsupported(f"tensor {name} of {tensor.dtype}: quantised tensors of a drafter are not served")
        return tensor
