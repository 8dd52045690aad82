"""The smallest trainer: packed trajectories, own weighting, context parallelism, metrics.

Letters: T tokens of this rank's part of a packed row, V vocabulary.
"""

import torch
import torch.distributed as dist

from examples.trainer_step import MICROBATCHES
from tests.support.device import device, has_transformer_engine, prepare

prepare()  # without a GPU: a stand-in for the calls to torch.cuda that Megatron makes anyway

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.transformer.mtp_objective import (  # noqa: E402
    Targets,
    pack_trajectories,
    weigh_microbatches,
)
from megatron.core.transformer.mtp_objective.metrics import mtp_metrics  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from tests.support.attention import ReferenceAttention  # noqa: E402

VOCAB_SIZE = 64
TRAJECTORIES = 4  # of a microbatch


def build_model(cp_size: int, dtype: torch.dtype = torch.float32, **fields) -> GPTModel:
    """A GPTModel with two heads; ``fields`` are further ones of its config."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        use_cpu_initialization=True,
        context_parallel_size=cp_size,
        mtp_num_layers=2,
        mtp_isolated_loss=True,
        mtp_loss_scaling_factor=1.0,  # isolated: any size, as the policy does not feel it
        **fields,
    )
    if has_transformer_engine():
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:  # Megatron's plain attention takes neither packed sequences nor context parallelism
        layer = gpt_layer_specs.get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = ReferenceAttention
    heads = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, has_transformer_engine())
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=heads,  # without it there are no heads, whatever mtp_num_layers says
        vocab_size=VOCAB_SIZE,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    return model.to(device(), dtype)


def rollout(generator: torch.Generator) -> tuple[list, list, list]:
    """Stands for the rollout: (tokens, mask of sampled tokens, advantage) of each trajectory."""
    tokens, masks, advantages = [], [], []
    for _ in range(TRAJECTORIES):
        prompt, answer = torch.randint(3, 12, (2,), generator=generator).tolist()
        first = torch.randint(VOCAB_SIZE, (1,), generator=generator)
        row = (first + 3 * torch.arange(prompt + answer)) % VOCAB_SIZE  # something to learn
        tokens.append(row.to(device()))
        masks.append((torch.arange(prompt + answer) >= prompt).float().to(device()))
        advantages.append(0.5 + torch.rand(1, generator=generator).to(device()))
    return tokens, masks, advantages


def policy_loss(logits_1TV, batch, weights_1T, num_tokens):
    """REINFORCE, a mean over all sampled tokens of the step."""
    log_probs = logits_1TV.log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])
    return -(log_probs[..., 0] * weights_1T).sum() / num_tokens


def microbatches(generator: torch.Generator) -> tuple[list, list]:
    """This rank's part of its microbatches of a step, and each token's advantage in them."""
    cp_group = parallel_state.get_context_parallel_group()
    part = dict(cp_size=cp_group.size(), cp_rank=cp_group.rank())
    dp_size = parallel_state.get_data_parallel_world_size()
    batches, weights = [], []
    for number in range(MICROBATCHES):
        tokens, masks, advantages = rollout(generator)
        if number % dp_size != parallel_state.get_data_parallel_rank():
            continue  # of another data-parallel rank
        batches.append(pack_trajectories(tokens, masks, **part))
        # What belongs to a token moves as its mask does.
        weighted = [mask * advantage for mask, advantage in zip(masks, advantages)]
        weights.append(pack_trajectories(tokens, weighted, **part).loss_mask)
    return batches, weights


def train_step(model, optimizer, generator: torch.Generator) -> dict[str, float]:
    """One step on all ranks; returns the policy's loss and the heads' metrics."""
    cp_group = parallel_state.get_context_parallel_group()
    dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    batches, weights = microbatches(generator)
    num_tokens = sum(batch.loss_mask.sum() for batch in batches)
    dist.all_reduce(num_tokens, group=dp_cp_group)
    weighed = weigh_microbatches(
        [Targets(batch.labels, batch.loss_mask, batch.packed_seq_params) for batch in batches],
        "token-mean",
        num_depths=model.config.mtp_num_layers,
        gradient_divisor=1.0,  # R: below, gradients are added up and nothing divides them
        cp_group=cp_group,
        dp_cp_group=dp_cp_group,
    )
    optimizer.zero_grad()
    total = torch.zeros((), device=device(), dtype=torch.float64)
    for batch, weights_1T, targets in zip(batches, weights, weighed):
        logits_1TV = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            loss_mask=targets.loss_mask,
            packed_seq_params=batch.packed_seq_params,
            return_logits=True,
            mtp_loss_normalizer=targets.mtp_loss_normalizer,
        )
        loss = policy_loss(logits_1TV, batch, weights_1T, num_tokens)
        loss.backward()  # trains policy and heads
        total += loss.detach()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=dp_cp_group)
    optimizer.step()
    dist.all_reduce(total, group=dp_cp_group)
    return {"loss": total.item(), **mtp_metrics(model).as_dict()}


def train(steps: int, dtype: torch.dtype = torch.float32, **fields) -> list[dict[str, float]]:
    """Train a new model in the world that this process is in; one record per step."""
    model = build_model(parallel_state.get_context_parallel_world_size(), dtype, **fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    return [train_step(model, optimizer, generator) for _ in range(steps)]
