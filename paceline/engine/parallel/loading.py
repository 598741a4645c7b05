"""From a model's name to rank 0's engine, or to a rank that follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.parallel.draws import Share, vocabulary_shares
from paceline.engine.parallel.engine import ParallelEngine, follow
from paceline.engine.parallel.group import RankGroup
from paceline.engine.parallel.place import Place
from paceline.engine.table.engine import load_table
from paceline.engine.wrapped import WrappedEngine
from paceline.models.resolve import resolve
from paceline.models.table_names import is_table
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import EngineSettings
from paceline.runtime.process import end_process, keep_loaded

if TYPE_CHECKING:
    from paceline.engine.checks import PlainReference

logger = logging.getLogger(__name__)


def lead(
    model: str, settings: EngineSettings, place: Place, listener: int | None, on_lost: Callable[[str], None]
) -> ParallelEngine:
    """Load rank 0's share and join the others.

    Args:
        model: anything that `paceline.models.resolve.resolve` knows.
        settings: of the whole service; threads are divided between the ranks of a machine.
        place: of this rank.
        listener: see `RankGroup`.
        on_lost: called once with the reason, on any thread, when the group has failed.

    Raises:
        InvalidInput, Unsupported: as for `load_engine`; or the degree doesn't fit the model.
    """
    source = resolve(model)
    if source.kind != "table":
        from paceline.engine.parallel.sharding import check_degree
        from paceline.engine.weights import load_decoder_config

        # Before the ranks meet: each would refuse it, and the reason is logged once.
        check_degree(load_decoder_config(source, settings), place.size)
    device = rank_device(model, settings, place)
    group = RankGroup(place, device, listener)
    group.watch(on_lost)
    own, reference = _load_share(model, settings, place, group, device)
    engine = ParallelEngine(own, group, on_lost)
    if reference is not None:
        from paceline.engine.parallel.decoder import check_ranks

        check_ranks(engine, own, reference)
    return engine


def serve_rank(model: str, settings: EngineSettings, place: Place) -> None:
    """Join as a rank other than 0, load its share and follow rank 0 until it stops.

    Raises:
        PacelineError: the share can't be loaded.
        Exception: the group has failed.
    """
    device = rank_device(model, settings, place)
    group = RankGroup(place, device, None)
    group.watch(end_process)
    engine, _ = _load_share(model, settings, place, group, device)
    logger.info("following: rank=%d of %d", place.rank, place.size)
    keep_loaded()
    follow(engine, group)
    group.close()


def rank_device(model: str, settings: EngineSettings, place: Place) -> torch.device:
    """The device of one rank: a GPU of its own, where there are GPUs.

    Raises:
        InvalidInput: a device that isn't there, or one for all ranks.
    """
    if is_table(model):
        return torch.device("cpu")
    from paceline.engine.weights import select_device

    device = select_device(settings.device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if ":" in settings.device or place.local_size > count:
        limit = f"cuda, with a GPU for each of {place.local_size} ranks; {count} found"
        raise InvalidInput.of("device", settings.device, limit)
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


class TableShare(WrappedEngine):
    """A whole table on every rank, each showing its share of the vocabulary."""

    def __init__(self, inner: Engine, share: Share) -> None:
        super().__init__(inner)
        self._share = share

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return [logits[:, self._share.start : self._share.stop] for logits in self._inner.step(plan)]


def _load_share(
    model: str, settings: EngineSettings, place: Place, group: RankGroup, device: torch.device
) -> tuple[Engine, PlainReference | None]:
    """One rank's engine, and on rank 0 what a decoder's self-check compares with."""
    settings = _of_one_rank(settings, place)
    if is_table(model):
        table = load_table(model, settings)
        fingerprint = table.info.fingerprint
        group.agree(fingerprint.numeric, table.info.max_kv_rows)
        return TableShare(table, vocabulary_shares(fingerprint.vocab_size, group.size)[group.rank]), None
    from paceline.engine.parallel.decoder import load_decoder_share

    return load_decoder_share(model, settings, group, device)


def _of_one_rank(settings: EngineSettings, place: Place) -> EngineSettings:
    """The ranks of a machine divide its cores."""
    threads = settings.threads or torch.get_num_threads()
    return settings.model_copy(update={"threads": max(1, threads // place.local_size)})
