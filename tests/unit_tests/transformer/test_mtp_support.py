"""The tiny models, batches and attention that the other MTP tests stand on.

Run: ``pytest tests/unit_tests/transformer/test_mtp_support.py``. The tests of ranks, launches and
the stand-in are in ``tests/support``.
"""

import pytest
import torch
import torch.distributed as dist

from tests.support import (
    ModelSpec,
    all_reduce_gradients,
    bshd_batch,
    build_model,
    cp_shard,
    device,
    fp64_cross_entropy,
    grads_by_name,
    is_mtp_param,
    load_packed_targets,
    parallel_world,
    prepare,
    relative_error,
    run_ranks,
    shard,
    thd_batch,
    unshard,
    worst_difference,
    zigzag_indices,
)

prepare()

EXACT = 1e-12  # float64


def _plain_attention(query, key, value, spans):
    """Causal attention of each [start, end) span alone; other rows stay zero. [s, b, h, d]."""
    output = torch.zeros_like(query)
    for start, end in spans:
        q, k, v = (part[start:end].permute(1, 2, 0, 3) for part in (query, key, value))
        repeats = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output[start:end] = attended.permute(2, 0, 1, 3)
    return output


def _attention_error(cp: int, packed: bool) -> float:
    """Worst error of output and gradients of this rank's rows against `_plain_attention`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.support.attention import ReferenceAttention

    batch = thd_batch((5, 13, 8), (8, 16, 8)) if packed else bshd_batch(2, 16)
    spans = [(0, 5), (8, 21), (24, 32)] if packed else [(0, 16)]
    rows, columns = batch.input_ids.shape[1], batch.input_ids.shape[0]
    torch.manual_seed(0)
    shapes = [(rows, columns, heads, 8) for heads in (4, 2, 2, 4)]  # grouped queries
    whole = [torch.randn(shape, dtype=torch.float64, device=device()) for shape in shapes]
    *whole, upstream_gradient = whole
    whole = [tensor.requires_grad_() for tensor in whole]
    want = _plain_attention(*whole, spans)
    want_gradients = torch.autograd.grad(want, whole, upstream_gradient)
    with parallel_world(cp=cp) as groups:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            attention_dropout=0.0,
            context_parallel_size=cp,
        )
        attention = ReferenceAttention(config, 1, None, "self", pg_collection=groups)

        def part(tensor):
            mine = shard(tensor.transpose(0, 1), cp, groups.cp.rank(), batch.boundaries)
            return mine.transpose(0, 1)

        inputs = [part(tensor).detach().requires_grad_() for tensor in whole]
        given = [tensor.squeeze(1) for tensor in inputs] if packed else inputs
        got = attention(*given, packed_seq_params=batch.packed_seq_params)
        got.backward(part(upstream_gradient).flatten(2))
        errors = [relative_error(got, part(want).flatten(2))]
        for tensor, gradient in zip(inputs, want_gradients):
            errors.append(relative_error(tensor.grad, part(gradient)))
        return max(errors)


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd-padded"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_reference_attention_equals_plain_attention_at_any_context_parallel_size(cp, packed):
    assert max(run_ranks(_attention_error, cp, cp, packed)) <= EXACT


def _gradients(spec: ModelSpec, packed: bool, cp: int = 1, tp: int = 1):
    """Loss-mask-weighted sum of token losses and its gradients, summed over the ranks."""
    whole = thd_batch((5, 13, 8), (8, 16, 8)) if packed else bshd_batch(2, 16, mask="prompt")
    with parallel_world(cp=cp, tp=tp) as groups, fp64_cross_entropy():
        model = build_model(spec, groups)
        batch = cp_shard(whole, cp, groups.cp.rank())
        losses = model(**batch.forward_kwargs())
        total = (losses * batch.loss_mask).sum()
        total.backward()
        all_reduce_gradients(model, groups.cp)
        dist.all_reduce(total, group=groups.cp)
        return grads_by_name(model), total


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd-padded"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_main_loss_gradients_do_not_depend_on_context_parallelism(family, packed):
    spec = ModelSpec(family=family, mtp_num_layers=0, per_token=True)
    ((want, want_total),) = run_ranks(_gradients, 1, spec, packed)
    for got, total in run_ranks(_gradients, 2, spec, packed, 2):
        assert worst_difference(got, want)[0] <= EXACT
        assert relative_error(total, want_total) <= EXACT


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_of_both_families_gets_a_clear_gradient(family, repeated, tied):
    spec = ModelSpec(family=family, repeated=repeated, tied=tied)
    gradients, _ = _gradients(spec, packed=False)
    assert any(is_mtp_param(name) for name in gradients)
    assert not is_mtp_param("embedding.word_embeddings.weight")
    weakest = min(gradients, key=lambda name: gradients[name].abs().max())
    assert gradients[weakest].abs().max() > 1e-3, weakest


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_draws_the_same_dropout_again(family, recompute):
    dropout = dict(hidden_dropout=0.1, attention_dropout=0.1)
    kept = ModelSpec(family=family, mtp_num_layers=0, overrides=dropout)
    again = ModelSpec(family=family, mtp_num_layers=0, overrides=dropout, recompute=recompute)
    (want, _), (got, _) = (_gradients(spec, packed=False) for spec in (kept, again))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("gated", [False, True], ids=["plain-mlp", "gated-mlp"])
def test_weights_do_not_depend_on_tensor_parallelism(gated):
    overrides = dict(gated_linear_unit=True, add_bias_linear=False) if gated else {}
    spec = ModelSpec(mtp_num_layers=0, overrides=overrides)
    _, want = _gradients(spec, packed=False)
    for _, got in run_ranks(_gradients, 2, spec, False, 1, 2):
        assert relative_error(got, want) <= EXACT


def _weights(spec: ModelSpec, pp: int = 1, ep: int = 1):
    from tests.support.weights import whole_model_name

    with parallel_world(pp=pp, ep=ep) as groups:
        model = build_model(spec, groups)
        return {whole_model_name(n, model, groups): p for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_weights_do_not_depend_on_pipeline_and_expert_parallelism(family):
    spec = ModelSpec(family=family, tied=True, num_experts=4)
    (want,) = run_ranks(_weights, 1, spec)
    for pp, ep in ((2, 1), (1, 2)):
        parts = run_ranks(_weights, 2, spec, pp, ep)
        assert parts[0].keys() | parts[1].keys() == want.keys()
        assert all(torch.equal(part[name], want[name]) for part in parts for name in part)


class TestBatches:
    """Inputs that explain themselves."""

    def test_tokens_say_which_sequence_they_belong_to(self):
        batch = thd_batch((5, 3), (8, 4))
        assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 0, 0, 0, 20, 21, 22, 0]]
        assert batch.labels.tolist() == [[11, 12, 13, 14, 0, 0, 0, 0, 21, 22, 0, 0]]
        assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
        assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 5, 8]
        assert batch.packed_seq_params.cu_seqlens_q_padded.tolist() == [0, 8, 12]

    def test_masks_mark_what_their_names_say(self):
        supervised = {
            mask: (bshd_batch(2, 8, mask).loss_mask.sum(), thd_batch(mask=mask).loss_mask.sum())
            for mask in ("full", "prompt", "one-hot", "empty")
        }
        counts = {mask: tuple(int(n) for n in pair) for mask, pair in supervised.items()}
        assert counts == {"full": (16, 6), "prompt": (8, 3), "one-hot": (1, 1), "empty": (0, 0)}

    @pytest.mark.parametrize("cp", [1, 2, 4])
    def test_parts_of_all_ranks_make_up_the_whole(self, cp):
        for whole in (bshd_batch(2, 16), thd_batch((5, 13), (8, 16))):
            parts = [cp_shard(whole, cp, rank).input_ids for rank in range(cp)]
            assert torch.equal(unshard(parts, whole.boundaries), whole.input_ids)

    def test_recorded_packed_targets_agree_with_the_plain_sharding(self):
        cases = load_packed_targets()
        assert len(cases) >= 3
        for case in cases:
            for cp, ranks in case.ranks.items():
                for rank, part in enumerate(ranks):
                    total = len(case.inputs.input_ids)
                    owned = zigzag_indices(total, cp, rank, case.cu_seqlens_padded)
                    assert part.owned == owned
                    assert part.inputs.labels == [case.inputs.labels[i] for i in owned]

    def test_lengths_that_do_not_split_are_refused(self):
        with pytest.raises(ValueError, match="pad it to a multiple of 8"):
            zigzag_indices(12, 4, 0)
