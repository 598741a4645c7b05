"""What SGLang's scheduler and model runner are told about the algorithm: it is n-gram speculation to them.

It imports nothing that costs anything, as it runs wherever Paceline is installed beside SGLang.

Read in SGLang 0.5.23: `srt/speculative/spec_registry.py`; `_handle_ngram` in `srt/arg_groups/speculative_hook.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.version import __version__

from paceline.protocol.errors import InvalidInput, require

if TYPE_CHECKING:
    from paceline.drafting.client import DraftClientSettings

READ_VERSIONS = ("0.5.23",)
"""Of SGLang, in whose source the worker that ours is made of was read."""
VARIABLE = "PACELINE_SGLANG"
"""Environment variable that holds the `DraftClientSettings` as JSON."""
DEVICES = ("cuda", "cpu", "xpu")
DRAFT_TOKENS, RUNNING_REQUESTS = 5, 48
"""Defaults: nodes of a tree, the last token included, and requests in a step, as n-gram speculation has them."""


def settings() -> DraftClientSettings:
    """Where drafts come from.

    Raises:
        InvalidInput: the variable holds no settings.
    """
    from pydantic import ValidationError

    from paceline.drafting.client import DraftClientSettings

    text = os.environ.get(VARIABLE, "{}")
    try:
        return DraftClientSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InvalidInput.of(VARIABLE, text, f"settings in JSON ({key}: {first['msg']})") from error


class DraftServiceAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # SGLang is where it runs
    """N-gram speculation whose trees draft services make."""

    def is_ngram(self) -> bool:
        """Of its worker, batches and buffers."""
        return True

    def has_draft_kv(self) -> bool:
        """A tree is in the mask of its verification alone."""
        return False

    def need_topk(self) -> bool:
        """No draft model's probabilities go from step to step."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Nor its hidden states."""
        return False

    def create_future_map(self, *args: Any, **options: Any) -> Any:
        """What carries accepted tokens from step to step; SGLang has it for algorithms of its own alone."""
        return SpeculativeAlgorithm.NGRAM.create_future_map(*args, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Complete the server's arguments.

        `--speculative-eagle-topk` 1 verifies chains, as every attention backend does, and more of it trees.

        Raises:
            InvalidInput: something is set with which drafts wouldn't work, or wouldn't be exact.
        """
        args = server_args
        require(__version__ in READ_VERSIONS, "sglang", __version__, f"one of {', '.join(READ_VERSIONS)}")
        require(args.device in DEVICES, "device", args.device, f"one of {', '.join(DEVICES)}")
        require(args.pp_size == 1, "pp_size", args.pp_size, "1")
        require(args.attn_dp_size == 1, "attn_dp_size", args.attn_dp_size, "1: ranks share their requests")
        require(args.disaggregation_mode == "null", "disaggregation_mode", args.disaggregation_mode, "'null'")
        require(not args.skip_tokenizer_init, "skip_tokenizer_init", True, "false: drafts are of one tokenizer")
        settings()
        topk = args.speculative_eagle_topk = args.speculative_eagle_topk or 1
        is_safe = topk == 1 or (args.page_size or 1) == 1 or args.attention_backend == "flashinfer"
        require(is_safe, "speculative_eagle_topk", topk, "1 with pages of several tokens, but for flashinfer")
        nodes = args.speculative_num_draft_tokens = args.speculative_num_draft_tokens or DRAFT_TOKENS
        require(nodes > 1, "speculative_num_draft_tokens", nodes, "at least 2: the last token is one")
        args.speculative_num_steps = min(args.speculative_num_steps or max(1, (nodes - 1) // topk), nodes - 1)
        args.speculative_ngram_max_trie_depth = max(args.speculative_ngram_max_trie_depth, nodes)
        args.max_running_requests = args.max_running_requests or RUNNING_REQUESTS
        args.enable_mixed_chunk = False
        args.disable_overlap_schedule = args.disable_overlap_schedule or args.device == "cpu"
