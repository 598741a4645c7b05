"""llama.cpp's library on this machine: by a setting, of llama-cpp-python, or of xllamacpp."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paceline.protocol.errors import InvalidInput

INSTALL = "pip install 'paceline[llama]'"
_BINDING, _MODULE = "llama-cpp-python", "llama_cpp"
_NAMES = {"darwin": ("libllama.dylib", "libllama.so"), "win32": ("llama.dll",)}.get(sys.platform, ("libllama.so",))
_WHEEL, _WHEEL_MODULE, _WHEEL_LIBRARY = "xllamacpp", "xllamacpp", "xllamacpp.abi3.so"
"""A wheel whose extension module exports the C interface: what tests run on."""


@dataclass(frozen=True)
class LlamaLibrary:
    """A library's file, and what brought it: a package with its version, or the setting."""

    file: Path
    origin: str


def chosen_library(path: Path | None) -> LlamaLibrary | None:
    """The library that `engine = auto` uses: the setting's, or that of the extra `llama`; None: neither is there.

    Raises:
        InvalidInput: the setting names no file.
    """
    if path is not None:
        file = path.expanduser()
        if not file.is_file():
            raise InvalidInput.of("llama.library", str(path), "a file: llama.cpp's shared library")
        return LlamaLibrary(file, "llama.library")
    folder = _folder_of(_MODULE)
    files = [folder / "lib" / name for name in _NAMES] if folder is not None else []
    file_there = next((each for each in files if each.is_file()), None)
    return None if file_there is None else LlamaLibrary(file_there, _version(_BINDING))


def any_library(path: Path | None) -> LlamaLibrary:
    """The library that `engine = llama` uses: `chosen_library`'s, or else xllamacpp's.

    Raises:
        InvalidInput: there is none; says how to install one.
    """
    chosen = chosen_library(path)
    if chosen is not None:
        return chosen
    folder = _folder_of(_WHEEL_MODULE)
    file = None if folder is None else folder / _WHEEL_LIBRARY
    if file is None or not file.is_file():
        raise InvalidInput.of("engine", "llama", f"auto or torch: there is no library of llama.cpp ({INSTALL})")
    return LlamaLibrary(file, _version(_WHEEL))


def _folder_of(module: str) -> Path | None:
    """An installed package's folder, without importing it."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package
