"""Loading with transformers: quietly, whole or not at all, files that are damaged or incomplete refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.resolve import ResolvedModel
from paceline.protocol.errors import DamagedFile, InvalidInput, PacelineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LISTED_TENSORS = 3
"""Names of tensors in a refusal."""
_LONG_LINE = 160
"""Characters of a library's message from which only its first sentence is shown."""
_SENTENCE_END = re.compile(r"\.\s")


@contextmanager
def refusing_files(resolved: ResolvedModel, value: str, wanted: str) -> Iterator[None]:
    """Refuse a model for what the libraries raise while they read its files.

    Args:
        resolved: the model.
        value: its name, as shown to users.
        wanted: what the files must be.

    Raises:
        DamagedFile: naming the file.
        InvalidInput: transformers loads nothing from them; says why.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError):
            raise DamagedFile.at(_damaged_safetensors(resolved), str(error)) from error
        if isinstance(error, OSError | ValueError | RuntimeError):
            raise InvalidInput.of("model", value, f"{wanted} ({_gist(error)})") from error
        raise


def _gist(error: Exception) -> str:
    """The first line of what transformers says, of a long one the first sentence: then comes all that it knows."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which runs only with trust_remote_code = true"
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= _LONG_LINE else _SENTENCE_END.split(line)[0]


def _damaged_safetensors(resolved: ResolvedModel) -> Path:
    """The first of a model's files that can't be opened; their folder, if none is left."""
    from safetensors import SafetensorError, safe_open
    from transformers.utils import CONFIG_NAME
    from transformers.utils.hub import cached_file

    cached = cached_file(resolved.location, CONFIG_NAME) if resolved.kind == "hub" else None
    folder = Path(resolved.location) if cached is None else Path(cached).parent
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return folder


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal, which shows ours."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions are not annotated
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_whole(name: str, **arguments: Any) -> PreTrainedModel:
    """Load a causal language model every tensor of which is its files'; transformers makes up what they lack.

    Args:
        name: shown to users.
        arguments: as `from_pretrained` takes them; a `config` and a `state_dict` stand for files.

    Raises:
        InvalidInput: tensors are missing or of another shape than the configuration's.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    # Its annotation knows of no loading info.
    library: Any = (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(arguments["config"])] if "state_dict" in arguments else AutoModelForCausalLM
    )
    loaded: PreTrainedModel
    loaded, found = library.from_pretrained(
        **arguments,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are named here
    )
    misshapen = {tensor: (stored, wanted) for tensor, stored, wanted in found["mismatched_keys"]}
    refuse_incomplete("model", name, found["missing_keys"], misshapen)
    return loaded


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
    told = [f"{fault}: {_counted(tensors)}" for fault, tensors in faults.items() if tensors]
    if told:
        raise InvalidInput.of(field, value, f"whole; {'; '.join(told)}")


def _counted(tensors: list[str]) -> str:
    more = ["…"] if len(tensors) > _LISTED_TENSORS else []
    return f"{len(tensors)} ({', '.join(tensors[:_LISTED_TENSORS] + more)})"
