"""Which rank a process is, by what torchrun put into its environment."""

from __future__ import annotations

import pytest

from paceline.engine.parallel.place import Place, place_from
from paceline.protocol.errors import InvalidInput

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}


def test_torchrun_says_which_rank_this_is() -> None:
    assert place_from(TORCHRUN, 8) == Place(rank=5, size=8, local_rank=1, local_size=4)
    assert place_from(TORCHRUN, 8) != Place(rank=5, size=8, local_rank=1, local_size=4, port=1)


def test_without_torchrun_ranks_are_ours_to_start() -> None:
    assert place_from({"LOCAL_RANK": "1"}, 8) is None


def test_another_number_of_ranks_than_configured_is_refused() -> None:
    with pytest.raises(InvalidInput, match="tensor_parallel_size = 1: must be 8, the WORLD_SIZE"):
        place_from(TORCHRUN, 1)
