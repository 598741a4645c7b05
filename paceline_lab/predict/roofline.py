"""Step times of GPUs that are not here, from the bytes and flops of a step. Modelled, never measured.

A step of r rows reads every weight once and each session's keys and values, computes 2 flops a weight and row, and
with tensor parallelism adds two all-reduces a layer (Pope et al., arXiv 2211.05102, §2; Megatron-LM, arXiv
1909.08053, §3):

    ms = max(bytes / (bandwidth · share), flops / (peak · share)) / GPUs + layers · (LAYER_MS + 2 · all-reduce)

The shares and LAYER_MS are fitted to published decode speeds (`published` beside this module), which it meets within
15 % in 16 bits and 20 % in fewer. What it leaves out makes real steps slower: prefills of other requests, schedulers,
sampling, pipelines across nodes. A figure made from it is marked as modelled wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import Unsupported, require

LAYER_MS = 0.04
"""Time of a layer of any size: launches and what does not overlap. Fitted: TP 2, 4, 8 of one model differ by it."""
COMPUTE_SHARE = 0.6
"""Share of dense peak flops that large products reach; the rows from which flops bound a step depend on it."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights and KV may take: the default of vLLM's gpu_memory_utilization."""
KV_BYTES = 2
ACTIVATION_BYTES = 2
LINE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Points of a modelled line."""


@dataclass(frozen=True)
class GpuKind:
    """A GPU's data sheet, dense figures.

    Attributes:
        memory_gb, bandwidth_gb_s, tflops: its memory, and its speeds; flops are of 16-bit formats.
        link_gb_s: bandwidth to the other GPUs of its node, one way.
        all_reduce_us: latency of a small message. NVLink: vLLM's own kernel takes 9 to 10 on H100 (sgl-project/sglang
            pull 2904), and gpt-fast's TP 8 speeds on A100 fit 10. PCIe: assumed.
    """

    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    link_gb_s: float
    all_reduce_us: float = 10.0


PCIE_US = 30.0
GPUS: Mapping[str, GpuKind] = {
    "b200": GpuKind(180, 7700, 2250, 900),
    "h200": GpuKind(141, 4800, 989, 450),
    "h100": GpuKind(80, 3350, 989, 450),
    "a100-80": GpuKind(80, 2039, 312, 300),
    "a100-40": GpuKind(40, 1555, 312, 300),
    "l40s": GpuKind(48, 864, 362, 32, PCIE_US),
    "rtx4090": GpuKind(24, 1008, 165, 32, PCIE_US),
    "a10": GpuKind(24, 600, 125, 32, PCIE_US),
    "l4": GpuKind(24, 300, 121, 32, PCIE_US),
    "t4": GpuKind(16, 320, 65, 16, PCIE_US),
}
"""GPUs by name, from NVIDIA's data sheets, of the SXM parts where there are such."""


@dataclass(frozen=True)
class WeightBits:
    """A number format of weights: bytes of each, and the share of bandwidth that reading them reaches."""

    bytes: float
    bandwidth_share: float


WEIGHTS: Mapping[str, WeightBits] = {
    "bf16": WeightBits(2.0, 0.8),
    "8-bit": WeightBits(1.0, 0.65),
    "4-bit": WeightBits(0.625, 0.6),
}
"""4 bits in groups of 32 with two 16-bit values each. Shares fitted to gpt-fast's speeds on one A100."""


MAX_SIZE = 1 << 32
"""Greatest entry of a `config.json`: products of a few entries stay finite as floats."""


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return an entry of a `config.json`; absent, null or 0: the default."""
    value = config.get(name) or default
    is_size = type(value) is int and (default is not None or value >= 1) and 0 <= value <= MAX_SIZE
    require(is_size, f"config {name}", value, f"a whole number in [1, {MAX_SIZE}]")
    assert value is not None, "it is a number"
    return int(value)


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder on which its step times depend.

    Attributes:
        hidden, layers, vocab: hidden size, number of layers, and vocabulary.
        attention: weights of a layer's attention.
        kv_values: values of a token's keys and values, all layers.
        mlp: weights of a layer's dense MLP, or of one expert.
        experts, experts_per_token: experts of a layer, and those that a token passes; 0: dense.
        shared_mlp: weights of a layer that every token passes beside its experts, router included.
        ties_embeddings: whether embedding and head are one matrix.
    """

    hidden: int
    layers: int
    vocab: int
    attention: int
    kv_values: int
    mlp: int
    experts: int = 0
    experts_per_token: int = 0
    shared_mlp: int = 0
    ties_embeddings: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelSize:
        """Read a `config.json` of transformers, of a decoder with gated MLPs and grouped keys.

        Raises:
            InvalidInput: an entry is missing, or no size; it names the entry.
            Unsupported: attention over latent keys.
        """
        config = config.get("text_config") or config
        require(isinstance(config, Mapping), "config text_config", config, "an object")
        if config.get("kv_lora_rank"):
            raise Unsupported("latent attention (kv_lora_rank) is not modelled; state its steps as a line")
        size = partial(_size, config)
        names = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads")
        hidden, layers, vocab, intermediate, heads = map(size, names)
        head = size("head_dim", hidden // heads)
        kv_heads = size("num_key_value_heads", heads)
        expert_keys = (name for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name))
        experts = size(next(expert_keys, ""), 0)
        width = size("moe_intermediate_size", intermediate) if experts else intermediate
        return cls(
            hidden=hidden,
            layers=layers,
            vocab=vocab,
            attention=2 * hidden * head * (heads + kv_heads),
            kv_values=2 * layers * kv_heads * head,
            mlp=3 * hidden * width,
            experts=experts,
            experts_per_token=size("num_experts_per_tok", 1) if experts else 0,
            shared_mlp=hidden * experts + 3 * hidden * width * size("n_shared_experts", 0),
            ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        mlps = self.mlp * max(1, self.experts) + self.shared_mlp
        return self.layers * (self.attention + mlps) + self.vocab * self.hidden * (1 if self.ties_embeddings else 2)

    def read(self, rows: float) -> float:
        """Return the weights that a step of so many rows reads: of experts, those of any row, if all are alike."""
        mlps = float(self.mlp)
        if self.experts:
            mlps *= self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)
        return self.layers * (self.attention + mlps + self.shared_mlp) + self.vocab * self.hidden

    @property
    def active(self) -> int:
        """Return the weights that a row passes."""
        mlps = self.mlp * max(1, self.experts_per_token) + self.shared_mlp
        return self.layers * (self.attention + mlps) + self.vocab * self.hidden


@dataclass(frozen=True)
class ModelPlacement:
    """A model on GPUs of one node: kind of GPU, how many share the model, number format of the weights.

    Raises:
        InvalidInput: an unknown name.
    """

    size: ModelSize
    gpu: str
    tensor_parallel: int = 1
    weights: str = "bf16"

    def __post_init__(self) -> None:
        require(self.gpu in GPUS, "gpu", self.gpu, f"one of: {', '.join(GPUS)}")
        require(self.weights in WEIGHTS, "weights", self.weights, f"one of: {', '.join(WEIGHTS)}")
        require(1 <= self.tensor_parallel <= 64, "tensor_parallel", self.tensor_parallel, "in [1, 64]")

    @property
    def kind(self) -> GpuKind:
        """Return the GPU's data sheet."""
        return GPUS[self.gpu]

    @property
    def kv_tokens(self) -> int:
        """Return the tokens of context that fit beside the weights, all GPUs together; 0 or less: they don't fit."""
        memory = 1e9 * MEMORY_SHARE * self.kind.memory_gb * self.tensor_parallel
        free = memory - self.size.parameters * WEIGHTS[self.weights].bytes
        return int(free / (KV_BYTES * self.size.kv_values))

    def check_fits(self) -> None:
        """Refuse a model that its GPUs can't hold.

        Raises:
            InvalidInput: it names the weights' gigabytes.
        """
        weights = self.size.parameters * WEIGHTS[self.weights].bytes / 1e9
        room = MEMORY_SHARE * self.kind.memory_gb * self.tensor_parallel
        limit = f"below {room:.0f}, {MEMORY_SHARE:.0%} of {self.tensor_parallel} {self.gpu}"
        require(self.kv_tokens > 0, "weights GB", round(weights, 1), limit)

    def step_ms(self, rows: float, sessions: float = 1.0, context: float = 0.0) -> float:
        """Return the milliseconds of a decode step. Modelled.

        Args:
            rows: tokens that are computed, of all sessions.
            sessions: number of sessions; the keys and values of each are read once.
            context: tokens of each session.
        """
        kind, bits = self.kind, WEIGHTS[self.weights]
        weights_ms = self.size.read(rows) * bits.bytes / (1e6 * kind.bandwidth_gb_s * bits.bandwidth_share)
        compute_ms = 2 * self.size.active * rows / (1e9 * kind.tflops * COMPUTE_SHARE * self.tensor_parallel)
        moved_ms = weights_ms / self.tensor_parallel + sessions * self.kv_ms(context)
        return max(moved_ms, compute_ms) + self.size.layers * (LAYER_MS + 2 * self.all_reduce_ms(rows))

    def kv_ms(self, context: float) -> float:
        """Return the time to read one session's keys and values, each GPU its share. Modelled."""
        bytes_read = KV_BYTES * self.size.kv_values * context / self.tensor_parallel
        return bytes_read / (1e6 * self.kind.bandwidth_gb_s * WEIGHTS["bf16"].bandwidth_share)

    def all_reduce_ms(self, rows: float) -> float:
        """Return the time of an all-reduce: its latency, and each GPU's share of activations, twice over its link."""
        ranks = self.tensor_parallel
        if ranks == 1:
            return 0.0
        bytes_sent = 2 * (ranks - 1) / ranks * rows * self.size.hidden * ACTIVATION_BYTES
        return self.kind.all_reduce_us / 1e3 + bytes_sent / (1e6 * self.kind.link_gb_s)

    def line(self) -> CostLine:
        """Return the times of steps by rows, without keys and values: each session adds its `kv_ms`. Modelled."""
        return CostLine(tuple((float(rows), self.step_ms(rows)) for rows in LINE_ROWS))
