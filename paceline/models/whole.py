"""Loading with transformers: quietly, whole or not at all; damaged or incomplete files are refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.model_files import CONFIG_FILE, unreadable_json
from paceline.models.resolve import ModelSource
from paceline.models.surplus import count_and_names, refuse_surplus
from paceline.protocol.errors import DamagedFile, InvalidInput, PacelineError, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_LONG_LINE = 160
"""Characters of a library's message from which only its first sentence is shown."""
_PANIC = "PanicException"
"""The name of the error that libraries written in Rust raise for their own defects; it is no `Exception`."""
_MOST_WEIGHT_RATIO = 2
"""Weights of a configuration over those of the files, up to which each missing one is named."""
_MOST_TABLE_BYTES = 1 << 29
"""Bytes of tables that a network computes for itself: masks and rotations of its context, of a model some 100 MB."""
_LOADING = threading.Lock()
_SENTENCE_END = re.compile(r"\.\s")


@contextmanager
def refusing_files(source: ModelSource, value: str, requirement: str) -> Iterator[None]:
    """Refuse a model for any error that the libraries raise while they read its files.

    Args:
        resolved: the model.
        value: its name, as shown to users.
        requirement: what the files must be.

    Raises:
        DamagedFile: naming the file.
        InvalidInput: transformers loads nothing from them; says why.
    """
    with _refusing(value, requirement, lambda error: _damaged_file(source, error)):
        yield


@contextmanager
def refusing_network(name: str) -> Iterator[None]:
    """Refuse a model for any error that its own code raises while it computes; raises `InvalidInput`."""
    with _refusing(name, "a decoder whose own code computes logits", lambda error: None):
        yield


@contextmanager
def _refusing(
    value: str, requirement: str, find_damage: Callable[[BaseException], DamagedFile | None]
) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        refusal = find_damage(error) or InvalidInput.of("model", value, f"{requirement} ({_gist(error)})")
        raise refusal from error


def _gist(error: BaseException) -> str:
    """The first line of a library's message, and of a long line the first sentence: the rest lists everything."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which runs only with trust_remote_code = true"
    head, _, rest = str(error).strip().partition("\n")
    line = f"{head} {rest.strip().partition(chr(10))[0]}" if head.endswith(":") else head
    line = line if len(line) <= _LONG_LINE else _SENTENCE_END.split(line)[0]
    speaks = isinstance(error, OSError | ValueError | RuntimeError) and line
    return line if speaks else f"{type(error).__name__}: {line}"


def _damaged_file(source: ModelSource, error: BaseException) -> DamagedFile | None:
    """The file whose bytes an error is about, by name; None: it is about something else."""
    from safetensors import SafetensorError

    if source.gguf is not None:
        return None  # its own reader names it
    if isinstance(error, SafetensorError):
        return DamagedFile.at(_damaged_safetensors(source), str(error))
    return unreadable_json(_folder(source))


def _damaged_safetensors(source: ModelSource) -> Path:
    """The first of a model's files that can't be opened; their folder, if none is left."""
    from safetensors import SafetensorError, safe_open

    folder = _folder(source)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return folder


def _folder(source: ModelSource) -> Path:
    """The folder of a model's files; for a hub model, of its cached files."""
    if source.kind != "hub":
        return Path(source.location)
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(source.location, CONFIG_FILE)
    except OSError:  # nothing of it is kept
        path = None
    return Path(source.location if path is None else path).parent


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and reports off the terminal, which has ours and refusals."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions are not annotated
    has_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def load_whole(name: str, source: ModelSource | None = None, /, **arguments: Any) -> PreTrainedModel:
    """Load a causal language model whose tensors are exactly those of its files.

    transformers itself makes up tensors that files lack, and drops those that it has no place for.

    Args:
        name: shown to users.
        resolved: where the files are; tensors of a folder that have no place are refused.
        arguments: as `from_pretrained` takes them; a `config` and a `state_dict` stand for files.

    Raises:
        InvalidInput: tensors are missing, of another shape than the configuration's, or without a place in it.
        Unsupported: they are quantised, and nothing says how.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    # Its annotation knows of no loading info.
    library: Any = (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(arguments["config"])] if "state_dict" in arguments else AutoModelForCausalLM
    )
    model: PreTrainedModel
    with _note_surplus() as unexpected_keys:
        model, loading_info = library.from_pretrained(
            **arguments,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named here
        )
    misshapen = {tensor: (file_shape, shape) for tensor, file_shape, shape in loading_info["mismatched_keys"]}
    refuse_incomplete("model", name, loading_info["missing_keys"], misshapen)
    if source is not None and source.gguf is None:
        is_unpacked = "quantization_config" in arguments or "state_dict" in arguments
        refuse_surplus(model, unexpected_keys, source, is_unpacked=is_unpacked)
    return model


@contextmanager
def _note_surplus() -> Iterator[set[str]]:
    """Note the names of all tensors that a model loaded within has no place for.

    The library's own report leaves out those that a model class lists as known, by patterns that match others, too.
    """
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    adjust, unexpected_keys = base._adjust_missing_and_unexpected_keys, set[str]()

    def noting(self: Any, info: Any) -> None:
        unexpected_keys.update(info.unexpected_keys)
        adjust(self, info)

    with _LOADING:
        base._adjust_missing_and_unexpected_keys = noting
        try:
            yield unexpected_keys
        finally:
            base._adjust_missing_and_unexpected_keys = adjust


def refuse_larger(make: Callable[[], torch.nn.Module], file_weights: int, what: str) -> None:
    """Refuse a configuration of far more weights than the files have: the library would make them all first.

    Args:
        make: builds the network, here without values.
        file_weights: how many weights the files hold.
        what: a name for the network.

    Raises:
        InvalidInput: naming both.
    """
    import torch

    with torch.device("meta"):
        network = make()
    weights, most = sum(each.numel() for each in network.parameters()), _MOST_WEIGHT_RATIO * file_weights
    require(
        weights <= most, f"weights of config.json's {what}", weights, f"at most {most}: the files have {file_weights}"
    )
    table_bytes = sum(each.nbytes for each in network.buffers())
    limit = f"at most {_MOST_TABLE_BYTES}: no file holds them"
    require(table_bytes <= _MOST_TABLE_BYTES, f"bytes that config.json's {what} has computed", table_bytes, limit)


def refuse_incomplete(
    field: str,
    value: str,
    missing: Collection[str],
    misshapen: Mapping[str, tuple[Collection[int], Collection[int]]],
) -> None:
    """Refuse incomplete weights: the missing ones would be random.

    Args:
        field: of the error: the kind of what was loaded.
        value: its name.
        missing: names of tensors; a tied one whose other half is there is not missing.
        misshapen: the stored shape and the configuration's of each tensor where they differ.

    Raises:
        InvalidInput: with the first few names, and how many there are.
    """
    shapes = [f"{name} {list(misshapen[name][0])}, not {list(misshapen[name][1])}" for name in sorted(misshapen)]
    faults = {"tensors missing": sorted(missing), "tensors of another shape": shapes}
    problems = [f"{fault}: {count_and_names(tensors)}" for fault, tensors in faults.items() if tensors]
    if problems:
        raise InvalidInput.of(field, value, f"whole; {'; '.join(problems)}")
