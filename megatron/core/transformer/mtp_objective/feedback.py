"""Which hidden states of a head the next depth reads.

With layer L_k, its closing norm N_k, h_0 what the decoder hands over and e_k(t) the embedding of
token t + k, depth k at position t computes

    x_k = L_k(e_k, h_{k-1})        the layer's output
    logits of depth k = W · N_k(x_k)
    h_k = N_k(x_k)  ("post-norm", upstream's)   or   x_k  ("pre-norm")

Rollout engines that run one layer for several draft steps differ here: vLLM's DeepSeek-V3 head
feeds x_k back (vllm/model_executor/models/deepseek_mtp.py), its Qwen3.5 and MiMo heads, and SGLang's
heads of all three, N(x_k).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

FEEDBACKS = ("post-norm", "pre-norm")


def feeds_back_pre_norm(config: TransformerConfig) -> bool:
    """Whether a depth starts from the previous one's states before their closing norm."""
    return config.mtp_hidden_feedback == "pre-norm"


def check_feedback_config(config: TransformerConfig) -> None:
    """Refuse a feedback that is unknown, or that has no heads to act on.

    Raises:
        ValueError: ``mtp_hidden_feedback`` is none of `FEEDBACKS`; or it is "pre-norm" without
            ``mtp_num_layers``.
    """
    feedback = config.mtp_hidden_feedback
    if feedback not in FEEDBACKS:
        raise ValueError(
            f"mtp_hidden_feedback must be one of {', '.join(FEEDBACKS)}, got {feedback!r}."
        )
    if feeds_back_pre_norm(config) and not config.mtp_num_layers:
        raise ValueError(
            "mtp_hidden_feedback='pre-norm' says what a depth of MTP hands to the next, but "
            f"mtp_num_layers is {config.mtp_num_layers}: set mtp_num_layers or drop "
            "mtp_hidden_feedback."
        )
