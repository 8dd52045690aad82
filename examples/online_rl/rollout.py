"""Rollouts: a second copy of the policy samples completions with a key-value cache.

It stands for the inference engine of a real RL job: built without context parallelism on every
rank, it takes the policy's weights before each batch.

Shape suffixes: B samples, S tokens of a padded sequence, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.online_rl.model import ModelShape, build_model, unshared_sequences
from examples.online_rl.task import Tokenizer
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support import device


@dataclass(frozen=True)
class Rollouts:
    """Sampled sequences, padded on the right with `Tokenizer.pad`.

    Attributes:
        tokens_BS: int64, prompt then completion.
        token_mask_BS: bool, true on the sampled tokens, the end token included.
        log_probs_BS: float32, the engine's log-probability of each sampled token, 0 elsewhere.
    """

    tokens_BS: Tensor
    token_mask_BS: Tensor
    log_probs_BS: Tensor

    def completions(self, tokenizer: Tokenizer) -> list[str]:
        """Return the sampled text of every row."""
        rows = zip(self.tokens_BS.tolist(), self.token_mask_BS.tolist())
        return [
            tokenizer.decode([token for token, sampled in zip(tokens, mask) if sampled])
            for tokens, mask in rows
        ]


class RolloutEngine:
    """Samples from a copy of the policy, `model`, at `temperature` or greedily."""

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        groups: ProcessGroupCollection,
        temperature: float = 1.0,
    ) -> None:
        self._temperature = temperature
        self.model = build_model(shape, unshared_sequences(groups), seed=0).eval()
        self._tokenizer = tokenizer
        self._max_length = shape.max_length

    @torch.no_grad()
    def load_weights(self, policy: torch.nn.Module) -> None:
        """Copy every parameter of `policy`, the MTP heads' included."""
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def sample(
        self, prompts: list[str], generator: torch.Generator, greedy: bool = False
    ) -> Rollouts:
        """Return one completion per prompt; prompts may differ in length.

        The prompts' common length is read in one pass, the rest of a longer prompt is fed token
        by token in place of samples.
        """
        tokens_BS, prompt_mask_BS = pad_prompts(prompts, self._tokenizer, self._max_length)
        samples, length = tokens_BS.shape
        log_probs_BS = torch.zeros(samples, length, device=tokens_BS.device)
        token_mask_BS = torch.zeros(samples, length, dtype=torch.bool, device=tokens_BS.device)
        alive_B = torch.ones(samples, dtype=torch.bool, device=tokens_BS.device)
        context = StaticInferenceContext(samples, length)
        read, position = 0, min(len(prompt) for prompt in prompts)
        while position < length and alive_B.any():
            logits_BV = self._next_logits(tokens_BS[:, read:position], context)
            read = position
            sampled_B, log_prob_B = _draw(logits_BV, generator, greedy)
            free_B = alive_B & ~prompt_mask_BS[:, position]
            tokens_BS[:, position] = torch.where(free_B, sampled_B, tokens_BS[:, position])
            log_probs_BS[:, position] = log_prob_B * free_B
            token_mask_BS[:, position] = free_B
            alive_B &= ~(free_B & (sampled_B == self._tokenizer.end))
            position += 1
        return Rollouts(tokens_BS, token_mask_BS, log_probs_BS)

    def _next_logits(self, new_tokens_BS: Tensor, context: StaticInferenceContext) -> Tensor:
        start, count = context.sequence_len_offset, new_tokens_BS.shape[1]
        positions_BS = torch.arange(start, start + count, device=new_tokens_BS.device)
        with InferenceMode.active():
            logits = self.model(
                new_tokens_BS,
                positions_BS.expand_as(new_tokens_BS),
                None,
                inference_context=context,
                runtime_gather_output=True,
            )
        context.sequence_len_offset += count
        context.enable_decode_mode()
        return logits[:, -1].float() / self._temperature


def pad_prompts(
    prompts: list[str], tokenizer: Tokenizer, max_length: int
) -> tuple[Tensor, Tensor]:
    """Return int64 [b, max_length], padded on the right, and the mask of the prompts in it.

    Raises:
        ValueError: a prompt leaves no room for a completion.
    """
    shape = (len(prompts), max_length)
    tokens_BS = torch.full(shape, tokenizer.pad, dtype=torch.long)
    prompt_mask_BS = torch.zeros(shape, dtype=torch.bool)
    for index, prompt in enumerate(prompts):
        row = tokenizer.encode(prompt)
        if len(row) >= max_length:
            raise ValueError(
                f"prompt of {len(row)} tokens leaves no room in {max_length}: {prompt}"
            )
        tokens_BS[index, : len(row)] = torch.tensor(row)
        prompt_mask_BS[index, : len(row)] = True
    return tokens_BS.to(device()), prompt_mask_BS.to(device())


def probabilities(log_probs_V: Tensor, greedy: bool) -> Tensor:
    """Return what to draw from, [..., v]: the probabilities, or greedily a 1 on the largest."""
    if not greedy:
        return log_probs_V.exp()
    best = log_probs_V.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(log_probs_V).scatter_(-1, best, 1.0)


def _draw(
    logits_BV: Tensor, generator: torch.Generator, greedy: bool
) -> tuple[Tensor, Tensor]:
    log_probs_BV = torch.log_softmax(logits_BV, dim=-1)
    p_BV = probabilities(log_probs_BV, greedy)
    sampled_B1 = torch.multinomial(p_BV, 1, generator=generator)
    return sampled_B1[:, 0], log_probs_BV.gather(1, sampled_B1)[:, 0]
