"""Multi-token prediction that a target's own checkpoint carries, and speculators' `mtp`.

transformers drops these tensors when it loads the target; they are read from the files here. What each layout means
is stated by what serves it. Read in November 2026:

| | joined | without embedding | reads | passes on |
|---|---|---|---|---|
| vLLM deepseek_mtp | [e, h] | at position 0 | behind the final norm | before `shared_head.norm`; GLM-5: behind |
| vLLM glm4_moe_mtp | [e, h] | at position 0 | behind the final norm | before `shared_head.norm` |
| SGLang deepseek_nextn | [e, h] | – | behind the final norm | behind `shared_head.norm` |
| transformers MtpModel | [e, h] | – | behind the final norm | behind the norm |
| vLLM, SGLang qwen3_next_mtp | [e, h] | – | behind the final norm | behind `mtp.norm` |
| vLLM, SGLang mimo_mtp | [h, e] | at position 0 | behind the final norm | behind `final_layernorm` |
| speculators mtp | [e, h] | – | its last hidden state | behind `final_layernorm` |

So every layout here reads the target's output behind its final norm and passes its own on behind the depth's norm.
(llama.cpp reads DeepSeek's and GLM's before the final norm, and measured Qwen's to be better behind it.) Position 0
is where those engines count the first pair of a token and the hidden state before it: the text's second token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from paceline.drafters.formats.draft_files import TensorFiles, read_config
from paceline.drafters.formats.speculators_eagle3 import refuse_lossy
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.mtp import MtpForm, MtpNetwork, build_mtp_engine
from paceline.engine.checks import INDEX_LAYER
from paceline.engine.features import FeatureEngine
from paceline.engine.weights import select_device, select_dtype
from paceline.models.text_part import SAME_LAYERS
from paceline.models.whole import quiet_loading, refuse_incomplete, refuse_larger
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.runtime.config import EngineSettings

KIND = "mtp"
_DEPTH_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of the number of depths in configurations."""
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class MtpLayout:
    """The names of a checkpoint's tensors. `{depth}` counts from 0, `{layer}` from the target's last layer on."""

    name: str
    layer: str
    fusion: str
    parts: tuple[str, str, str, str]
    """Norm of the embedding, norm of the hidden state, projection, norm of the output."""
    form: MtpForm
    head: str = ""

    @property
    def projection(self) -> str:
        """The part by which a layout is told: every one has it, and no other checkpoint."""
        return self.parts[2]

    @property
    def norm(self) -> str:
        """The norm of a depth's output."""
        return self.parts[3]

    def expand(self, prefix: str, depth: int, own_layers: int) -> str:
        """A prefix with the numbers of one depth."""
        return prefix.format(depth=depth, layer=own_layers + depth)

    def outside_layers(self) -> tuple[str, ...]:
        """Beginnings of names that are no part of the decoder layer, where a layout has both under one prefix."""
        return tuple(f"{part}." for part in (*self.parts, "shared_head", "embed_tokens"))


_DEEPSEEK = "model.layers.{layer}."
_MIMO = "model.mtp_layers.{depth}."
_SPECULATORS = "mtp_layers.{depth}."
_SIDE_BY_SIDE = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAYOUTS = (
    MtpLayout(
        "deepseek_v3",
        _DEEPSEEK,
        _DEEPSEEK,
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        MtpForm(blank_first=True),
        "shared_head.head",
    ),
    MtpLayout(
        "qwen3_next",
        "mtp.layers.{depth}.",
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        MtpForm(),
    ),
    MtpLayout("mimo", _MIMO, _MIMO, _SIDE_BY_SIDE, MtpForm(embedding_first=False, blank_first=True)),
    # The names are MiMo's, the order of the joined parts isn't.
    MtpLayout("speculators", _SPECULATORS, _SPECULATORS, _SIDE_BY_SIDE, MtpForm()),
)


@dataclass(frozen=True, eq=False)
class MtpCheckpoint:
    """Multi-token prediction in a folder.

    Attributes:
        files: of that folder.
        target: has the embedding and the head where the folder lacks them; None: the folder is the target's own.
        config: of the target's decoder layers.
        own_layers: the target's.
    """

    files: TensorFiles
    target: TargetWeights | None
    config: Any
    layout: MtpLayout
    depths: int
    own_layers: int

    def layer_tensors(self, depth: int) -> dict[str, torch.Tensor]:
        """The tensors of one depth's decoder layer, by the layer's own names."""
        prefix = self.layout.expand(self.layout.layer, depth, self.own_layers)
        names = [name for name in self.files.names if name.startswith(prefix)]
        inside = {name: name.removeprefix(prefix) for name in names}
        other_parts = () if self.layout.layer != self.layout.fusion else self.layout.outside_layers()
        return {
            rest: self.files.read(name)
            for name, rest in inside.items()
            if not rest.startswith(other_parts) and not rest.endswith("rotary_emb.inv_freq")
        }

    def decoder_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a decoder whose layers are the depths, by its names."""
        tensors = {
            "model.embed_tokens.weight": self.embedding(),
            "lm_head.weight": self.head(),
            "model.norm.weight": self.part(self.layout.norm, 0),
        }
        for depth in range(self.depths):
            layer_tensors = self.layer_tensors(depth)
            tensors |= {f"model.layers.{depth}.{name}": tensor for name, tensor in layer_tensors.items()}
        return tensors

    def part(self, part: str, depth: int) -> torch.Tensor:
        """One matrix or norm of a depth outside its decoder layer."""
        return self.files.read(f"{self.layout.expand(self.layout.fusion, depth, self.own_layers)}{part}.weight")

    def embedding(self) -> torch.Tensor:
        """[tensor width, hidden]."""
        tensor_name = next((name for name in _EMBEDDINGS if name in self.files), None)
        if tensor_name is None and self.target is not None:
            return self.target.embedding()
        return self.files.read(tensor_name or _EMBEDDINGS[0])

    def head(self) -> torch.Tensor:
        """[tensor width, hidden]; its own, the target's, or the embedding that the target uses twice."""
        own = f"{self.layout.expand(self.layout.fusion, 0, self.own_layers)}{self.layout.head}.weight"
        tensor_name = next((name for name in (own, _HEAD) if name in self.files), None)
        if tensor_name is None and self.target is not None:
            return self.target.head()
        if tensor_name is None and self.config.tie_word_embeddings:
            return self.embedding()
        return self.files.read(tensor_name or _HEAD)


def find_mtp(folder: Path, target: TargetWeights | None = None) -> MtpCheckpoint:
    """Find a folder's multi-token prediction.

    Args:
        folder: the target's own, or a drafter's that speculators wrote.
        target: where embedding and head come from if the folder lacks them.

    Raises:
        InvalidInput: no tensors of multi-token prediction, fewer than its configuration states, or another target's.
        DamagedFile: naming the file.
        Unsupported: layers that transformers doesn't have.
    """
    files = TensorFiles(folder)
    raw = read_config(folder)
    refuse_lossy(raw, folder.name)
    stated_depths = _stated_depths(raw)
    config = _layer_config(raw, folder)
    own_layers: int = config.num_hidden_layers
    beginnings = {f"{each.expand(each.fusion, 0, own_layers)}{each.projection}.weight": each for each in LAYOUTS}
    layout = next((each for name, each in beginnings.items() if name in files), None)
    if layout is None:
        raise _no_tensors(folder, stated_depths)
    depths = 0
    while any(name.startswith(layout.expand(layout.layer, depths, own_layers)) for name in files.names):
        depths += 1
    value, limit = f"{layout.name} tensors of {depths}", f"the {stated_depths} of its config.json"
    require(stated_depths in (depths, None), f"model {folder.name}: depths", value, limit)
    return MtpCheckpoint(files, target, config, layout, depths, own_layers)


def load_mtp(checkpoint: MtpCheckpoint, settings: EngineSettings) -> MtpNetwork:
    """Read the network onto the configured device.

    Raises:
        InvalidInput: tensors are missing or of another shape than the configuration's.
        Unsupported: they are quantised.
    """
    device = select_device(settings.device)
    dtype_choice = select_dtype(settings.dtype, device)
    dtype = torch.bfloat16 if dtype_choice == "auto" else dtype_choice
    assert isinstance(dtype, torch.dtype)
    layout = checkpoint.layout
    network = MtpNetwork(_load_decoder(checkpoint, dtype), layout.form)
    own = dict(network.named_parameters(remove_duplicate=False))
    tensors = dict(_own_tensors(checkpoint))
    shapes = {name: (tensor.shape, own[name].shape) for name, tensor in tensors.items()}
    misshapen = {name: shape for name, shape in shapes.items() if shape[0] != shape[1]}
    refuse_incomplete("model", f"{layout.name} tensors", (), misshapen)
    network.load_state_dict(tensors, strict=False)
    network.requires_grad_(False)
    return network.to(device)


def is_speculators_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a drafter of this kind that speculators wrote."""
    return config.get("speculators_model_type") == KIND


def load_mtp_engine(folder: Path, target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
    """Load what a folder carries, the target's own or a drafter's, as an engine, on the calling thread.

    Raises:
        InvalidInput, DamagedFile, Unsupported: as `find_mtp` and `load_mtp`.
    """
    network = load_mtp(find_mtp(folder, target), settings)
    return build_mtp_engine(network, target.tokenizer, settings, f"{folder.name}#mtp")


def load_own_mtp(target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
    """Load what the target's own checkpoint carries; as `load_mtp_engine`.

    Raises:
        InvalidInput: the target is no folder of files, too.
    """
    is_folder = target.source.kind == "folder"
    require(
        is_folder, "target_model", target.name, "a folder or a pulled model: multi-token prediction is in its files"
    )
    return load_mtp_engine(Path(target.source.location), target, settings)


def _own_tensors(checkpoint: MtpCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors outside decoder layers, by the network's names."""
    layout = checkpoint.layout
    own = ("fusions.{}.embedding_norm", "fusions.{}.hidden_norm", "fusions.{}.projection", "norms.{}")
    parts = [*zip(own, layout.parts, strict=True)]
    for depth in range(checkpoint.depths):
        for mine, theirs in parts:
            yield f"{mine.format(depth)}.weight", checkpoint.part(theirs, depth)


def _load_decoder(checkpoint: MtpCheckpoint, dtype: torch.dtype) -> PreTrainedModel:
    """A decoder of one layer a depth; transformers joins tensors of experts as it does for the target."""
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]
    # Layers of linear attention keep a class from the library's attention interface; there are none of them here.
    own = {"_supports_attention_backend": True, "__module__": base.__module__}
    kind: Any = type(base.__name__, (base,), own)
    tensors = checkpoint.decoder_tensors()
    config = _depths_config(checkpoint.config, checkpoint.depths)
    parameters = sum(each.numel() for each in tensors.values())
    refuse_larger(lambda: kind(config), parameters, f"{checkpoint.layout.name} layers")
    decoder: PreTrainedModel
    with quiet_loading():
        decoder, loading_info = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named here
        )
    misshapen = {name: (file_shape, shape) for name, file_shape, shape in loading_info["mismatched_keys"]}
    refuse_incomplete("model", f"{checkpoint.layout.name} tensors", loading_info["missing_keys"], misshapen)
    unknown = sorted(loading_info["unexpected_keys"])
    if unknown:
        raise Unsupported(
            f"{checkpoint.layout.name} tensors {', '.join(unknown[:3])}: not those of {kind.__name__}'s layers"
        )
    decoder.train(False)
    return decoder


def _stated_depths(raw: Mapping[str, Any]) -> int | None:
    """The number of depths that a configuration states; None: it states none, as Qwen3-Next's."""
    for part in (raw, raw.get("text_config") or {}):
        for name in _DEPTH_KEYS:
            if part.get(name) is not None:
                return int(part[name])
    return None


def _layer_config(raw: Mapping[str, Any], folder: Path) -> PreTrainedConfig:
    """The configuration of the target's decoder."""
    raw = dict(raw.get("transformer_layer_config") or raw)
    name = raw.get("model_type", "")
    name = SAME_LAYERS.get(name, name)
    if name not in CONFIG_MAPPING:
        raise Unsupported(f"model {folder.name}: model type {name}, which transformers doesn't have")
    kind: Any = CONFIG_MAPPING[name]
    config: Any = kind.from_dict(raw | {"model_type": name}).get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"model {folder.name}: model type {config.model_type}, no decoder of transformers")
    decoder_config: PreTrainedConfig = config
    return decoder_config


def _depths_config(config: PreTrainedConfig, depths: int) -> PreTrainedConfig:
    """The configuration of a decoder whose layers are the depths, which attend, with the target's experts."""
    depths_config: Any = copy.deepcopy(config)
    depths_config.num_hidden_layers = depths
    depths_config.tie_word_embeddings = False
    if getattr(depths_config, "layer_types", None):
        kind = INDEX_LAYER if INDEX_LAYER in depths_config.layer_types else "full_attention"
        depths_config.layer_types = getattr(config, "mtp_layer_types", None) or [kind] * depths
    if getattr(depths_config, "mlp_layer_types", None):
        depths_config.mlp_layer_types = (
            getattr(config, "mtp_mlp_layer_types", None) or [depths_config.mlp_layer_types[-1]] * depths
        )
    if hasattr(depths_config, "first_k_dense_replace"):
        depths_config.first_k_dense_replace = 0
    if hasattr(depths_config, "quantization_config"):
        del depths_config.quantization_config
    decoder_config: PreTrainedConfig = depths_config
    return decoder_config


def _no_tensors(folder: Path, stated_depths: int | None) -> InvalidInput:
    if stated_depths:
        limit = (
            f"a checkpoint with the {stated_depths} layers of multi-token prediction that its config.json states: "
            "its files have none of their tensors, as quantised and converted copies often drop them"
        )
    else:
        limit = "a checkpoint that carries multi-token prediction: neither its config.json nor its files have any"
    return InvalidInput.of("model", folder.name, limit)
