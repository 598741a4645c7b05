"""A model of a real shape with random weights, whose first layers are a draft that agrees as often as asked.

    python -m paceline_lab.bench.gpu.pair FOLDER --tokenizer smollm2-135m
    paceline bench load FOLDER --drafter 'model:FOLDER#layers=0,1' --sessions 1,4,16 --k 4

Where no weights can be had, it shows what drafting gains on a GPU: target and draft cost what their shapes cost. The
draft has the target's embedding, head and first layers; what the others add is scaled until the two agree so often.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.models.model_files import model_file
from paceline.models.resolve import resolve
from paceline.protocol.errors import PacelineError, require
from paceline_lab.bench.gpu.models import DEVIATION, SHAPES, random_model

LOGIT_DEVIATION = 8.0
"""Of the logits of one place; of 128,256 tokens the likeliest then has a probability of some .4 at temperature 1."""
MAX_LENGTH = 4096
_BISECTIONS, _LOWEST, _HIGHEST = 14, 2.0**-8, 2.0**12
_SEQUENCES, _LENGTH = 16, 128
"""Of random tokens, at which agreement is measured: 2,048 places, so it is within .01 or so."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@torch.inference_mode()
def make_target(shape: str, layers: int, agreement: float, device: torch.device) -> tuple[Any, float]:
    """Return a model in bfloat16, and the share of greedy tokens that it has in common with its first layers.

    Args:
        shape: one of `SHAPES`; the head is apart from the embedding.
        layers: how many the draft has.
        agreement: the share to aim for.
        device: where weights are made.

    Raises:
        InvalidInput: the draft would have no layer, or all of them.
    """
    target: Any = random_model(shape, torch.bfloat16, device, MAX_LENGTH, tie_word_embeddings=False)
    target.get_input_embeddings().weight.mul_(1 / DEVIATION)
    head_deviation = LOGIT_DEVIATION / math.sqrt(target.config.hidden_size)
    target.get_output_embeddings().weight.mul_(head_deviation / DEVIATION)
    every_layer = target.model.layers
    require(1 <= layers < len(every_layer), "layers", layers, f"in [1, {len(every_layer) - 1}]")
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(target.config.vocab_size, (_SEQUENCES, _LENGTH), device=device, generator=generator)
    target.model.layers = every_layer[:layers]
    draft_tokens = _greedy(target, tokens)
    target.model.layers = every_layer
    low, high, scale, share = math.log2(_LOWEST), math.log2(_HIGHEST), 1.0, 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        _scale_layers(every_layer[layers:], 2**middle / scale)
        scale = 2**middle
        share = float((_greedy(target, tokens) == draft_tokens).float().mean())
        low, high = (middle, high) if share > agreement else (low, middle)
    return target, share


def _scale_layers(layers: Any, factor: float) -> None:
    """Scale what layers add to the residual stream."""
    for layer in layers:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


def _greedy(model: Any, tokens: torch.Tensor) -> torch.Tensor:  # [sequences, length] → the same
    return torch.stack([model(each[None], use_cache=False).logits[0].argmax(-1) for each in tokens])


def main(argv: Sequence[str] | None = None) -> None:
    """Make a target and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES], default="8b")
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--agreement", type=float, default=0.75, help="share of greedy tokens that are the same")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="the model whose tokenizer it gets")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    try:
        source = resolve(arguments.tokenizer)
        files = [file for name in _TOKENIZER_FILES if (file := model_file(source, name)) is not None]
        has_tokenizer = _TOKENIZER_FILES[0] in {file.name for file in files}
        require(has_tokenizer, "tokenizer", arguments.tokenizer, f"a model with {_TOKENIZER_FILES[0]}")
        target, share = make_target(arguments.shape, arguments.layers, arguments.agreement, device)
    except PacelineError as error:
        sys.exit(error.message)
    target.save_pretrained(arguments.folder)
    for file in files:
        shutil.copy(file, arguments.folder)
    print(f"greedy tokens of the first {arguments.layers} layers are the model's at {share:.3f} of the places")


if __name__ == "__main__":
    main()
