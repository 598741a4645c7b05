"""One rank's engine of a transformers decoder."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from paceline.engine.attention import SINKS, AttentionFacts
from paceline.engine.checks import RAGGED_TERMS, PlainReference, plain_reference, self_check
from paceline.engine.cpu.fused import fuse_layers
from paceline.engine.cpu.linear import can_pack, pack_linears
from paceline.engine.cuda.device import empty_caches
from paceline.engine.cuda.graphs import runner_for
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.decoder import DecoderFacts, capture_common, examine, whole_kv_rows
from paceline.engine.fingerprint import weights_digest
from paceline.engine.interface import Engine
from paceline.engine.memory import plan_memory
from paceline.engine.parallel.draws import vocabulary_shares
from paceline.engine.parallel.group import RankGroup
from paceline.engine.parallel.sharding import check_degree, shard_model, shard_shape
from paceline.engine.transformer import ServedDecoder, TransformerEngine
from paceline.engine.weights import computing_in, load_decoder, select_dtype
from paceline.models.resolve import resolve
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.models.whole import refusing_network
from paceline.protocol.errors import Unsupported
from paceline.runtime.config import EngineSettings

logger = logging.getLogger(__name__)


def load_decoder_share(
    model: str, settings: EngineSettings, group: RankGroup, device: torch.device
) -> tuple[TransformerEngine | StaticEngine, PlainReference | None]:
    """Load one rank's share; settings are those of one rank.

    Returns:
        The engine, and on rank 0 what the self-check of all ranks compares it with.

    Raises:
        InvalidInput, Unsupported: as for `build_engine`; or the degree doesn't fit the model.
    """
    source = resolve(model)
    decoder = load_decoder(source, settings, on_host=True, as_stored=True)
    tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
    return build_share(decoder, tokenizer, settings, source.name, group, device)


def build_share(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    name: str,
    group: RankGroup,
    device: torch.device,
    *,
    static: bool | None = None,
) -> tuple[TransformerEngine | StaticEngine, PlainReference | None]:
    """Make one rank's engine of a whole decoder on the host, of which it keeps its share, in the dtype to serve in.

    Returns:
        As `load_decoder_share`; `static` as for `build_engine`.

    Raises:
        InvalidInput, Unsupported: as for `build_engine`; or the degree doesn't fit the model.
    """
    if settings.reproducible:
        raise Unsupported(f"reproducible = true with {group.size} ranks: one process only")
    own_or_dtype = select_dtype(settings.dtype, device)
    dtype = own_or_dtype if isinstance(own_or_dtype, torch.dtype) else model.dtype
    with refusing_network(name), computing_in(model, dtype):
        check_degree(model.config, group.size)
        facts = examine(model, tokenizer, settings, name, ranks=group.size, device=device, dtype=dtype, static=static)
        _refuse_attention(type(model).__name__, facts.attention, group.size)
        # How many rows fit is known once the weights are in place; what the check needs always fits.
        reference = replace(_reference(model, facts), dtype=dtype) if group.rank == 0 else None
    digest = weights_digest(model)
    vocab_size = facts.fingerprint.vocab_size
    shard_model(model, group, vocabulary_shares(vocab_size, group.size)[group.rank], dtype, facts.read_outside)
    torch.nn.Module.to(model, device)  # what transformers annotates of `to` is not its own
    shape = replace(facts.attention.shape, dtype=dtype)
    attention = replace(facts.attention, shape=shard_shape(shape, group.size, device))
    packs, static = can_pack(model), facts.static
    memory = plan_memory(
        model, settings, attention, facts.max_length, packs=packs, static=static, features=facts.features
    )
    logger.info("rank %d: %s", group.rank, memory)
    if packs or static:
        fuse_layers(model)
        empty_caches(device)
    if packs:
        pack_linears(model, exclude=facts.read_outside)
    same = json.dumps([facts.fingerprint.tokenizer, vocab_size, facts.max_length, str(model.dtype), digest])
    rows = group.agree(same, whole_kv_rows(memory, settings, static=static))
    decoder = ServedDecoder(model, facts.info(rows), attention, settings)
    if not static:
        return TransformerEngine(decoder), reference
    engine = StaticEngine(decoder, runner_for(device, graphs=settings.cuda_graphs))
    capture_common(engine, settings, name, with_race=False)  # all ranks at once: sums are part of a step
    return engine, reference


def check_ranks(engine: Engine, own: Engine, reference: PlainReference) -> None:
    """Check all ranks' engine; where steps of rank 0's own are captured, before, meanwhile and replayed.

    Raises:
        Unsupported: as `self_check`.
    """
    for _ in range(3 if isinstance(own, StaticEngine) and own.has_graphs else 1):
        self_check(engine, reference)


def _reference(model: PreTrainedModel, facts: DecoderFacts) -> PlainReference:
    return plain_reference(model, facts.info(4 * facts.max_length), facts.attention)


def _refuse_attention(name: str, attention: AttentionFacts, ranks: int) -> None:
    """Refuse windows, which the check would have to narrow on every rank, and what is not split by head."""
    if attention.has_windows:
        raise Unsupported(f"{name}: sliding windows or chunks with {ranks} ranks: one process only")
    if attention.mixers:
        raise Unsupported(f"{name}: recurrent layers with {ranks} ranks: one process only")
    for term, words in {SINKS: "attention sinks", **RAGGED_TERMS}.items():
        if term in attention.terms:
            raise Unsupported(f"{name}: {words} with {ranks} ranks: one process only")
