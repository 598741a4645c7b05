"""Texts of vLLM's V2 model runner, plain or with Paceline's drafts, as JSON: on a CPU, by triton's interpreter.

vLLM takes V2 on a CPU where triton has a backend for it. No package has one, so an empty one is named here, and
`TRITON_INTERPRET` computes every kernel in numpy: slow, and the same source.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.compat.scripts.vllm_drafts import EAGER, QUIET_S
from tests.vllm.sampler_rule import PROPOSE, commit, penalised

TOKENS, DRAWN_TOKENS, PLACES = 24, 8, 4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": TOKENS},
    "by seed": {"temperature": 0.8, "seed": 5, "max_tokens": DRAWN_TOKENS},
    "by seed, with penalties, top-k and top-p": {
        **{"temperature": 0.9, "seed": 6, "max_tokens": DRAWN_TOKENS, "top_k": 40, "top_p": 0.9},
        **{"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    },
}
KERNEL_REQUESTS, KERNEL_VOCABULARY = 200, 40


def interpret() -> None:
    """Has to be called before vLLM is imported."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    sampler.HAS_TRITON = False  # vLLM's own torch form of the kernel: the interpreter can't do one of its operations


def engine(model: str, draft: str) -> Any:
    """A server of V2 with coupled sampling, and with drafts where an address is named."""
    from vllm import LLM

    further: dict[str, Any] = {}
    if draft:
        further["speculative_config"] = {"method": "ngram", "num_speculative_tokens": PLACES}
        further["additional_config"] = {"paceline": {"draft": {"address": draft}, "idle_s": 1.0}}
    processors = ["paceline_vllm.coupled:CoupledSampling"]
    return LLM(
        model=model, max_num_seqs=8, enable_prefix_caching=False, logits_processors=processors, **EAGER, **further
    )


def texts(llm: Any, prompts: list[str]) -> dict[str, list[list[int]]]:
    """Token ids by sampling."""
    from vllm import SamplingParams

    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    results = {}
    for name, asked in SAMPLINGS.items():
        outputs = llm.chat(chats, SamplingParams(ignore_eos=True, **asked), use_tqdm=False)
        results[name] = [[*each.outputs[0].token_ids] for each in outputs]
    return results


def drafted(llm: Any, prompts: list[str]) -> dict[str, Any]:
    """Texts with drafts, what the client did for them, and the sessions that are left when all is quiet."""
    import inspect

    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    speculator = llm.collective_rpc(lambda worker: worker.model_runner.speculator)[0]
    assert type(speculator).__module__ == "paceline_vllm.speculator", type(speculator)
    assert isinstance(speculator, BaseSpeculator)
    theirs = tuple(inspect.signature(BaseSpeculator.propose).parameters)
    assert theirs == PROPOSE, f"vLLM's propose has other parameters: {theirs}"
    client, deadline = speculator.drafts.client, time.monotonic() + QUIET_S
    while not client.is_up and time.monotonic() < deadline:
        time.sleep(0.05)
    results: dict[str, Any] = {"ids": texts(llm, prompts)}
    while client.sessions and time.monotonic() < deadline + QUIET_S:
        time.sleep(0.05)
    assert speculator.drafts.client is client, "a defect has ended the drafts"
    return results | {"counts": vars(client.counts), "sessions_left": client.sessions}


def compare_rejection(*, block: bool, certain: bool) -> str:
    """Hold vLLM's kernels against the restated rule, on made-up rows of one token; a line for a report."""
    import numpy as np
    import torch
    from vllm.triton_utils import tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as utils

    utils.tldevice = SimpleNamespace(log1p=lambda value: tl.log(1.0 + value))  # a device's library isn't interpreted
    requests, size, draws = KERNEL_REQUESTS, KERNEL_VOCABULARY, np.random.default_rng(7)
    counts = draws.integers(0, PLACES + 1, requests)
    starts = np.concatenate(([0], np.cumsum(counts + 1)))
    owners = np.repeat(np.arange(requests), counts + 1)
    local, total = np.arange(starts[-1]) - starts[:-1][owners], int(starts[-1])
    drawn = draws.integers(0, size, total)
    # A draft stands one place behind the row that decides about it.
    ids = np.where(draws.random(total) < 0.7, np.roll(drawn, 1), draws.integers(-1, size, total))
    rows = np.full((total, size), -np.inf, np.float32)
    rows[np.arange(total), drawn] = 0
    drafts, temperature = draws.normal(0, 3, (requests, PLACES, size)).astype(np.float32), np.float32(0.8)
    sampled, lengths = utils.rejection_sample(
        torch.from_numpy(rows),
        None if certain else torch.from_numpy(drafts),
        torch.from_numpy(ids),
        *(
            torch.from_numpy(each.astype(np.int32))
            for each in (starts, local + 9, np.arange(requests), owners, local)
        ),
        torch.full((requests,), float(temperature)),
        torch.arange(requests),
        PLACES,
        use_block_verification=block,
    )
    for request, (start, count) in enumerate(zip(starts, counts, strict=False)):
        own = None if certain else drafts[request, :count] / temperature
        expected = commit(rows[start:][: count + 1], ids[start + 1 :][:count].tolist(), draws, own, block=block)
        seen = sampled[request, : lengths[request]].tolist()
        assert seen == expected, f"block {block}, certain {certain}, request {request}: {seen}, not {expected}"
    rule = f"{'block' if block else 'standard'}, drafts {'without' if certain else 'with'} logits"
    return f"kernels, {rule}: {total} rows of one token commit what the restated rule does"


def compare_penalties() -> str:
    """Hold vLLM's kernel against the restated penalties, those of drafted tokens among them."""
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    asked = SimpleNamespace(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.4)
    size, prompt, output, ids = KERNEL_VOCABULARY, [3, 5, 5], [2, 5, 9, 9], [9, 1, 2, 1, 30]
    rows = np.random.default_rng(8).normal(0, 2, (len(ids), size)).astype(np.float32)
    mask = np.zeros((1, -(-size // 32)), np.int32)
    for token in prompt:
        mask[0, token // 32] |= 1 << token % 32
    result = torch.from_numpy(rows.copy())
    apply_penalties(
        result,
        torch.zeros(len(ids), dtype=torch.int32),
        torch.tensor(ids),
        torch.arange(len(ids), dtype=torch.int32),
        *(
            torch.tensor([each])
            for each in (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)
        ),
        torch.from_numpy(mask),
        torch.from_numpy(np.bincount(output, minlength=size)[None].astype(np.int32)),
    )
    expected = [penalised(row, prompt, [*output, *ids[1 : place + 1]], asked) for place, row in enumerate(rows)]
    assert np.allclose(result.numpy(), np.stack(expected), atol=1e-5), "penalties are others"
    return "kernels: penalties, those of drafted tokens among them, are the restated ones"


def main() -> None:
    """With drafts: their texts. Without: plain texts, then the kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft", default="")
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    interpret()
    llm = engine(arguments.model, arguments.draft)
    if arguments.draft:
        results = drafted(llm, prompts)
    else:
        rules = [{"block": block, "certain": certain} for block in (False, True) for certain in (True, False)]
        lines = [*(compare_rejection(**rule) for rule in rules), compare_penalties()]
        results = {"ids": texts(llm, prompts), "kernels": lines}
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
