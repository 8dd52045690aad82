"""DeepSeek-V3: the head is one more layer, after the last, with multi-latent attention.

K is the width of a query or key head, V of a value head, R the rotary part; Q and C are the ranks
of the query's and of the key-value compression. The published weights are FP8, which is refused;
converted ones in bfloat16 are read.
"""

from __future__ import annotations

from tools.mtp_checkpoint.families.checks import chosen_of, expert_groups, positive, yarn
from tools.mtp_checkpoint.families.family import Family, Requirement
from tools.mtp_checkpoint.families.rotary import PLAIN
from tools.mtp_checkpoint.rules import COPY, GATE_UP, NORM, Entry

_T = "mtp_model_layer."
_A, _M = _T + "self_attention.", _T + "mlp."
_EXPERT = _M + "experts.local_experts.{e}."

TABLE = (
    Entry("enorm.weight", (("enorm.weight", "H"),), NORM),
    Entry("hnorm.weight", (("hnorm.weight", "H"),), NORM),
    Entry("eh_proj.weight", (("eh_proj.weight", "H, 2*H"),), COPY),
    Entry("final_layernorm.weight", (("shared_head.norm.weight", "H"),), NORM),
    Entry(_T + "input_layernorm.weight", (("input_layernorm.weight", "H"),), NORM),
    Entry(_T + "pre_mlp_layernorm.weight", (("post_attention_layernorm.weight", "H"),), NORM),
    Entry(_A + "linear_q_down_proj.weight", (("self_attn.q_a_proj.weight", "Q, H"),)),
    Entry(_A + "q_layernorm.weight", (("self_attn.q_a_layernorm.weight", "Q"),), NORM),
    Entry(_A + "linear_q_up_proj.weight", (("self_attn.q_b_proj.weight", "A*K, Q"),)),
    Entry(_A + "linear_kv_down_proj.weight", (("self_attn.kv_a_proj_with_mqa.weight", "CR, H"),)),
    Entry(_A + "kv_layernorm.weight", (("self_attn.kv_a_layernorm.weight", "C"),), NORM),
    Entry(_A + "linear_kv_up_proj.weight", (("self_attn.kv_b_proj.weight", "A*NV, C"),)),
    Entry(_A + "linear_proj.weight", (("self_attn.o_proj.weight", "H, A*V"),)),
    Entry(_M + "router.weight", (("mlp.gate.weight", "E, H"),)),
    Entry(_M + "router.expert_bias", (("mlp.gate.e_score_correction_bias", "E"),)),
    Entry(
        _EXPERT + "linear_fc1.weight",
        (
            ("mlp.experts.{e}.gate_proj.weight", "I, H"),
            ("mlp.experts.{e}.up_proj.weight", "I, H"),
        ),
        GATE_UP,
    ),
    Entry(_EXPERT + "linear_fc2.weight", (("mlp.experts.{e}.down_proj.weight", "H, I"),)),
    Entry(
        _M + "shared_experts.linear_fc1.weight",
        (
            ("mlp.shared_experts.gate_proj.weight", "N*I, H"),
            ("mlp.shared_experts.up_proj.weight", "N*I, H"),
        ),
        GATE_UP,
    ),
    Entry(
        _M + "shared_experts.linear_fc2.weight",
        (("mlp.shared_experts.down_proj.weight", "H, N*I"),),
    ),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    prefix="model.layers.{num_hidden_layers}.",
    dims={
        "H": "hidden_size",
        "A": "num_attention_heads",
        "Q": "q_lora_rank",
        "C": "kv_lora_rank",
        "CR": "kv_lora_rank+qk_rope_head_dim",
        "K": "qk_nope_head_dim+qk_rope_head_dim",
        "NV": "qk_nope_head_dim+v_head_dim",
        "V": "v_head_dim",
        "E": "n_routed_experts",
        "I": "moe_intermediate_size",
        "N": "n_shared_experts",
    },
    layouts={"per-expert": TABLE},
    requirements=(
        Requirement("num_nextn_predict_layers", 1, "heads of one layer are supported", default=1),
        Requirement("attention_bias", False, "the table has no biases", default=False),
        Requirement("hidden_act", "silu", "the layer is built with a gated SiLU", default="silu"),
        Requirement("rope_interleave", True, "the layer rotates neighbours", default=True),
        Requirement("norm_topk_prob", True, "the router renormalises", default=True),
        Requirement("scoring_func", "sigmoid", "the router's scores are sigmoids", "sigmoid"),
        Requirement("topk_method", "noaux_tc", "the router adds its bias", "noaux_tc"),
    ),
    fields=(
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "rms_norm_eps",
    ),
    checks=(
        positive("routed_scaling_factor", "rms_norm_eps", "rope_theta"),
        chosen_of("n_routed_experts"),
        expert_groups,
        yarn,
    ),
    rotary=(*PLAIN, "yarn"),
    copies={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
    # vLLM: models/deepseek_mtp.py returns the layer's output, and compute_logits applies the norm.
    # SGLang: models/deepseek_nextn.py returns what shared_head.norm puts out.
    feedback={"vllm": "pre-norm", "sglang": "post-norm"},
)
