"""What a depth hands to the next: its states behind the closing norm, or before it.

    python -m pytest tests/unit_tests/transformer/test_mtp_feedback.py
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_config,
    build_model,
    fp64_cross_entropy,
    is_mtp_param,
    parallel_world,
    prepare,
    relative_error,
    worst_difference,
)
from tests.support.objective import nonzero, step_gradients

prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

PRE = dict(mtp_hidden_feedback="pre-norm")
FEEDBACKS = ("post-norm", "pre-norm")
DEPTHS = 3
by_feedback = pytest.mark.parametrize("feedback", FEEDBACKS)
by_layers = pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
by_family = pytest.mark.parametrize("family", ["gpt", "hybrid"])


@pytest.fixture(scope="module", autouse=True)
def groups():
    with parallel_world() as groups, fp64_cross_entropy():
        yield groups


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


def spec_of(feedback=None, depths=DEPTHS, **fields):
    overrides = {} if feedback is None else dict(mtp_hidden_feedback=feedback)
    overrides |= fields.pop("overrides", {})
    sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=2, mtp_num_layers=depths)
    return ModelSpec(**{**sizes, **fields}, overrides=overrides)


def plain_norm(weights, name, x_BSH):
    weight_H, bias_H = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return F.layer_norm(x_BSH, x_BSH.shape[-1:], weight_H, bias_H)


def plain_layer(weights, heads, x_BSH):
    """Upstream's local layer in PyTorch: pre-norm attention with rotary embedding, then an MLP.

    ``linear_qkv`` has, per head, the rows of query, key and value.
    """

    def linear(name, x_BSH):
        return F.linear(x_BSH, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def rotated(x_BASD):
        half = x_BASD.shape[-1] // 2
        frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles_SD = (torch.arange(x_BASD.shape[2]).float()[:, None] * frequencies).repeat(1, 2)
        turned = torch.cat([-x_BASD[..., half:], x_BASD[..., :half]], dim=-1)
        return x_BASD * angles_SD.cos().to(x_BASD) + turned * angles_SD.sin().to(x_BASD)

    qkv = linear("self_attention.linear_qkv", plain_norm(weights, "input_layernorm", x_BSH))
    q, k, v = qkv.unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    attended = attended.transpose(1, 2).flatten(2)
    x_BSH = x_BSH + linear("self_attention.linear_proj", attended)
    inner = linear("mlp.linear_fc1", plain_norm(weights, "pre_mlp_layernorm", x_BSH))
    return x_BSH + linear("mlp.linear_fc2", F.gelu(inner))


def plain_chain(model, batch, hidden_BSH, feedback):
    """The states that the output layer reads, one [b, s, h] for each depth."""
    states, heads = [], model.config.num_attention_heads
    for k in range(1, 1 + model.config.mtp_num_layers):
        layer = model.mtp.layers[0 if model.config.mtp_use_repeated_layer else k - 1]
        own = dict(layer.named_parameters())

        def norm(name, x_BSH):
            return plain_norm(own, name, x_BSH)

        ids_BS = F.pad(batch.input_ids[:, k:], (0, k))  # token t + k, 0 behind the last
        embedded_BSH = model.embedding.word_embeddings.weight[ids_BS]
        both = torch.cat([norm("enorm", embedded_BSH), norm("hnorm", hidden_BSH)], dim=-1)
        start = "mtp_model_layer."
        inner = {n.removeprefix(start): p for n, p in own.items() if n.startswith(start)}
        x_BSH = plain_layer(inner, heads, F.linear(both, own["eh_proj.weight"]))
        states.append(norm("final_layernorm", x_BSH))
        hidden_BSH = states[-1] if feedback == "post-norm" else x_BSH
    return states


def block_states(model, batch):
    """What the block is given, and what it returns for each depth, [b, s, h]."""
    found = []
    hook = model.mtp.register_forward_hook(lambda _module, _args, output: found.append(output))
    model(**batch.forward_kwargs())
    hook.remove()
    first, *depths = found[0].chunk(1 + model.config.mtp_num_layers)
    return first.transpose(0, 1), [depth_SBH.transpose(0, 1) for depth_SBH in depths]


@by_feedback
@by_layers
def test_every_depth_is_that_of_plain_pytorch_and_so_is_every_gradient(repeated, feedback):
    model, batch = build_model(spec_of(feedback, repeated=repeated)), bshd_batch(2, 8)
    hidden_BSH, got = block_states(model, batch)
    want = plain_chain(model, batch, hidden_BSH.detach(), feedback)
    # The last depth alone: what reaches earlier layers came through the chain.
    weights = torch.randn(want[-1].shape, generator=torch.Generator().manual_seed(1)).double()
    names, parameters = zip(*model.mtp.named_parameters())
    gradients = []
    for states in (got, want):
        score = (states[-1] * weights).sum()
        found = torch.autograd.grad(score, parameters, allow_unused=True, materialize_grads=True)
        gradients.append(dict(zip(names, found)))
    for depth, (ours_BSH, plain_BSH) in enumerate(zip(got, want, strict=True), 1):
        assert relative_error(ours_BSH, plain_BSH) <= 1e-12, depth
    assert worst_difference(*gradients)[0] <= 1e-12
    assert all(gradient.any() for n, gradient in gradients[0].items() if "layers.0.eh_proj" in n)
    # The closing norm of an earlier depth is passed only where the states behind it are fed back.
    reached = {n for n, gradient in gradients[0].items() if gradient.any()}
    if not repeated:
        closing = {f"layers.{k}.final_layernorm.weight" in reached for k in range(DEPTHS - 1)}
        assert closing == {feedback == "post-norm"}
    other = plain_chain(model, batch, hidden_BSH.detach(), FEEDBACKS[feedback == "post-norm"])
    assert torch.equal(other[0], want[0])
    assert all(relative_error(a, b) > 1e-3 for a, b in zip(other[1:], want[1:]))


@by_family
@by_layers
def test_the_default_is_to_feed_back_what_the_norm_puts_out(family, repeated):
    fields, batch = dict(family=family, repeated=repeated), bshd_batch(2, 8)
    want = step_gradients(build_model(spec_of(None, **fields)), batch, 1.0)
    same = step_gradients(build_model(spec_of("post-norm", **fields)), batch, 1.0)
    other = step_gradients(build_model(spec_of("pre-norm", **fields)), batch, 1.0)
    assert worst_difference(same, want)[0] == 0.0
    assert worst_difference(other, want)[0] > 1e-3


@by_family
def test_one_depth_feeds_nothing_back_and_computes_the_same_to_the_bit(family):
    batch = bshd_batch(2, 8)
    want = step_gradients(build_model(spec_of(None, 1, family=family)), batch, 1.0)
    got = step_gradients(build_model(spec_of("pre-norm", 1, family=family)), batch, 1.0)
    assert worst_difference(got, want)[0] == 0.0


@by_family
@by_layers
@pytest.mark.parametrize("isolated", [False, True], ids=["attached", "isolated"])
def test_recomputation_changes_no_bit_and_isolation_trains_every_head(isolated, repeated, family):
    fields = dict(family=family, repeated=repeated)
    overrides = dict(mtp_isolated_loss=isolated)
    found = {
        recompute: step_gradients(
            build_model(spec_of("pre-norm", recompute=recompute, overrides=overrides, **fields)),
            bshd_batch(2, 8),
            0.0 if isolated else 1.0,
        )
        for recompute in ("none", "full", "selective")
    }
    want = found["none"]
    assert nonzero(want) == {n for n in want if is_mtp_param(n) or not isolated}
    for recompute in ("full", "selective"):
        assert [n for n in want if not torch.equal(found[recompute][n], want[n])] == []


def test_chunks_of_logits_give_the_gradients_of_whole_ones():
    want, got = (
        step_gradients(
            build_model(spec_of("pre-norm", overrides=dict(mtp_loss_chunk_size=rows))),
            bshd_batch(2, 8),
        )
        for rows in (0, 3)
    )
    assert worst_difference(got, want)[0] <= 1e-12


@by_family
@by_feedback
@torch.inference_mode()
def test_a_step_of_speculative_decoding_returns_what_the_next_one_is_fed(feedback, family):
    model = build_model(spec_of(feedback, repeated=True, family=family)).eval()
    layer, seen = model.mtp.layers[0], []
    layer.final_layernorm.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    hidden_N1H = torch.randn(1, 1, 16, dtype=torch.float64)
    ids_1N = torch.tensor([[7]])
    for position in range(2):
        hidden_N1H, logits_N1V = model.compute_mtp_single_step(
            hidden_N1H, ids_1N, torch.tensor([[position]]), depth=0
        )
        before, behind = seen[-1]
        assert torch.equal(hidden_N1H, behind if feedback == "post-norm" else before)
        assert torch.equal(logits_N1V, model.output_layer(behind)[0])
    assert len(seen) == 2


@pytest.mark.parametrize(
    "overrides, depths, message",
    [
        (dict(mtp_hidden_feedback="prenorm"), 2, "one of post-norm, pre-norm, got 'prenorm'"),
        (PRE, 0, "mtp_num_layers is None: set mtp_num_layers or drop mtp_hidden_feedback"),
    ],
    ids=["unknown", "without heads"],
)
def test_a_feedback_that_means_nothing_is_refused(groups, overrides, depths, message):
    with pytest.raises(ValueError, match=message):
        build_config(spec_of(None, depths, overrides=overrides), groups)
