"""What a rank has in memory while it loads: its share, whatever the checkpoint's size."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.engine.parallel import decoder
from paceline.engine.parallel.decoder import load_decoder_share
from paceline.engine.parallel.group import RankGroup
from paceline.engine.parallel.place import Place
from paceline.engine.weights import load_decoder
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer

RANKS = 2
SHAPE = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 6, "num_key_value_heads": 4}
MIB = 1 << 20


def own_bytes() -> int:
    """Memory of this process that is no page of a file."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def load_share(folder: str, rank: int, port: int, whole: bool, peaks: multiprocessing.SimpleQueue[int]) -> None:
    """Load one rank's share, and report the most that it took; `whole`: a mutant, which converts what it reads."""
    torch.set_num_threads(1)
    if whole:
        vars(decoder)["load_decoder"] = lambda *args, **_: load_decoder(*args, on_host=True)
    sizes, is_loading = [own_bytes()], threading.Event()

    def watch() -> None:
        while not is_loading.wait(0.001):
            sizes.append(own_bytes())

    group = RankGroup(Place(rank, RANKS, rank, RANKS, port), torch.device("cpu"))
    watcher = threading.Thread(target=watch)
    watcher.start()
    settings = tiny.THREAD.model_copy(update={"kv_bytes": MIB, "max_step_rows": 128})
    load_decoder_share(folder, settings, group, torch.device("cpu"))
    is_loading.set()
    watcher.join()
    peaks.put(max(sizes) - sizes[0])
    time.sleep(0.5)  # until the other has left the group


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Its folder, and its bytes as they are computed with."""
    folder, model = tmp_path_factory.mktemp("checkpoint"), tiny.random_model(tiny.llama(**SHAPE))
    size = sum(weight.nbytes for weight in model.parameters())
    save_with_tokenizer(model.bfloat16(), folder)
    return folder, size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize("whole", [False, True])
def test_a_rank_takes_its_share_alone(checkpoint: tuple[Path, int], whole: bool) -> None:
    folder, size = checkpoint
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    peaks = context.SimpleQueue()
    start = partial(context.Process, target=load_share, daemon=True)
    ranks = [start(args=(str(folder), rank, port, whole, peaks)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    peak_bytes = [peaks.get() for _ in ranks]
    assert (max(peak_bytes) > 0.9 * size) is whole, f"{size} bytes in all, the ranks took {peak_bytes}"
