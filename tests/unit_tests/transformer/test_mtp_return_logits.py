"""GPTModel: logits with external labels, heads that do not run in vain, and bad input."""

from functools import partial

import pytest
import torch

for _name in ("contract", "contract_skips", "contract_calls"):
    pytest.register_assert_rewrite(f"tests.support.{_name}")

from tests.support import fp64_cross_entropy, grads_by_name, is_mtp_param, prepare
from tests.support.contract import (
    VOCABULARY,
    ModelContract,
    ReturnLogitsContract,
    inputs,
    sampled_batch,
    tracker,
)
from tests.support.contract_calls import CallContract
from tests.support.contract_skips import SkippedHeadsContract, calls_of
from tests.support.release import (
    has_output_processor,
    require_derived_targets,
    require_output_processor,
)

prepare()

from megatron.core.transformer.mtp_objective.options import MTPOptions


class TestGPTModelReturnsLogits(ReturnLogitsContract):
    family = "gpt"


class TestGPTModelSkipsHeads(SkippedHeadsContract):
    family = "gpt"


class TestGPTModelCalls(CallContract):
    family = "gpt"

    def test_return_logits_together_with_an_output_processor_is_refused(self):
        require_output_processor()
        model, batch = self.build(), sampled_batch()
        message = "return_logits=True and output_processor both decide what forward returns"
        with pytest.raises(ValueError, match=message):
            model(**batch.forward_kwargs(), return_logits=True, output_processor=print)

    def test_an_output_processor_alone_still_gets_labels_and_hidden_states(self):
        require_output_processor()
        model, batch = self.build(), sampled_batch()

        def shapes(hidden_states, labels, **_others):
            return tuple(hidden_states.shape), labels

        shape, labels = model(**batch.forward_kwargs(), output_processor=shapes)
        assert shape == (16, 2, 32) and labels is batch.labels


class TestGPTModelWithoutABlock(ModelContract):
    """``mtp_num_layers`` in the config, but ``mtp_block_spec=None``: evaluation, frozen targets."""

    family = "gpt"

    @pytest.mark.parametrize("mode", ["train", "eval"])
    @pytest.mark.parametrize("with_gradients", [False, True])
    def test_it_gives_logits_and_losses_of_the_whole_sequence(self, mode, with_gradients):
        model, batch = self.build(mtp_num_layers=0).train(mode == "train"), sampled_batch()
        wanted_BSV, wanted_BS = model(**inputs(batch)), model(**batch.forward_kwargs())
        model.config.mtp_num_layers = 2
        assert model.mtp_process is False
        with torch.set_grad_enabled(with_gradients):
            assert torch.equal(model(**inputs(batch)), wanted_BSV)
            assert torch.equal(model(**batch.forward_kwargs(), return_logits=True), wanted_BSV)
            assert torch.equal(model(**batch.forward_kwargs()), wanted_BS)
        assert wanted_BSV.shape == (2, 16, VOCABULARY)
        assert tracker() == {}


    def test_a_weighting_that_needs_a_normalizer_needs_none_without_heads(self):
        model, batch = self.build(mtp_num_layers=0), sampled_batch()
        model.config.mtp_num_layers, model.config.mtp_loss_normalization = 2, "global"
        assert model(**batch.forward_kwargs(), return_logits=True).shape == (2, 16, VOCABULARY)


class TestGPTModelStages(ModelContract):
    """Hidden states that already include the heads', and those that another stage expects."""

    family = "gpt"

    @pytest.mark.parametrize("with_labels", [False, True])
    def test_postprocess_alone_trains_the_heads_in_its_hidden_states(self, with_labels):
        """As the expert-overlap schedule plan calls it: its own nodes ran the block."""
        if not with_labels:
            require_derived_targets()
        model, batch = self.build(), sampled_batch()
        kwargs = batch.forward_kwargs() if with_labels else inputs(batch)
        with fp64_cross_entropy():
            wanted = model(**kwargs)
            hidden_SBH = heads_hidden_states(model, kwargs).requires_grad_()
            with calls_of(model) as calls:
                got = postprocess(model, hidden_SBH, kwargs)
            assert torch.equal(got, wanted)
            (got * 0).sum().backward()
        assert calls == dict(block=0, head=3)
        decoder_SBH, *heads_SBH = hidden_SBH.grad.chunk(3)
        assert not decoder_SBH.any()
        assert all(head_SBH.any() for head_SBH in heads_SBH)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_postprocess_alone_drops_heads_that_nobody_can_use(self, mode):
        model, batch = self.build().train(mode == "train"), sampled_batch()
        hidden_SBH = heads_hidden_states(model, batch.forward_kwargs())
        tracker().clear()
        with torch.no_grad(), calls_of(model) as calls:
            got_BSV = postprocess(model, hidden_SBH, inputs(batch))
            assert torch.equal(got_BSV, model(**inputs(batch)))
        assert calls == dict(block=0, head=2)
        assert tracker() == {}

    @pytest.mark.parametrize("detach_heads", [False, True])
    def test_postprocess_alone_follows_the_config(self, detach_heads):
        model, batch = self.build(mtp_detach_heads=detach_heads), sampled_batch()
        kwargs = batch.forward_kwargs()
        hidden_SBH = heads_hidden_states(model, kwargs).requires_grad_()
        (postprocess(model, hidden_SBH, kwargs) * 0).sum().backward()
        head = grads_by_name(model)["output_layer.weight"]
        assert bool(head.any()) is not detach_heads

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_a_standalone_stage_sends_the_same_shape_with_and_without_heads(self, mode):
        """The next stage splits what it receives in 1 + D parts, needed or not."""
        model, batch = self.build().train(mode == "train"), sampled_batch()
        model.post_process = False
        sent_SBH = model(**batch.forward_kwargs())
        with torch.no_grad(), calls_of(model) as calls:
            skipped_SBH = model(**batch.forward_kwargs())
        assert calls["block"] == 0
        assert skipped_SBH.shape == sent_SBH.shape == (3 * 16, 2, 32)
        assert torch.equal(skipped_SBH[:16], sent_SBH[:16])

    def test_a_standalone_stage_without_heads_sends_the_policys_gradient_back(self):
        model, batch = self.build(), sampled_batch()
        model.post_process = False
        model(**batch.forward_kwargs(), compute_mtp_loss=False).sum().backward()
        gradients = grads_by_name(model)
        assert gradients["embedding.word_embeddings.weight"].any()
        assert not any(gradients[name].any() for name in gradients if is_mtp_param(name))


def heads_hidden_states(model, kwargs) -> torch.Tensor:
    """[(1 + D) s, b, h]: what the model's own block gives for these inputs, without a graph."""
    captured = []
    handle = model.mtp.register_forward_hook(lambda _module, _args, output: captured.append(output))
    # Labels make the block run in eval mode too.
    labels = kwargs["input_ids"] if kwargs["labels"] is None else kwargs["labels"]
    model(**kwargs | dict(labels=labels))
    handle.remove()
    return captured[0].detach().clone()


def postprocess(model, hidden_SBH, kwargs) -> torch.Tensor:
    """`GPTModel._postprocess` with the arguments of the schedule plan's last node."""
    processor = dict(output_processor=None, output_processor_context=None)
    return model._postprocess(
        hidden_states=hidden_SBH,
        input_ids=kwargs["input_ids"],
        position_ids=kwargs["position_ids"],
        labels=kwargs["labels"],
        decoder_input=None,
        rotary_pos_emb=None,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        mtp_in_postprocess=False,
        loss_mask=kwargs["loss_mask"],
        attention_mask=None,
        packed_seq_params=None,
        sequence_len_offset=None,
        runtime_gather_output=None,
        extra_block_kwargs=None,
        **(processor if has_output_processor() else {}),
    )

    @pytest.mark.parametrize("training", [False, True])
    def test_a_stage_of_heads_decides_without_the_labels_that_only_the_last_stage_sees(
        self, training
    ):
        config = self.build().config
        config.mtp_standalone = True
        decide = partial(MTPOptions.resolve, config, has_heads=True, training=training)
        labels = torch.ones(1, 4, dtype=torch.int64)
        assert decide(labels=None).active and decide(labels=labels).active
