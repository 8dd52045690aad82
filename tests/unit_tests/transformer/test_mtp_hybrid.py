"""HybridModel: the same promises as GPTModel, from the same tests, and what only it has."""

import inspect

import pytest
import torch

for _name in ("contract", "contract_skips", "contract_calls"):
    pytest.register_assert_rewrite(f"tests.support.{_name}")

from tests.support import is_mtp_param, prepare, thd_batch
from tests.support.contract import (
    VOCABULARY,
    ModelContract,
    ReturnLogitsContract,
    inputs,
    mtp_gradients,
    sampled_batch,
    tracker,
)
from tests.support.contract_calls import CallContract
from tests.support.contract_skips import SkippedHeadsContract
from tests.support.release import counts_acceptance, hybrid_model

prepare()

NEW_ARGUMENTS = ("return_logits", "mtp_isolated_loss", "compute_mtp_loss", "mtp_loss_normalizer")


class TestHybridModelReturnsLogits(ReturnLogitsContract):
    family = "hybrid"


class TestHybridModelSkipsHeads(SkippedHeadsContract):
    family = "hybrid"


class TestHybridModelCalls(CallContract):
    family = "hybrid"


class TestHybridModelItself(ModelContract):
    family = "hybrid"

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_a_config_with_depths_but_a_pattern_without_heads_gives_logits(self, mode):
        model, batch = self.build(mtp_num_layers=0).train(mode == "train"), sampled_batch()
        wanted_BSV, wanted_BS = model(**inputs(batch)), model(**batch.forward_kwargs())
        model.config.mtp_num_layers = 2
        assert torch.equal(model(**inputs(batch)), wanted_BSV)
        assert torch.equal(model(**batch.forward_kwargs(), return_logits=True), wanted_BSV)
        assert torch.equal(model(**batch.forward_kwargs()), wanted_BS)
        assert wanted_BSV.shape == (2, 16, VOCABULARY)
        assert tracker() == {}

    def test_packed_sequences_return_logits_and_train_isolated_heads(self):
        model = self.build(mtp_isolated_loss=True)
        batch = thd_batch(lengths=(5, 3), padded_lengths=(8, 4))
        got = mtp_gradients(model, batch)
        assert {n for n, g in got.items() if g.any()} == set(filter(is_mtp_param, got))
        # 4 + 2 labels, one fewer in each sequence for every depth.
        if counts_acceptance():
            assert tracker()["total_values"].tolist() == [4, 2]


def test_the_new_arguments_are_those_of_gpt_model_with_the_same_defaults():
    from megatron.core.models.gpt import GPTModel
    gpt, hybrid = (inspect.signature(m.forward).parameters for m in (GPTModel, hybrid_model()))
    for name in NEW_ARGUMENTS:
        assert hybrid[name].default is gpt[name].default
        assert hybrid[name].kind is gpt[name].kind is inspect.Parameter.KEYWORD_ONLY
