"""Training of networks that read their own outputs: EAGLE, multi-token prediction.

Row p is the token at position p. It reads the features of the token before it and predicts the next token. The
target's features are known up to the last committed token, so a round's first row reads those, and each further row
reads the output of the row before it. Training does the same for every position at once (training-time test, EAGLE-3,
arXiv 2503.01840, §3.1; HASS, arXiv 2408.15766): step 0 reads the target's features everywhere, step s the outputs of
step s - 1. A row of step s attends to the rows of a served round: those of step 0 up to where its round began, and
one row of each step since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.forward import AttentionCall, attending
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import FeatureNeed
from paceline_training.trainee import DEPTH_WEIGHT, DepthLogits, Lesson

FIRST_ROW = 1
"""Position of the first token that has one before it."""
REGRESSION_WEIGHT = 10.0
"""Weight of EAGLE-1's feature loss beside its token loss, as in EAGLE (arXiv 2401.15077, §4.2: 1 to .1)."""

_EXTRAS = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What layers pass to attention that is masked or scored in another way."""


@dataclass(eq=False)
class UnrolledAttention:
    """Attention of a text whose rows are computed once a step; row i of every step belongs to the same round."""

    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # layer → steps · [1, kv_heads, rows, head_dim]
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """A row attends to step 0 up to its own place, and to its own place in each step since.

        Returns:
            [1, rows, heads, head_dim].

        Raises:
            Unsupported: the layer asks for a window, a soft cap, sinks or a position bias.
        """
        for extra in _EXTRAS:
            if call.extras.get(extra) is not None:
                raise Unsupported(f"{type(call.module).__name__}: attention with {extra} is not trained")
        keys = self.keys.setdefault(call.layer, [])
        values = self.values.setdefault(call.layer, [])
        keys.append(call.key)
        values.append(call.value)
        output = functional.scaled_dot_product_attention(
            call.query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=self._mask(call.query, [each.shape[2] for each in keys]),
            scale=call.scaling,
            enable_gqa=call.query.shape[1] != call.key.shape[1],
        )
        return output.transpose(1, 2)

    def _mask(self, query: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """[rows, rows of all steps], true where a row attends."""
        rows = query.shape[2]
        first = torch.ones(rows, steps[0], dtype=torch.bool, device=query.device).tril()
        own = [torch.eye(rows, size, dtype=torch.bool, device=query.device) for size in steps[1:]]
        return torch.cat([first, *own], dim=1)


class RecurrentNetwork(Protocol):
    """The served network, whose rows read a token and the state of the token before it."""

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [rows, layers · hidden] as rows read them: [rows, hidden]."""

    def __call__(self, token_ids: torch.Tensor, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One packed sequence, attention being `paceline.engine.forward`'s.

        Args:
            token_ids: [1, rows].
            inputs: [1, rows, hidden]; state of the token before each.
            positions: [1, rows]; of the token before each.

        Returns:
            [1, rows, hidden]; the state that the next row reads after the target's features end.
        """

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, draft size or more]; logits after the draft's size are padding."""


@dataclass(frozen=True, eq=False)
class RecurrentTrainee:
    """A recurrent network in training.

    Attributes:
        own: trained weights by their published names.
        write: writes them to a folder in the published layout.
        regresses: whether outputs are also trained to be near the target's feature of the same token (EAGLE-1).
    """

    network: RecurrentNetwork
    own: Mapping[str, torch.nn.Parameter]
    write: Callable[[Path, Mapping[str, torch.nn.Parameter]], None]
    vocabulary: DraftVocabulary
    need: FeatureNeed
    depth: int
    regresses: bool = False

    def weights(self) -> Mapping[str, torch.nn.Parameter]:  # noqa: D102
        return self.own

    def save(self, folder: Path) -> None:  # noqa: D102
        self.write(folder, self.own)

    def draft_logits(self, lesson: Lesson) -> list[DepthLogits]:  # noqa: D102
        depths: list[DepthLogits] = []
        for step, outputs in enumerate(self.outputs(lesson)):
            first = FIRST_ROW + step  # position of the first row's token
            label_rows = np.flatnonzero(lesson.places > first)
            inputs = torch.from_numpy(lesson.places[label_rows] - 1).to(outputs.device)  # token positions
            row_outputs = outputs[inputs - first]
            weight, penalty = DEPTH_WEIGHT**step, None
            if self.regresses:
                distance = functional.smooth_l1_loss(row_outputs.float(), lesson.features[inputs], reduction="none")
                penalty = REGRESSION_WEIGHT * weight * distance.mean(-1).sum()
            logits = self.network.logits(row_outputs)[:, : self.vocabulary.size]
            depths.append(DepthLogits(logits, torch.from_numpy(label_rows).to(outputs.device), weight, penalty))
        return depths

    def outputs(self, lesson: Lesson) -> list[torch.Tensor]:
        """Outputs of each step: row i of step s is the token at position 1 + i + s. Each [rows, hidden]."""
        device = lesson.features.device
        tokens = torch.from_numpy(lesson.row.token_ids[:-1].astype(np.int64)).to(device)
        steps: list[torch.Tensor] = []
        inputs = self.network.project(lesson.features[:-1])
        with attending(UnrolledAttention()):
            for step in range(min(self.depth, len(tokens) - FIRST_ROW)):
                positions = torch.arange(FIRST_ROW + step, len(tokens), device=device)
                rows = tokens[positions][None], inputs[: len(positions)][None], positions[None] - 1
                inputs = self.network(*rows)[0]
                steps.append(inputs)
        return steps
