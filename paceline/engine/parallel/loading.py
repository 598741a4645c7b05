"""From a model's name to rank 0's engine, or to a rank that follows it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paceline.config import EngineSettings
from paceline.engine.decoder import (
    PlainReference,
    chosen_device,
    examine,
    kv_budget,
    load_decoder,
    load_decoder_config,
    plain_reference,
    self_check,
    weights_digest,
)
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.linear import can_pack, pack_linears
from paceline.engine.parallel.draws import Share, vocabulary_shares
from paceline.engine.parallel.engine import ParallelEngine, follow
from paceline.engine.parallel.group import Place, ProcessRanks, RankGroup
from paceline.engine.parallel.sharding import check_degree, shard_model, shard_shape
from paceline.engine.tables import load_table
from paceline.engine.transformer import TransformerEngine
from paceline.engine.wrapped import WrappedEngine
from paceline.errors import InvalidInput
from paceline.models import ResolvedModel, resolve
from paceline.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def lead(
    model: str, settings: EngineSettings, place: Place, listener: int | None, on_lost: Callable[[str], None]
) -> ParallelEngine:
    """Load rank 0's share and join the others.

    Args:
        model: anything that `paceline.models.resolve` knows.
        settings: of the whole service; threads are divided between the ranks of a machine.
        place: of this rank.
        listener: see `ProcessRanks`.
        on_lost: told why, once, on any thread, when the group has failed.

    Raises:
        InvalidInput, Unsupported: as for `load_engine`; or the degree doesn't fit the model.
    """
    resolved = resolve(model)
    if resolved.kind != "table":
        check_degree(load_decoder_config(resolved, settings), place.size)
    share = _join(resolved, model, settings, place, listener)
    engine = ParallelEngine(share.engine, share.group, on_lost)
    if share.reference is not None:
        self_check(engine, share.reference)
    return engine


def serve_rank(model: str, settings: EngineSettings, place: Place) -> None:
    """Load the share of a rank other than 0 and follow rank 0 until it stops.

    Raises:
        Exception: the rank can't be loaded, or the group has failed.
    """
    share = _join(resolve(model), model, settings, place, None)
    logger.info("following: rank=%d of %d", place.rank, place.size)
    follow(share.engine, share.group)
    share.group.close()


@dataclass(frozen=True)
class RankEngine:
    """One rank's share of a model; `reference` on rank 0, where the model is a decoder."""

    engine: Engine
    group: RankGroup
    reference: PlainReference | None = None


class TableShare(WrappedEngine):
    """A whole table on every rank, each showing its share of the vocabulary."""

    def __init__(self, inner: Engine, share: Share) -> None:
        super().__init__(inner)
        self._share = share

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return [logits[:, self._share.first : self._share.last] for logits in self._inner.step(plan)]


def build_share(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    name: str,
    group: RankGroup,
    device: torch.device,
    agree: Callable[[str, int], int],
) -> RankEngine:
    """Make one rank's engine of a whole decoder in host memory, of which it keeps its share.

    `agree`: given what must be the same on all ranks and the KV rows that fit here, the rows that fit everywhere.

    Raises:
        InvalidInput, Unsupported: as for `build_engine`; or the degree doesn't fit the model.
    """
    check_degree(model.config, group.size)
    facts = examine(model, tokenizer, settings, name, ranks=group.size, device=device)
    digest = weights_digest(model)
    # How many rows fit is known once the weights are in place; what the check needs always fits.
    reference = plain_reference(model, facts.info(4 * facts.max_length)) if group.rank == 0 else None
    vocab_size = facts.fingerprint.vocab_size
    shard_model(model, group, vocabulary_shares(vocab_size, group.size)[group.rank])
    model.to(device)
    if can_pack(model):
        pack_linears(model)
    shape = shard_shape(facts.kv_shape, group.size, device)
    same = json.dumps([facts.fingerprint.tokenizer, vocab_size, facts.max_length, str(model.dtype), digest])
    rows = agree(same, kv_budget(settings, shape) // shape.row_bytes)
    engine = TransformerEngine(model, facts.info(rows), shape, settings.max_num_seqs, facts.threads)
    return RankEngine(engine, group, reference)


def _join(
    resolved: ResolvedModel, model: str, settings: EngineSettings, place: Place, listener: int | None
) -> RankEngine:
    settings = _of_one_rank(settings, place)
    if resolved.kind == "table":
        group = ProcessRanks(place, torch.device("cpu"), listener)
        table = load_table(resolved.location, settings.max_num_seqs)
        info = table.info
        _agree(group, info.fingerprint.numeric, info.max_kv_rows)
        share = vocabulary_shares(info.fingerprint.vocab_size, group.size)[group.rank]
        return RankEngine(TableShare(table, share), group)
    device = _rank_device(settings.device, place)
    group = ProcessRanks(place, device, listener)
    decoder = load_decoder(resolved, settings, on_host=True)
    tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
    return build_share(
        decoder, tokenizer, settings, resolved.name, group, device, lambda same, rows: _agree(group, same, rows)
    )


def _agree(group: ProcessRanks, same: str, max_kv_rows: int) -> int:
    """The KV rows that every rank has room for, once all have loaded the same model.

    Raises:
        InvalidInput: another rank has loaded something else.
    """
    own = hashlib.sha256(same.encode()).hexdigest()
    found = [json.loads(each) for each in group.gather_facts(json.dumps([own, max_kv_rows]).encode())]
    for rank, (digest, _) in enumerate(found):
        if digest != found[0][0]:
            raise InvalidInput.of(f"the model of rank {rank}", digest, f"rank 0's, {found[0][0]}")
    return int(min(rows for _, rows in found))


def _of_one_rank(settings: EngineSettings, place: Place) -> EngineSettings:
    """The ranks of a machine divide its cores."""
    threads = settings.threads or torch.get_num_threads()
    return settings.model_copy(update={"threads": max(1, threads // place.local_size)})


def _rank_device(name: str, place: Place) -> torch.device:
    device = chosen_device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if device.index is not None or place.local_size > count:
        raise InvalidInput.of("device", name, f"cuda, with a GPU for each of {place.local_size} ranks; {count} found")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)
