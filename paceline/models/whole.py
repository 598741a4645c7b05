"""Loading with transformers: quietly, whole or not at all, files that are damaged or incomplete refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.model_files import CONFIG_FILE, unreadable_json
from paceline.models.resolve import ModelSource
from paceline.models.surplus import counted, refuse_surplus
from paceline.protocol.errors import DamagedFile, InvalidInput, PacelineError, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_LONG_LINE = 160
"""Characters of a library's message from which only its first sentence is shown."""
_PANIC = "PanicException"
"""What libraries written in Rust raise for a defect of theirs; no `Exception`."""
_MOST_WANTED = 2
"""Weights that a configuration may speak of over those that there are: up to there, each that is missing is named."""
_MOST_MADE = 1 << 29
"""Bytes of tables that a network computes for itself: masks and rotations of its context, of a model some 100 MB."""
_LOADING = threading.Lock()
_SENTENCE_END = re.compile(r"\.\s")


@contextmanager
def refusing_files(source: ModelSource, value: str, wanted: str) -> Iterator[None]:
    """Refuse a model for whatever the libraries raise while they read its files.

    Args:
        resolved: the model.
        value: its name, as shown to users.
        wanted: what the files must be.

    Raises:
        DamagedFile: naming the file.
        InvalidInput: transformers loads nothing from them; says why.
    """
    with _refusing(value, wanted, lambda error: _damaged_file(source, error)):
        yield


@contextmanager
def refusing_network(name: str) -> Iterator[None]:
    """Refuse a model for whatever its own code raises while it computes; raises `InvalidInput`."""
    with _refusing(name, "a decoder whose own code computes logits", lambda error: None):
        yield


@contextmanager
def _refusing(value: str, wanted: str, damaged_by: Callable[[BaseException], DamagedFile | None]) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        refusal = damaged_by(error) or InvalidInput.of("model", value, f"{wanted} ({_gist(error)})")
        raise refusal from error


def _gist(error: BaseException) -> str:
    """The first line of what a library says, of a long one the first sentence: then comes all that it knows."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which runs only with trust_remote_code = true"
    head, _, rest = str(error).strip().partition("\n")
    line = f"{head} {rest.strip().partition(chr(10))[0]}" if head.endswith(":") else head
    line = line if len(line) <= _LONG_LINE else _SENTENCE_END.split(line)[0]
    speaks = isinstance(error, OSError | ValueError | RuntimeError) and line
    return line if speaks else f"{type(error).__name__}: {line}"


def _damaged_file(source: ModelSource, error: BaseException) -> DamagedFile | None:
    """Names the file whose bytes an error is about; None: it is about something else."""
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
    """Where a model's files are; of a hub model's, where they are kept."""
    if source.kind != "hub":
        return Path(source.location)
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(source.location, CONFIG_FILE)
    except OSError:  # nothing of it is kept
        cached = None
    return Path(source.location if cached is None else cached).parent


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and reports off the terminal: ours are there, and refusals."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions are not annotated
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def load_whole(name: str, source: ModelSource | None = None, /, **arguments: Any) -> PreTrainedModel:
    """Load a causal language model every tensor of which is its files', and which leaves none of theirs out.

    transformers makes up what they lack, and drops what it has no place for.

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
    loaded: PreTrainedModel
    with _noting_surplus() as unexpected:
        loaded, found = library.from_pretrained(
            **arguments,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named here
        )
    misshapen = {tensor: (stored, wanted) for tensor, stored, wanted in found["mismatched_keys"]}
    refuse_incomplete("model", name, found["missing_keys"], misshapen)
    if source is not None and source.gguf is None:
        unpacked = "quantization_config" in arguments or "state_dict" in arguments
        refuse_surplus(loaded, unexpected, source, quantized=unpacked)
    return loaded


@contextmanager
def _noting_surplus() -> Iterator[set[str]]:
    """Names of all tensors that a model which is loaded meanwhile has no place for.

    The library's own report leaves out those that a model class lists as known, by patterns that match others, too.
    """
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    adjust, unexpected = base._adjust_missing_and_unexpected_keys, set[str]()

    def noting(self: Any, info: Any) -> None:
        unexpected.update(info.unexpected_keys)
        adjust(self, info)

    with _LOADING:
        base._adjust_missing_and_unexpected_keys = noting
        try:
            yield unexpected
        finally:
            base._adjust_missing_and_unexpected_keys = adjust


def refuse_larger(make: Callable[[], torch.nn.Module], held: int, what: str) -> None:
    """Refuse a configuration of far more weights than there are: the library would make them all, then tell which.

    Args:
        make: builds the network, here without values.
        held: how many weights the files hold.
        what: the network is called.

    Raises:
        InvalidInput: naming both.
    """
    import torch

    with torch.device("meta"):
        network = make()
    wanted, most = sum(each.numel() for each in network.parameters()), _MOST_WANTED * held
    require(wanted <= most, f"weights of config.json's {what}", wanted, f"at most {most}: the files have {held}")
    made = sum(each.nbytes for each in network.buffers())
    limit = f"at most {_MOST_MADE}: no file holds them"
    require(made <= _MOST_MADE, f"bytes that config.json's {what} has computed", made, limit)


def refuse_incomplete(
    field: str,
    value: str,
    missing: Collection[str],
    misshapen: Mapping[str, tuple[Collection[int], Collection[int]]],
) -> None:
    """Refuse weights that are not all there: what would stand in for them is random.

    Args:
        field: what has been loaded.
        value: its name.
        missing: names of tensors; a tied one whose other half is there is not missing.
        misshapen: the stored shape and the configuration's of each tensor where they differ.

    Raises:
        InvalidInput: with the first few names, and how many there are.
    """
    shapes = [f"{name} {list(misshapen[name][0])}, not {list(misshapen[name][1])}" for name in sorted(misshapen)]
    faults = {"tensors missing": sorted(missing), "tensors of another shape": shapes}
    told = [f"{fault}: {counted(tensors)}" for fault, tensors in faults.items() if tensors]
    if told:
        raise InvalidInput.of(field, value, f"whole; {'; '.join(told)}")
