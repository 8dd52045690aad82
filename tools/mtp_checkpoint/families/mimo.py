"""MiMo: a dense head whose projection takes [hidden, embedding], with biases on q, k and v."""

from __future__ import annotations

from tools.mtp_checkpoint.families.checks import even_rotary, positive, whole
from tools.mtp_checkpoint.families.family import Family, Requirement
from tools.mtp_checkpoint.families.rotary import PLAIN
from tools.mtp_checkpoint.rules import GATE_UP, NORM, SWAP_HALVES, Entry, GroupedQKV

_T = "mtp_model_layer."

TABLE = (
    Entry("enorm.weight", (("token_layernorm.weight", "H"),), NORM),
    Entry("hnorm.weight", (("hidden_layernorm.weight", "H"),), NORM),
    Entry("eh_proj.weight", (("input_proj.weight", "H, 2*H"),), SWAP_HALVES),
    Entry("final_layernorm.weight", (("final_layernorm.weight", "H"),), NORM),
    Entry(_T + "input_layernorm.weight", (("input_layernorm.weight", "H"),), NORM),
    Entry(_T + "pre_mlp_layernorm.weight", (("post_attention_layernorm.weight", "H"),), NORM),
    Entry(
        _T + "self_attention.linear_qkv.weight",
        (
            ("self_attn.q_proj.weight", "A*D, H"),
            ("self_attn.k_proj.weight", "G*D, H"),
            ("self_attn.v_proj.weight", "G*D, H"),
        ),
        GroupedQKV(),
    ),
    Entry(
        _T + "self_attention.linear_qkv.bias",
        (
            ("self_attn.q_proj.bias", "A*D"),
            ("self_attn.k_proj.bias", "G*D"),
            ("self_attn.v_proj.bias", "G*D"),
        ),
        GroupedQKV(),
    ),
    Entry(_T + "self_attention.linear_proj.weight", (("self_attn.o_proj.weight", "H, A*D"),)),
    Entry(
        _T + "mlp.linear_fc1.weight",
        (("mlp.gate_proj.weight", "F, H"), ("mlp.up_proj.weight", "F, H")),
        GATE_UP,
    ),
    Entry(_T + "mlp.linear_fc2.weight", (("mlp.down_proj.weight", "H, F"),)),
)

MIMO = Family(
    name="mimo",
    model_types=("mimo",),
    prefix="model.mtp_layers.0.",
    dims={
        "H": "hidden_size",
        "A": "num_attention_heads",
        "G": "num_key_value_heads",
        "D": "head_dim",
        "F": "intermediate_size",
    },
    layouts={"dense": TABLE},
    requirements=(
        Requirement("num_nextn_predict_layers", 1, "heads of one layer are supported", default=1),
        Requirement("attention_bias", True, "the table has the biases of q, k and v", default=True),
        Requirement("hidden_act", "silu", "the layer is built with a gated SiLU", default="silu"),
        Requirement("partial_rotary_factor", 1.0, "the layer rotates whole heads", default=1.0),
        Requirement("use_sliding_window", False, "the layer attends to all", default=False),
    ),
    fields=("num_hidden_layers", "rms_norm_eps"),
    checks=(
        whole("num_hidden_layers"),
        positive("rms_norm_eps", "rope_theta"),
        even_rotary("head_dim", 1.0),
    ),
    rotary=PLAIN,
    # Both engines' models/mimo_mtp.py return what final_layernorm puts out.
    feedback={"vllm": "post-norm", "sglang": "post-norm"},
)
