"""Tests of the support code that the other MTP tests stand on.

Run: ``pytest tests/unit_tests/transformer/test_mtp_support.py``. With a GPU the tests of the
stand-in are skipped; everything else runs with and without one.
"""

import os
import subprocess
import sys
import textwrap
import time

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
    has_gpu,
    is_mtp_param,
    launch,
    load_packed_targets,
    parallel_world,
    prepare,
    relative_error,
    run_ranks,
    shard,
    standin,
    thd_batch,
    unshard,
    worst_difference,
    zigzag_indices,
)

prepare()

without_gpu = pytest.mark.skipif(has_gpu(), reason="the stand-in refuses to install beside a GPU")
EXACT = 1e-12  # float64


class TestStandIn:
    """The replacements of torch.cuda."""

    def test_refuses_beside_a_gpu_and_replaces_nothing(self):
        script = """
            import torch
            from tests.support import standin
            torch.cuda.is_available = lambda: True
            torch.cuda.device_count = lambda: 1
            before = torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda
            try:
                standin.install()
            except RuntimeError as error:
                assert "refuses to install" in str(error), error
                assert before == (torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda)
                assert not standin.installed()
                print("refused")
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "refused", done.stderr

    @without_gpu
    def test_installs_once(self):
        before = torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda
        standin.install()
        assert before == (torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda)
        assert standin.installed()

    @without_gpu
    def test_cuda_tensors_are_cpu_tensors(self):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1], pin_memory=True).cuda().tolist() == [1]
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"

    @without_gpu
    def test_device_contexts_still_reach_the_replaced_factories(self):
        with torch.device("meta"):
            assert torch.empty(2).is_meta and torch.tensor([1.0]).is_meta

    @without_gpu
    def test_cuda_random_state_is_saved_and_restored(self):
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def _cross_entropy_error(inside: bool) -> float:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = torch.randn(5, 2, 64, dtype=torch.float64, device=device())
    target = torch.arange(10, device=device()).view(5, 2)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    with parallel_world():
        if not inside:
            return relative_error(vocab_parallel_cross_entropy(logits, target).flatten(), want)
        with fp64_cross_entropy():
            return relative_error(vocab_parallel_cross_entropy(logits, target).flatten(), want)


def test_cross_entropy_keeps_float64_only_inside_the_context():
    assert _cross_entropy_error(inside=True) < 1e-15
    assert _cross_entropy_error(inside=False) > 1e-9


def _rank_and_sum(offset: int):
    with parallel_world(cp=int(os.environ["WORLD_SIZE"])) as groups:
        total = torch.tensor([float(groups.cp.rank() + offset)], device=device(), requires_grad=True)
        (total * 2).sum().backward()
        summed = total.detach().clone()
        dist.all_reduce(summed, group=groups.cp)
        return {"rank": groups.cp.rank(), "sum": summed}


def _fail_on_rank_one():
    with parallel_world(cp=2) as groups:
        if groups.cp.rank() == 1:
            raise KeyError("the cause")
        dist.barrier()


def _sleep_on_rank_one():
    with parallel_world(cp=2) as groups:
        if groups.cp.rank() == 1:
            time.sleep(600)
        dist.barrier()


def _die_on_rank_one():
    if os.environ["RANK"] == "1":
        os._exit(3)


def _skip():
    pytest.skip("not on this machine")


class TestRanks:
    """Ranks started from the test process."""

    def test_results_come_in_rank_order(self):
        results = run_ranks(_rank_and_sum, 3, 10)
        assert [result["rank"] for result in results] == [0, 1, 2]
        assert [result["sum"].item() for result in results] == [33.0] * 3

    def test_ranks_start_after_a_backward_and_a_world_of_the_test_process(self):
        with parallel_world():
            weight = torch.ones(64, 64, device=device(), requires_grad=True)
            (weight @ weight).sum().backward()
        assert not dist.is_initialized()
        assert len(run_ranks(_rank_and_sum, 2, 0)) == 2

    def test_a_failing_rank_ends_the_case_with_its_traceback(self):
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            run_ranks(_fail_on_rank_one, 2, timeout=60)
        message = str(failed.value)
        assert "KeyError: 'the cause'" in message and "in _fail_on_rank_one" in message
        assert message.index("rank 1 raised") < message.find("rank 0") or "rank 0" not in message
        assert time.monotonic() - start < 50

    def test_a_hanging_rank_ends_at_the_timeout_with_the_stack_of_every_rank(self):
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            run_ranks(_sleep_on_rank_one, 2, timeout=4)
        message = str(failed.value)
        assert "rank 0 did not end within 4 s" in message and "in barrier" in message
        assert "rank 1 did not end within 4 s" in message
        assert message.count("in _sleep_on_rank_one") == 2
        assert has_gpu() or time.monotonic() - start < 20

    def test_a_rank_that_dies_without_a_word_is_named(self):
        with pytest.raises(AssertionError, match="rank 1 died with exit code 3"):
            run_ranks(_die_on_rank_one, 2)

    def test_a_skip_in_a_rank_skips_the_test(self):
        with pytest.raises(pytest.skip.Exception, match="not on this machine"):
            run_ranks(_skip, 2)

    def test_functions_that_other_processes_cannot_import_are_refused(self):
        with pytest.raises(ValueError, match="module-level function"):
            run_ranks(lambda: None, 2)

    def test_starting_ranks_inside_a_world_is_refused(self):
        with parallel_world(), pytest.raises(RuntimeError, match="holds a process group"):
            run_ranks(_skip, 2)

    def test_a_world_inside_a_world_is_refused(self):
        with parallel_world(), pytest.raises(RuntimeError, match="already holds"):
            with parallel_world():
                pass


class TestTorchrun:
    """Launches as users make them."""

    @staticmethod
    def _script(tmp_path, body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body))
        return str(path)

    def test_the_result_of_rank_zero_comes_back(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import torch, torch.distributed as dist
            from tests.support import device, parallel_world
            from tests.support.worker import main

            def total(start):
                with parallel_world(cp=2) as groups:
                    rank = torch.tensor(float(start) + groups.cp.rank(), device=device())
                    dist.all_reduce(rank)
                with parallel_world(tp=2):
                    return rank.item()

            if __name__ == "__main__":
                main(total)
            """,
        )
        assert launch(script, 2, [10]) == 21.0

    def test_a_failing_rank_ends_the_launch_with_its_traceback(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import os, time

            def fail():
                raise KeyError("the cause")

            fail() if os.environ["RANK"] == "1" else time.sleep(600)
            """,
        )
        with pytest.raises(AssertionError) as failed:
            launch(script, 2, timeout=100)
        assert "rank 1 raised" in str(failed.value) and "in fail" in str(failed.value)
        assert "KeyError: 'the cause'" in str(failed.value)

    def test_a_hanging_launch_ends_at_the_timeout_with_the_stack_of_every_rank(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import time

            def wait_forever():
                time.sleep(600)

            wait_forever()
            """,
        )
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            launch(script, 2, timeout=20)
        message = str(failed.value)
        assert "rank 0 did not end within 20 s" in message and "rank 1 did" in message
        assert message.count("in wait_forever") == 2
        assert time.monotonic() - start < 40


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
