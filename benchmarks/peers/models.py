"""The target and our draft in the forms that peers read, made from the same weights.

Run as a program it exports a draft: `python -m benchmarks.peers.models DRAFT TARGET OUT`
(in a process of its own, since it holds the target in memory).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.process import PeerFailed
from paceline.models.pull import fetch_gguf
from paceline.models.pullable import PULLABLE
from paceline.models.resolve import resolve, resolve_draft

CONVERT_SECONDS = 600.0
_SKIPPED_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def hf_folder(model: str) -> str:
    """Folder or hub id that transformers and vLLM load.

    Raises:
        PeerFailed: the model has no such form.
    """
    resolved = resolve(model)
    if resolved.kind not in ("folder", "hub") or resolved.layers is not None:
        raise PeerFailed(f"{model}: no safetensors folder that other systems load")
    return resolved.location


def float32_gguf(model: str, home: Path) -> Path:
    """The model as a GGUF of float32 tensors, made once and kept in `home`.

    Raises:
        PeerFailed: no GGUF is known for this model.
    """
    out = home / "models" / f"{Path(model).stem}-f32.gguf"
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    resolved = resolve(model)
    if resolved.kind == "gguf" and resolved.gguf_file is not None:
        write_float32(Path(resolved.location) / resolved.gguf_file, out)
    elif model in PULLABLE:
        source = fetch_gguf(model, out.parent)
        write_float32(source, out)
        source.unlink()
    else:
        raise PeerFailed(f"{model}: no GGUF to convert (give a .gguf path or a pulled model)")
    return out


def write_float32(source: Path, out: Path) -> None:
    """Copy a GGUF with every tensor dequantised: the values that our own loading gives the target."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    temporary = out.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(_SKIPPED_FIELDS):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(out)


def assistant_folder(draft: str, target: str, out: Path) -> Path:
    """Our draft as a transformers checkpoint with the target's whole vocabulary, in a process of its own.

    Raises:
        PeerFailed: with the exporter's last line.
    """
    command = [sys.executable, "-m", "benchmarks.peers.models", draft, target, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_SECONDS, check=False)
    if done.returncode != 0:
        raise PeerFailed(f"draft {draft}: not exported: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return out


def export_draft(draft: Path, target_model: str, out: Path) -> None:
    """Scatter the draft's head over the target's vocabulary and save it.

    Ids that the draft lacks get rows of zeros: a logit of 0, far below those of likely tokens, so greedy
    proposals are the draft's own. The checkpoint has the whole head's cost, which ours saves.

    Raises:
        InvalidInput: the draft can't be read, or is another target's.
    """
    import torch

    from paceline.runtime.config import EngineSettings
    from paceline.train.checkpoint import load_draft
    from paceline.train.student import Target

    target = Target.load(target_model, EngineSettings())
    loaded = load_draft(draft, target)
    student: Any = loaded.student
    reduced: Any = student.get_output_embeddings()
    size = int(student.config.get_text_config().vocab_size)
    whole = torch.nn.Linear(reduced.in_features, size, bias=False)
    with torch.no_grad():
        whole.weight.zero_()
        whole.weight[torch.from_numpy(loaded.vocabulary.d2t).long()] = reduced.weight
    student.set_output_embeddings(whole)
    student.set_attn_implementation("sdpa")
    student.save_pretrained(out)


if __name__ == "__main__":
    export_draft(Path(resolve_draft(sys.argv[1], sys.argv[2])), sys.argv[2], Path(sys.argv[3]))
