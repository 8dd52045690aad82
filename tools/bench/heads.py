"""The MTP objective of one tree, as a call that can be measured.

Shape suffixes: S sequence, B batch (1 here), H hidden, D depths, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from tools.bench.trees import Pair, Tree

CHUNK = "mtp_loss_chunk_size"


@dataclasses.dataclass
class Inputs:
    """What both trees work on; ``hidden`` is a leaf of [(1 + D) s, 1, h], the rest [1, s]."""

    hidden: torch.Tensor
    labels_BS: torch.Tensor
    mask_BS: torch.Tensor

    @classmethod
    def random(
        cls, length: int, depths: int, width: int, vocabulary: int, fraction: float, dtype, seed=0
    ) -> Inputs:
        """Normal hidden states, and ``fraction`` of the tokens supervised, at scattered places."""
        from tests.support import device

        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn((1 + depths) * length, 1, width, generator=generator)
        mask_S = torch.zeros(length)
        mask_S[torch.randperm(length, generator=generator)[: round(fraction * length)]] = 1.0
        return cls(
            hidden=hidden.to(device(), dtype).requires_grad_(),
            labels_BS=torch.randint(vocabulary, (1, length), generator=generator).to(device()),
            mask_BS=mask_S[None].to(device()),
        )


def build(tree: Tree, pair: Pair, vocabulary: int, width: int, dtype, depths: int = 1, **spec: Any):
    """A one-layer GPTModel of a tree; both trees' have the same weights."""
    with tree.active():
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from tests.support import ModelSpec, build_model

        MTPLossLoggingHelper.tracker.clear()  # sized for the depths of the model before
        described = ModelSpec(
            mtp_num_layers=depths,
            num_layers=spec.pop("num_layers", 1),
            hidden_size=width,
            vocab_size=vocabulary,
            dtype=dtype,
            **spec,
        )
        return build_model(described, pair.groups[tree.name])


def build_head(tree: Tree, pair: Pair, vocabulary: int, width: int, dtype):
    """A tiny GPTModel of a tree with an output layer of the size asked for.

    The objective needs no more. The support library's own models draw every weight in float64 on
    the host, which takes minutes at the vocabularies of large models.
    """
    model = build(tree, pair, 64, width, dtype)
    with tree.active():
        from megatron.core.tensor_parallel import ColumnParallelLinear

        layer = ColumnParallelLinear(
            width,
            vocabulary,
            config=model.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            gather_output=False,
            tp_group=pair.groups[tree.name].tp,
        )
    model.output_layer = layer.to(model.embedding.word_embeddings.weight.device, dtype)
    torch.manual_seed(0)  # alike in both trees
    torch.nn.init.normal_(model.output_layer.weight, std=width**-0.5)
    return model


def chunked(tree: Tree, chunk: int) -> dict[str, Any]:
    """Config fields that turn the chunked objective on: ours alone has it."""
    return {CHUNK: chunk} if tree.name == "ours" else {}


class Objective:
    """Forward and backward of ``process_mtp_loss`` of one tree's model.

    Args:
        tree: whose.
        model: a GPTModel of the tree.
        depths: D of the inputs, whatever the model was built with.
        isolated: keep the output weight out of it.
        chunk: ``mtp_loss_chunk_size``; 0 is the plain path, and all there is upstream.
        objective: ``mtp_objective``, of ours.
    """

    def __init__(
        self,
        tree: Tree,
        model,
        depths: int,
        isolated: bool = False,
        chunk: int = 0,
        objective: str = "ce",
    ):
        self.tree, self.model = tree, model
        self.config = copy.copy(model.config)
        self.config.mtp_num_layers = depths
        self.config.mtp_detach_heads = isolated
        self.ours: dict[str, Any] = {}
        if tree.name == "ours":
            setattr(self.config, CHUNK, chunk)
            self.config.mtp_objective = objective
            metrics = tree.load("megatron.core.transformer.mtp_objective.metrics")
            self.ours = dict(
                mtp_isolated_loss=isolated, mtp_metric_sums=metrics.MetricSums(depths)
            )
        heads = tree.load("megatron.core.transformer.multi_token_prediction")
        self._process, self._tracker = heads.process_mtp_loss, heads.MTPLossLoggingHelper.tracker

    def __call__(self, inputs: Inputs) -> None:
        """Run it; gradients are left on ``inputs.hidden`` and, not isolated, on the weight."""
        self.release(inputs)
        groups = self.model.pg_collection
        with self.tree.active():
            self._tracker.clear()  # its size is that of the last caller's depths
            main_SBH = self._process(
                hidden_states=inputs.hidden,
                labels=inputs.labels_BS,
                loss_mask=inputs.mask_BS,
                output_layer=self.model.output_layer,
                output_weight=None,
                runtime_gather_output=None,
                is_training=True,
                compute_language_model_loss=self.model.compute_language_model_loss,
                config=self.config,
                cp_group=groups.cp,
                tp_group=groups.tp,
                packed_seq_params=None,
                scale_logits_fn=None,
                **self.ours,
            )
            main_SBH.backward(torch.zeros_like(main_SBH))

    def release(self, inputs: Inputs) -> None:
        """Drop the gradients that a run left."""
        inputs.hidden.grad = self.model.output_layer.weight.grad = None

    def gradients(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Run it and return the gradients it leaves, by name."""
        self(inputs)
        found = {"hidden states": inputs.hidden.grad, "weight": self.model.output_layer.weight.grad}
        return {name: value.clone() for name, value in found.items() if value is not None}
