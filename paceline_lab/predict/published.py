"""Decode speeds that others have measured, each with its source, to compare the roofline with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline_lab.predict.roofline import ModelPlacement, ModelSize

_LLAMA2 = {"vocab_size": 32000}
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}


def _size(hidden: int, layers: int, intermediate: int, heads: int, **more: object) -> ModelSize:
    return ModelSize.of_config(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            **more,
        }
    )


SIZES: Mapping[str, ModelSize] = {
    "llama-2-7b": _size(4096, 32, 11008, 32, **_LLAMA2),
    "llama-2-70b": _size(8192, 80, 28672, 64, num_key_value_heads=8, **_LLAMA2),
    "llama-3.1-8b": _size(4096, 32, 14336, 32, num_key_value_heads=8, vocab_size=128256),
    "llama-3.3-70b": _size(8192, 80, 28672, 64, num_key_value_heads=8, vocab_size=128256),
    "llama-3.2-1b": _size(2048, 16, 8192, 32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "qwen3-0.6b": _size(1024, 28, 3072, 16, tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": _size(4096, 36, 12288, 32, **_QWEN3),
    "qwen3-32b": _size(5120, 64, 25600, 64, **_QWEN3),
}
"""Sizes by name, from the models' own configurations."""


@dataclass(frozen=True)
class PublishedSpeed:
    """A measured decode speed.

    Attributes:
        tokens_per_second: speed of one request.
        sessions, context: requests at once, and tokens of each as far as the source says.
        decode_alone: False: the speed includes prefills of other requests, which the roofline leaves out; it is
            shown, not judged.
    """

    model: str
    gpu: str
    tensor_parallel: int
    weights: str
    tokens_per_second: float
    source: str
    sessions: int = 1
    context: int = 0
    decode_alone: bool = True

    @property
    def roofline_speed(self) -> float:
        """Return the tokens per second of one request, by the roofline."""
        placement = ModelPlacement(SIZES[self.model], self.gpu, self.tensor_parallel, self.weights)
        return 1e3 / placement.step_ms(self.sessions, self.sessions, self.context)

    @property
    def off(self) -> float:
        """Return the roofline's error, as a share of the measured speed."""
        return self.roofline_speed / self.tokens_per_second - 1


_GPT_FAST = "pytorch-labs/gpt-fast README, 8 A100-80GB limited to 330 W, prompt of 5 tokens"
_INFERENCE_BENCH = "yobitelcomm.github.io/bench/recipes/concurrency-sweep, vLLM 0.21, TPOT p50"
PUBLISHED_SPEEDS = (
    PublishedSpeed("llama-2-7b", "a100-80", 1, "bf16", 104.9, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-7b", "a100-80", 2, "bf16", 168.84, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-7b", "a100-80", 4, "bf16", 254.02, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-7b", "a100-80", 8, "bf16", 328.43, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 2, "bf16", 21.32, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 4, "bf16", 38.01, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 8, "bf16", 62.50, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-7b", "a100-80", 1, "8-bit", 155.58, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 1, "8-bit", 19.13, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 8, "8-bit", 80.44, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-7b", "a100-80", 1, "4-bit", 196.80, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 1, "4-bit", 25.25, _GPT_FAST, context=100),
    PublishedSpeed("llama-2-70b", "a100-80", 8, "4-bit", 90.77, _GPT_FAST, context=100),
    PublishedSpeed("qwen3-32b", "h100", 4, "bf16", 88.8, "SSD, arXiv 2603.03251, autoregressive, batch 1"),
    PublishedSpeed(
        "llama-3.1-8b", "a100-40", 1, "bf16", 75.0, "johnmusgrave.com/p/vllm-throughput-latency-sweep-on, vLLM 0.23",
        context=1088,
    ),
    PublishedSpeed("llama-3.1-8b", "h100", 1, "bf16", 1e3 / 6.48, _INFERENCE_BENCH, context=256),
    PublishedSpeed("llama-3.1-8b", "h100", 1, "bf16", 1e3 / 6.59, _INFERENCE_BENCH, 4, 256),
    PublishedSpeed("llama-3.1-8b", "h100", 1, "bf16", 1e3 / 10.94, _INFERENCE_BENCH, 16, 256, decode_alone=False),
)  # fmt: skip


def check_rows() -> list[dict[str, object]]:
    """Return a table's rows: each published speed beside the roofline's."""
    return [
        {
            "model": each.model,
            "GPUs": f"{each.tensor_parallel} {each.gpu}",
            "weights": each.weights,
            "requests": each.sessions,
            "published tokens/s": round(each.tokens_per_second, 1),
            "modelled tokens/s": round(each.roofline_speed, 1),
            "off by": f"{each.off:+.0%}" + ("" if each.decode_alone else ", prefills left out"),
            "source": each.source,
        }
        for each in PUBLISHED_SPEEDS
    ]
