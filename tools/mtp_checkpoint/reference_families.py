"""Which layer of transformers is which family's, and how checkpoints name the head around it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReferenceFamily:
    """Where transformers keeps a family's layer, and how its checkpoint names the head.

    Attributes:
        module: Under ``transformers.models``.
        stem: Of the class names: ``{stem}DecoderLayer``, ``{stem}RMSNorm``.
        config: Name of the configuration class.
        rotary: Name of the rotary embedding class.
        renames: Patterns from checkpoint keys to those of `ReferenceHead`; a key that none
            matches in full is not part of the head. LAST stands for the number of the target's
            layers.
        hidden_first: The projection's input is [hidden, embedding] instead of the reverse.
        ignored: Pattern of head keys that are copies of the target's tensors.
        fed_back_before_norm: Engines whose next draft step reads the layer's own output; all
            others read what the closing norm made of it.
    """

    module: str
    stem: str
    config: str
    rotary: str
    renames: tuple[tuple[str, str], ...]
    hidden_first: bool = False
    ignored: str = r"(?!)"
    fed_back_before_norm: tuple[str, ...] = ()


_QWEN_RENAMES = ((r"mtp\.(.+)", r"\1"),)
REFERENCES = {
    "qwen3_5_moe_text": ReferenceFamily(
        "qwen3_5_moe.modeling_qwen3_5_moe",
        "Qwen3_5Moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeTextRotaryEmbedding",
        _QWEN_RENAMES,
    ),
    "qwen3_5_text": ReferenceFamily(
        "qwen3_5.modeling_qwen3_5",
        "Qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5TextRotaryEmbedding",
        _QWEN_RENAMES,
    ),
    "mimo": ReferenceFamily(
        "qwen2.modeling_qwen2",
        "Qwen2",
        "Qwen2Config",
        "Qwen2RotaryEmbedding",
        (
            (r"model\.mtp_layers\.0\.token_layernorm\.(.+)", r"pre_fc_norm_embedding.\1"),
            (r"model\.mtp_layers\.0\.hidden_layernorm\.(.+)", r"pre_fc_norm_hidden.\1"),
            (r"model\.mtp_layers\.0\.input_proj\.(.+)", r"fc.\1"),
            (r"model\.mtp_layers\.0\.final_layernorm\.(.+)", r"norm.\1"),
            (r"model\.mtp_layers\.(0\..+)", r"layers.\1"),
        ),
        hidden_first=True,
    ),
    "deepseek_v3": ReferenceFamily(
        "deepseek_v3.modeling_deepseek_v3",
        "DeepseekV3",
        "DeepseekV3Config",
        "DeepseekV3RotaryEmbedding",
        (
            (r"model\.layers\.LAST\.enorm\.(.+)", r"pre_fc_norm_embedding.\1"),
            (r"model\.layers\.LAST\.hnorm\.(.+)", r"pre_fc_norm_hidden.\1"),
            (r"model\.layers\.LAST\.eh_proj\.(.+)", r"fc.\1"),
            (r"model\.layers\.LAST\.shared_head\.norm\.(.+)", r"norm.\1"),
            (r"model\.layers\.LAST\.(.+)", r"layers.0.\1"),
        ),
        ignored=r"model\.layers\.LAST\.(embed_tokens|shared_head\.head)\.weight",
        fed_back_before_norm=("vllm",),
    ),
}
