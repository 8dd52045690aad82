"""Pretrain a GPTModel with MTP heads through Megatron's own trainer and flags.

    torchrun --nproc-per-node 8 pretrain_gpt.py --mtp-num-layers 2 --mtp-isolated-loss ...

A Megatron-LM checkout has a larger one of the same name; this one needs the installed package
alone. Mock data (``--mock-data``) or a corpus (``--data-path``).
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split


def configuration():
    """Parse the command line, refuse what cannot work, and return the trainer's configuration."""
    args = parse_and_validate_args()
    return pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def datasets(num_samples, vp_stage=None):
    """Training, validation and test data of ``num_samples`` each; every rank reads its own."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


datasets.is_distributed = True  # tensor-parallel ranks read too, instead of receiving


def token_mean(loss_mask, losses):
    """Summed loss, number of tokens, and what to log."""
    mask = loss_mask.view(-1).float()
    total, tokens = torch.sum(losses.view(-1).float() * mask), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data_iterator, model):
    """One microbatch: token losses of the policy, to which the heads' objective is attached."""
    names = ("tokens", "position_ids", "labels", "loss_mask")
    sample = next(data_iterator)
    batch = {name: sample[name].cuda(non_blocking=True) for name in names}
    batch["cu_seqlens"] = None
    batch = get_batch_on_this_cp_rank(batch, False, cp_group=mpu.get_context_parallel_group())
    labels, mask = batch["labels"], batch["loss_mask"]
    losses = model(batch["tokens"], batch["position_ids"], None, labels=labels, loss_mask=mask)
    return losses, partial(token_mean, mask)


def embedding_ranks(pp_ranks):
    """Pipeline ranks that hold the embedding: the first, those with heads, the last if tied."""
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


def main() -> None:
    """Train."""
    kind = ModelType.encoder_or_decoder
    pretrain(configuration(), datasets, kind, forward_step, get_embedding_ranks=embedding_ranks)


if __name__ == "__main__":
    main()
