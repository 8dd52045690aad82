"""Qwen3.5, dense; the parts of the head that the MoE models share."""

from __future__ import annotations

from tools.mtp_checkpoint.families.checks import even_rotary, positive, whole
from tools.mtp_checkpoint.families.family import Family, Requirement
from tools.mtp_checkpoint.families.rotary import PLAIN
from tools.mtp_checkpoint.rules import COPY, GATE_UP, NORM, Entry, GroupedQKV

_L, _T = "layers.0.", "mtp_model_layer."

REQUIREMENTS = (
    Requirement("mtp_num_hidden_layers", 1, "heads of one layer are supported", default=1),
    Requirement(
        "mtp_use_dedicated_embeddings",
        False,
        "the head shares the target's embedding and output layer",
        default=False,
    ),
    Requirement("attention_bias", False, "the table has no biases", default=False),
    Requirement("hidden_act", "silu", "the layer is built with a gated SiLU", default="silu"),
)

FIELDS = ("num_hidden_layers", "rms_norm_eps")
PARTIAL_ROTARY = 0.25  # where the configuration does not say
CHECKS = (
    whole("num_hidden_layers"),
    positive("rms_norm_eps", "rope_theta"),
    even_rotary("head_dim", PARTIAL_ROTARY),
)

# vLLM: models/qwen3_5_mtp.py returns what its norm puts out. SGLang: models/qwen3_5_mtp.py, too.
FEEDBACK = {"vllm": "post-norm", "sglang": "post-norm"}

ATTENTION_AND_NORMS = (
    Entry("enorm.weight", (("pre_fc_norm_embedding.weight", "H"),), NORM),
    Entry("hnorm.weight", (("pre_fc_norm_hidden.weight", "H"),), NORM),
    # Both take [embedding, hidden].
    Entry("eh_proj.weight", (("fc.weight", "H, 2*H"),), COPY),
    Entry(_T + "input_layernorm.weight", ((_L + "input_layernorm.weight", "H"),), NORM),
    Entry(
        _T + "self_attention.linear_qkv.weight",
        (
            (_L + "self_attn.q_proj.weight", "2*A*D, H"),
            (_L + "self_attn.k_proj.weight", "G*D, H"),
            (_L + "self_attn.v_proj.weight", "G*D, H"),
        ),
        GroupedQKV(gated=True),
    ),
    Entry(_T + "self_attention.q_layernorm.weight", ((_L + "self_attn.q_norm.weight", "D"),), NORM),
    Entry(_T + "self_attention.k_layernorm.weight", ((_L + "self_attn.k_norm.weight", "D"),), NORM),
    Entry(_T + "self_attention.linear_proj.weight", ((_L + "self_attn.o_proj.weight", "H, A*D"),)),
    Entry(_T + "pre_mlp_layernorm.weight", ((_L + "post_attention_layernorm.weight", "H"),), NORM),
    Entry("final_layernorm.weight", (("norm.weight", "H"),), NORM),
)

MLP = (
    Entry(
        _T + "mlp.linear_fc1.weight",
        ((_L + "mlp.gate_proj.weight", "F, H"), (_L + "mlp.up_proj.weight", "F, H")),
        GATE_UP,
    ),
    Entry(_T + "mlp.linear_fc2.weight", ((_L + "mlp.down_proj.weight", "H, F"),)),
)

QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    prefix="mtp.",
    dims={
        "H": "hidden_size",
        "A": "num_attention_heads",
        "G": "num_key_value_heads",
        "D": "head_dim",
        "F": "intermediate_size",
    },
    layouts={"dense": ATTENTION_AND_NORMS + MLP},
    requirements=REQUIREMENTS,
    fields=FIELDS,
    checks=CHECKS,
    rotary=PLAIN,
    zero_centred_norms=True,
    feedback=FEEDBACK,
)
