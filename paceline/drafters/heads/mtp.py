"""Multi-token prediction behind the engine interface.

Every depth computes every row. Depth 0 reads the target's feature of the token before, where it was given, and its
output predicts the next token. A row that lies d rows behind the last given feature reads the output that its
parent's row predicted from, and depth d's output predicts the next token. After the last depth comes the first again,
so a single depth is applied to its own output, as published engines do.

The first token has none before it: depth k has no rows of the first k + 1 tokens. They are computed as all rows are,
and masked from all others.

Multi-token prediction as a network: the layers that DeepSeek-V3 and others train behind their own last one.

Each depth joins the embedding of a token with the hidden state of the token before it, then runs one decoder layer of
the target's own kind, and a norm. Its output predicts the next token and is the next depth's hidden state
(DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.drafters.heads.own_features import OwnFeaturesEngine, RowInputs, RowOutputs, parent_row
from paceline.engine.attention import AttentionFacts, packed_attention, visible_keys
from paceline.engine.decoder import examine
from paceline.engine.features import FeatureEngine
from paceline.engine.forward import AttentionCall, attending
from paceline.engine.index import INDICES, IndexCall
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import SessionKV, keep_rows
from paceline.engine.ledger import LedgerEngine, depths
from paceline.engine.memory import plan_memory
from paceline.engine.transformer import ComputeThreads
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import EngineSettings

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


@dataclass(frozen=True, eq=False)
class _MtpSession:
    """One session's rows: keys and values, and the outputs of every depth but the last."""

    kv: SessionKV
    outputs: torch.Tensor  # [max rows, depths - 1, hidden]

    def keep(self, item: StepItem) -> None:
        """Keep the rows that a step keeps."""
        self.kv.keep(item.base_length, item.kept_rows)
        keep_rows(self.outputs, 0, item.base_length, item.kept_rows)
        # Masks hide slots that no row has written yet, but their contents must be finite.
        self.kv.fill(item.base_length + len(item.token_ids))


@dataclass(frozen=True, eq=False)
class _NewRows:
    """One session's part of a step."""

    session: _MtpSession
    item: StepItem

    @property
    def new(self) -> slice:
        """The new rows among the session's."""
        return slice(self.item.base_length, self.item.base_length + len(self.item.token_ids))

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens."""
        return [self.item.trunk + depth - 1 for depth in depths(self.item)]

    def visible(self, depth: int, facts: AttentionFacts) -> torch.Tensor:
        """Which keys the rows of a depth see, which has no rows of the first tokens: [new, base + new]."""
        kind = facts.kinds[facts.kind_of_layer[depth]]
        visible = visible_keys(self.item, kind.horizon)
        visible[:, : depth + 1] = False
        new = np.arange(len(visible))
        visible[new, self.new.start + new] = True  # each row sees itself, though nothing else
        return torch.from_numpy(visible).to(facts.shape.device)

    def outputs_before(self, depth: int) -> torch.Tensor:
        """A depth's outputs of the rows' parents: [new, hidden]."""
        parents = [parent_row(self.item, row) for row in range(len(self.item.token_ids))]
        outputs = self.session.outputs[parents, depth]
        outputs[[parent < 0 for parent in parents]] = 0.0
        return outputs


@dataclass(frozen=True, eq=False)
class _DepthAttention:
    """Attention of the new rows of several sessions, packed in their order, in one depth."""

    everyone: tuple[_NewRows, ...]
    depth: int
    facts: AttentionFacts

    def attend(self, call: AttentionCall) -> torch.Tensor:
        masks = call.extras.get(INDICES) or [
            torch.zeros_like(visible, dtype=call.query.dtype).masked_fill_(~visible, float("-inf"))
            for visible in (rows.visible(self.depth, self.facts) for rows in self.everyone)
        ]
        parts = [self._attend(*each, call, mask) for each, mask in zip(self._parts(), masks, strict=True)]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def choose(self, call: IndexCall) -> tuple[torch.Tensor, ...]:
        """As `paceline.engine.index.Chooser`: an additive mask [new, base + new] of each session."""
        return call.masks(
            (part, each.session.kv.index_keys(self.depth)[: each.new.stop], each.visible(self.depth, self.facts))
            for each, part in self._parts()
        )

    def _parts(self) -> Iterator[tuple[_NewRows, slice]]:
        """Each session's rows, and where they are in the step."""
        low = 0
        for rows in self.everyone:
            high = low + len(rows.item.token_ids)
            yield rows, slice(low, high)
            low = high

    def _attend(self, rows: _NewRows, part: slice, call: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
        """[1, heads, new, value_width]; `mask`: additive, [new, base + new]."""
        kv, end = rows.session.kv, rows.new.stop
        keys, values = kv.keys(self.depth), kv.values(self.depth)
        keys[:, rows.new], values[:, rows.new] = call.key[0, :, part], call.value[0, :, part]
        queries = call.query[:, :, part]
        _, heads, count, width = queries.shape
        by_key = queries.reshape(1, len(keys), heads // len(keys) * count, width)
        by_head = mask.repeat(heads // len(keys), 1)
        attention = packed_attention(call, by_key, keys[None, :, :end], values[None, :, :end], by_head)
        return attention.reshape(1, heads, count, values.shape[2])


class MtpRows(LedgerEngine[torch.Tensor]):
    """A `RowNetwork` (`paceline.drafters.heads.own_features`), whose contracts its methods keep."""

    need = FeatureNeed((FINAL,))
    """Every published layout reads what the target's head reads: `paceline.drafters.formats.mtp`."""

    def __init__(
        self, network: MtpNetwork, info: EngineInfo, facts: AttentionFacts, settings: EngineSettings
    ) -> None:
        super().__init__(info, settings)
        self._network = network
        self._facts, kv_shape = facts, facts.shape
        self._threads = ComputeThreads()
        self._sessions: dict[int, _MtpSession] = {}
        self.feature_width = network.hidden_size
        self.empty_feature = torch.zeros(network.hidden_size, dtype=kv_shape.dtype, device=kv_shape.device)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Features, unchanged: each depth norms them itself."""
        return rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        self._ledger.open(session, max_rows)
        outputs = self.empty_feature.new_empty((max_rows, self._network.depths - 1, self.feature_width))
        self._sessions[session] = _MtpSession(SessionKV(self._facts.shape, max_rows), outputs)
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._sessions.pop(session, None)

    def check(self, plan: StepPlan) -> None:  # noqa: D102
        self._ledger.check(plan)

    @torch.inference_mode()
    def compute(self, plan: StepPlan, inputs: RowInputs) -> RowOutputs:  # noqa: D102
        self._threads.bind()
        for item in plan.items:
            self._sessions[item.session].keep(item)
        self._ledger.apply(plan)
        everyone = tuple(_NewRows(self._sessions[item.session], item) for item in plan.items)
        outputs = self._run(everyone, inputs.features)
        depths = [max(distance, 0) % self._network.depths for distance in inputs.distances]
        own = torch.stack(outputs, dim=1)[range(len(depths)), depths]
        return RowOutputs(self._logits(plan, own), own)

    def _run(self, everyone: tuple[_NewRows, ...], features: torch.Tensor) -> list[torch.Tensor]:
        """Every depth's outputs, each [rows, hidden]."""
        device, sizes = self._facts.shape.device, [len(rows.item.token_ids) for rows in everyone]
        positions = torch.tensor([position for rows in everyone for position in rows.positions], device=device)
        tokens = torch.tensor([token for rows in everyone for token in rows.item.token_ids], device=device)
        embeddings = self._network.embed(tokens, positions)
        outputs: list[torch.Tensor] = []
        for depth in range(self._network.depths):
            if depth:
                for rows, depth_outputs in zip(everyone, outputs[-1].split(sizes), strict=True):
                    rows.session.outputs[rows.new, depth - 1] = depth_outputs
                features = torch.cat([rows.outputs_before(depth - 1) for rows in everyone])
            with attending(_DepthAttention(everyone, depth, self._facts)):
                outputs.append(self._network.run(depth, embeddings, features, positions))
        return outputs

    def _logits(self, plan: StepPlan, own: torch.Tensor) -> list[Logits]:
        logit_rows, start = [], 0
        for item in plan.items:
            logit_rows += [start + row for row in item.logit_rows]
            start += len(item.token_ids)
        width = self.info.fingerprint.vocab_size
        logits: Logits = self._network.logits(own[logit_rows])[:, :width].float().cpu().numpy()
        return np.split(logits, np.cumsum([len(item.logit_rows) for item in plan.items])[:-1])


def build_mtp_engine(network: MtpNetwork, tokenizer: Tokenizer, settings: EngineSettings, name: str) -> FeatureEngine:
    """Serve a network, after checking that its layers can be.

    Raises:
        InvalidInput: the vocabulary, a length or the memory doesn't fit.
        Unsupported: packed attention can't do what the layers ask for; says what.
    """
    facts = examine(network.decoder, tokenizer, settings, name)
    memory = plan_memory(network.decoder, settings, facts.attention, facts.max_length, packs=False)
    # Beside keys and values a row keeps its feature and the output of each depth.
    row_bytes = memory.row_bytes + (network.depths + 1) * network.hidden_size * network.decoder.dtype.itemsize
    return OwnFeaturesEngine(MtpRows(network, facts.info(memory.kv // row_bytes), facts.attention, settings))
