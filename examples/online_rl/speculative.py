"""Speculative rollouts: the MTP heads draft, the policy verifies, its distribution stays as it is.

A step is one pass of the policy over a sequence that ends with its own last token and D drafts,
one per head. The pass verifies the drafts and adds one token of the policy's, so a step yields 1 to
D + 1 tokens. Only counts matter here, so every pass reads the sequence from its start and nothing
is cached: steps are what an engine with a cache would take, seconds are not.

Heads attend to all positions before the draft, as in training.

Shape suffixes: B samples, S tokens of a sequence, D depths, K = D + 1, V vocabulary, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.online_rl.rollout import Rollouts, pad_prompts, probabilities
from examples.online_rl.task import Tokenizer
from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True)
class Verdict:
    """What verifying one step's drafts gave.

    Attributes:
        accepted_B: int64, drafts accepted, 0 to D.
        next_B: int64, the policy's own token behind them.
    """

    accepted_B: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class SpeculativeRollouts(Rollouts):
    """Sampled sequences, and the steps they took.

    Attributes:
        accepted_BS: int64, drafts that the step which read position t last accepted, those behind
            an end token left out; -1 where no step did. Its first draft is for position t + 2: at
            t, a head reads the hidden state and the known token t + 1.
    """

    accepted_BS: Tensor

    @property
    def steps_B(self) -> Tensor:
        """int64, the steps each row took behind its first token."""
        return (self.accepted_BS >= 0).sum(dim=1)

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens per step, all rows together, None without a step. The first token of a row,
        which no draft can be, is not counted, nor are drafts behind an end token."""
        tokens, steps = self.token_mask_BS.sum() - len(self.steps_B), self.steps_B.sum()
        return float(tokens / steps.double()) if steps else None


def verify(p_BKV: Tensor, q_BDV: Tensor, drafts_BD: Tensor, generator: torch.Generator) -> Verdict:
    """Accept or reject drafts such that what comes out is distributed as the policy has it.

    Draft k is accepted with probability min(1, p_k / q_k) while all before it were; behind the
    accepted ones comes a token of `residual`, or of the last p if all were accepted (Leviathan,
    Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023). With
    one-hot p and q this is greedy decoding: a draft is accepted if both agree.

    Args:
        p_BKV: float [b, d + 1, v], the policy's probabilities at each draft and behind the last.
        q_BDV: float [b, d, v], the heads' probabilities that each draft was drawn from.
        drafts_BD: int64 [b, d].
        generator: of the random numbers, on the tensors' device.
    """
    num_drafts = drafts_BD.shape[1]
    index_BD1 = drafts_BD.unsqueeze(-1)
    p_BD = p_BKV[:, :num_drafts].gather(-1, index_BD1).squeeze(-1)
    q_BD = q_BDV.gather(-1, index_BD1).squeeze(-1)
    uniform_BD = torch.rand(drafts_BD.shape, generator=generator, device=drafts_BD.device)
    good_BD = uniform_BD * q_BD < p_BD  # p = 0 is never good: 0 < 0 is false
    accepted_B = good_BD.long().cumprod(dim=1).sum(dim=1)
    rows_B = torch.arange(len(drafts_BD), device=drafts_BD.device)
    q_BKV = torch.cat([q_BDV, torch.zeros_like(p_BKV[:, :1])], dim=1)  # behind the last: no draft
    left_BV = residual(p_BKV[rows_B, accepted_B], q_BKV[rows_B, accepted_B])
    return Verdict(accepted_B, torch.multinomial(left_BV, 1, generator=generator)[:, 0])


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return max(0, p - q), what drafts from q leave of p, without normalisation.

    Where rounding leaves nothing (p = q, which no draft of positive probability is rejected
    from), it is p.
    """
    left_BV = (p_BV - q_BV).clamp(min=0.0)
    return torch.where(left_BV.sum(dim=-1, keepdim=True) > 0, left_BV, p_BV)


class SpeculativeDecoder:
    """Samples from a policy with its own heads as drafters.

    Args:
        model: the policy with its heads, in eval mode, without context parallelism.
        tokenizer: gives the end token and the padding.
        max_length: tokens of the longest sequence, prompt included.
        temperature: of the policy and of the heads.
    """

    def __init__(
        self, model: GPTModel, tokenizer: Tokenizer, max_length: int, temperature: float = 1.0
    ) -> None:
        self._temperature = temperature
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._depths = len(model.mtp.layers)

    @torch.no_grad()
    def sample(
        self, prompts: list[str], generator: torch.Generator, greedy: bool = False
    ) -> SpeculativeRollouts:
        """Return one completion per prompt; `greedy` takes the most likely token everywhere."""
        text = _Text(prompts, self._tokenizer, self._max_length, self._depths)
        drafts_BD = text.tokens_BS.new_empty(len(prompts), 0)  # the first pass has none to verify
        q_BDV = torch.empty(*drafts_BD.shape, self._model.vocab_size, device=drafts_BD.device)
        while True:
            known_B, drafted = text.known_B[text.rows_B], drafts_BD.shape[1]
            part_BS = text.tokens_BS[text.rows_B, : int(known_B.max()) + drafted]
            hidden_SBH = self._hidden(part_BS)
            log_p_BKV = self._log_probs(hidden_SBH, known_B - 1, drafted + 1)
            verdict = verify(probabilities(log_p_BKV, greedy), q_BDV, drafts_BD, generator)
            going_B = text.append(drafts_BD, verdict, log_p_BKV)
            if not len(text.rows_B):
                return text.rollouts()
            drafts_BD, q_BDV = self._draft(hidden_SBH[:, going_B], text, generator, greedy)

    def _draft(
        self, hidden_SBH: Tensor, text: "_Text", generator: torch.Generator, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """Write a draft of each head behind the known tokens; return them and their q_BDV."""
        rows_B, known_B = text.rows_B, text.known_B[text.rows_B]
        rotary = self._model.rotary_pos_emb(len(hidden_SBH))
        drafts, q = [], []
        for depth, head in enumerate(self._model.mtp.layers):
            # Depth k reads, at position t, token t + k + 1: known, or a draft of the head before.
            next_BS = text.tokens_BS[rows_B, depth + 1 : depth + 1 + len(hidden_SBH)]
            hidden_SBH = head.forward_single_position(
                hidden_SBH, next_BS, None, self._model.embedding, rotary_pos_emb=rotary
            )
            log_q_BV = self._log_probs(hidden_SBH, known_B - 2, 1)[:, 0]
            q.append(probabilities(log_q_BV, greedy))
            drafts.append(torch.multinomial(q[-1], 1, generator=generator)[:, 0])
            text.tokens_BS[rows_B, known_B + depth] = drafts[-1]
        return torch.stack(drafts, dim=1), torch.stack(q, dim=1)

    def _hidden(self, tokens_BS: Tensor) -> Tensor:
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return self._model(
            tokens_BS,
            positions_BS.expand_as(tokens_BS),
            None,  # causal attention makes its own mask
            output_processor=lambda hidden_states, **_: hidden_states,
        )

    def _log_probs(self, hidden_SBH: Tensor, first_B: Tensor, count: int) -> Tensor:
        """Return float32 [b, count, v] at the positions `first_B` and behind."""
        at_BK = first_B[:, None] + torch.arange(count, device=first_B.device)
        rows_B1 = torch.arange(len(first_B), device=first_B.device)[:, None]
        logits_BKV, _ = self._model.output_layer(hidden_SBH[at_BK, rows_B1])
        return torch.log_softmax(logits_BKV.float() / self._temperature, dim=-1)


class _Text:
    """Sequences in the making: what is known of each row, and which rows go on."""

    def __init__(self, prompts: list[str], tokenizer: Tokenizer, length: int, depths: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        tokens_BS, prompt_mask_BS = pad_prompts(prompts, tokenizer, length)
        self.tokens_BS = torch.nn.functional.pad(tokens_BS, (0, 2 * depths))  # drafts overshoot
        self.known_B = prompt_mask_BS.sum(dim=1)
        self.rows_B = torch.arange(len(prompts), device=tokens_BS.device)
        self._prompts_B = self.known_B.clone()
        self._accepted_BS = torch.full_like(self.tokens_BS, -1)
        self._log_probs_BS = torch.zeros(self.tokens_BS.shape, device=tokens_BS.device)

    def append(self, drafts_BD: Tensor, verdict: Verdict, log_p_BKV: Tensor) -> Tensor:
        """Append what a step yields to the rows that go on, up to an end token or the length.

        Returns:
            Bool [b], those of the present rows that go on further.
        """
        rows_B1, known_B = self.rows_B[:, None], self.known_B[self.rows_B]
        new_BK = torch.nn.functional.pad(drafts_BD, (0, 1))
        new_BK.scatter_(1, verdict.accepted_B[:, None], verdict.next_B[:, None])
        places_K = torch.arange(new_BK.shape[1], device=new_BK.device)
        columns_BK = known_B[:, None] + places_K
        end_BK = new_BK == self._tokenizer.end
        behind_end_BK = end_BK.cumsum(dim=1) - end_BK.long() > 0
        kept_BK = (places_K <= verdict.accepted_B[:, None]) & ~behind_end_BK
        kept_BK &= columns_BK < self._length
        self.tokens_BS[rows_B1, columns_BK] = new_BK  # what is not kept will be overwritten
        log_p_BK = log_p_BKV.gather(-1, new_BK.unsqueeze(-1)).squeeze(-1)
        self._log_probs_BS[rows_B1, columns_BK] = log_p_BK
        if drafts_BD.shape[1]:
            taken_BK = kept_BK & (places_K < verdict.accepted_B[:, None])
            self._accepted_BS[self.rows_B, known_B - 2] = taken_BK.sum(dim=1)
        self.known_B[self.rows_B] += kept_BK.sum(dim=1)
        going_B = ~(kept_BK & end_BK).any(dim=1) & (self.known_B[self.rows_B] < self._length)
        self.rows_B = self.rows_B[going_B]
        return going_B

    def rollouts(self) -> SpeculativeRollouts:
        """Return the finished sequences."""
        places_S = torch.arange(self._length, device=self.known_B.device)
        known_BS = places_S < self.known_B[:, None]
        mask_BS = known_BS & (places_S >= self._prompts_B[:, None])
        tokens_BS = self.tokens_BS[:, : self._length].where(known_BS, self._tokenizer.pad)
        log_probs_BS = self._log_probs_BS[:, : self._length] * mask_BS
        accepted_BS = self._accepted_BS[:, : self._length]
        return SpeculativeRollouts(tokens_BS, mask_BS, log_probs_BS, accepted_BS)
