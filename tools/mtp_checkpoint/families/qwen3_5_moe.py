"""Qwen3.5-MoE and Qwen3.6-MoE: the same model, its experts one by one or packed."""

from __future__ import annotations

from tools.mtp_checkpoint.families.checks import chosen_of
from tools.mtp_checkpoint.families.family import Family
from tools.mtp_checkpoint.families.qwen3_5 import (
    ATTENTION_AND_NORMS,
    CHECKS,
    FEEDBACK,
    FIELDS,
    REQUIREMENTS,
)
from tools.mtp_checkpoint.families.rotary import PLAIN
from tools.mtp_checkpoint.rules import COPY, GATE_UP, SLICE, Entry

_M, _T = "layers.0.mlp.", "mtp_model_layer.mlp."
_EXPERT = _T + "experts.local_experts.{e}."

SHARED = (
    *ATTENTION_AND_NORMS,
    Entry(_T + "router.weight", ((_M + "gate.weight", "E, H"),), COPY),
    Entry(
        _T + "shared_experts.linear_fc1.weight",
        (
            (_M + "shared_expert.gate_proj.weight", "S, H"),
            (_M + "shared_expert.up_proj.weight", "S, H"),
        ),
        GATE_UP,
    ),
    Entry(
        _T + "shared_experts.linear_fc2.weight", ((_M + "shared_expert.down_proj.weight", "H, S"),)
    ),
    Entry(_T + "shared_experts.gate_weight", ((_M + "shared_expert_gate.weight", "1, H"),)),
)

ONE_BY_ONE = (
    Entry(
        _EXPERT + "linear_fc1.weight",
        (
            (_M + "experts.{e}.gate_proj.weight", "I, H"),
            (_M + "experts.{e}.up_proj.weight", "I, H"),
        ),
        GATE_UP,
    ),
    Entry(_EXPERT + "linear_fc2.weight", ((_M + "experts.{e}.down_proj.weight", "H, I"),)),
)

# Gate above up, as in Megatron: an expert's part is its parameter.
PACKED = (
    Entry(_EXPERT + "linear_fc1.weight", ((_M + "experts.gate_up_proj", "E, 2*I, H"),), SLICE),
    Entry(_EXPERT + "linear_fc2.weight", ((_M + "experts.down_proj", "E, H, I"),), SLICE),
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    prefix="mtp.",
    dims={
        "H": "hidden_size",
        "A": "num_attention_heads",
        "G": "num_key_value_heads",
        "D": "head_dim",
        "E": "num_experts",
        "I": "moe_intermediate_size",
        "S": "shared_expert_intermediate_size",
    },
    layouts={"per-expert": SHARED + ONE_BY_ONE, "packed": SHARED + PACKED},
    requirements=REQUIREMENTS,
    fields=(*FIELDS, "num_experts_per_tok"),
    checks=(*CHECKS, chosen_of("num_experts")),
    rotary=PLAIN,
    zero_centred_norms=True,
    feedback=FEEDBACK,
)
