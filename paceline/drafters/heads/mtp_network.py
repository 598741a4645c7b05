"""Multi-token prediction as a network: the layers that DeepSeek-V3 and others train behind their own last one.

Each depth joins the embedding of a token with the hidden state of the token before it, then runs one decoder layer of
the target's own kind, and a norm. Its output predicts the next token and is the next depth's hidden state
(DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

FIRST_READ_POSITION = 1
"""Position of the first token that has one before it."""


@dataclass(frozen=True)
class MtpForm:
    """The variations of published networks, names aside.

    Attributes:
        embedding_first: the order in which embedding and hidden state are joined.
        blank_first: whether the first token that has one before it is read without its embedding.
    """

    embedding_first: bool = True
    blank_first: bool = False


class MtpFusion(nn.Module):
    """Joins a token's embedding with the hidden state of the token before it."""

    def __init__(self, norm: nn.Module, hidden_size: int, eps: float, *, embedding_first: bool) -> None:
        """Begin with random weights; the two norms are of the same kind as `norm`."""
        super().__init__()
        kind: Any = type(norm)
        self.embedding_norm: nn.Module = kind(hidden_size, eps=eps)
        self.hidden_norm: nn.Module = kind(hidden_size, eps=eps)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self._embedding_first = embedding_first

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Each [rows, hidden] → [rows, hidden]."""
        pair = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        output: torch.Tensor = self.projection(torch.cat(pair if self._embedding_first else pair[::-1], dim=-1))
        return output


class MtpNetwork(nn.Module):
    """One layer a depth, with the embedding, the rotations and the head of `decoder`, whose layers they are.

    Attention is that of `paceline.engine.forward`: run it within `attending`.
    """

    def __init__(self, decoder: PreTrainedModel, form: MtpForm) -> None:
        """Take a decoder of as many layers as there are depths; its last norm becomes the first depth's."""
        super().__init__()
        self.decoder = decoder
        self.form = form
        config: Any = decoder.config.get_text_config()
        inner: Any = decoder.get_decoder()
        size, eps = config.hidden_size, config.rms_norm_eps
        depths = range(config.num_hidden_layers)
        first = form.embedding_first
        self.fusions = nn.ModuleList([MtpFusion(inner.norm, size, eps, embedding_first=first) for _ in depths])
        self.norms = nn.ModuleList([inner.norm, *(type(inner.norm)(size, eps=eps) for _ in depths[1:])])
        self.to(decoder.dtype)

    @property
    def depths(self) -> int:
        """Layers, each of which looks one token further ahead."""
        return len(self.fusions)

    @property
    def hidden_size(self) -> int:
        """Width of features and outputs."""
        size: int = self.decoder.config.get_text_config().hidden_size
        return size

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens as every depth reads them. Each [rows] → [rows, hidden]."""
        embedding: Any = self.decoder.get_input_embeddings()
        embeddings: torch.Tensor = embedding(token_ids)
        if self.form.blank_first:
            embeddings = embeddings.masked_fill((positions == FIRST_READ_POSITION)[:, None], 0.0)
        return embeddings

    def run(
        self, depth: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One depth of rows that form one packed sequence.

        Args:
            depth: counted from 0.
            embeddings: [rows, hidden], as `embed` gives them.
            hidden: [rows, hidden], of the token before each: the target's features at depth 0, else the output of the
                depth before.
            positions: [rows], of the tokens that are embedded.

        Returns:
            [rows, hidden]; the head and the next depth read it.
        """
        inner: Any = self.decoder.get_decoder()
        inputs = self.fusions[depth](embeddings, hidden)[None]
        rotation = inner.rotary_emb(inputs, position_ids=positions[None])
        out = inner.layers[depth](
            inputs,
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=rotation,
        )
        output: torch.Tensor = self.norms[depth](out[0] if isinstance(out, tuple) else out)
        return output[0]

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, tensor width]."""
        head: Any = self.decoder.get_output_embeddings()
        logits: torch.Tensor = head(outputs)
        return logits
