r"""What speculative decoding accepts, as training on its text expects it, and as it was measured.

Notation. Head k of D reads position t and guesses token x_{t+k+1}. q_k is its distribution, p_k the
policy's for the same token (its row t + k), both at the rollout's temperature; greedily both are a
1 on the most likely token. From one training forward on a text come, for every t and k,

    overlap   α_k(t) = Σ_v min(p_k(v), q_k(v))         `expected_acceptance` of `mtp_metrics`
    kept      w_k(t) = min(1, q_k(x) / p_k(x)),        x = x_{t+k+1}, the text's own token

and both are 0 where the text has no such token. A step that reads t draws a draft from q_1, accepts
it with probability min(1, p_1 / q_1) and otherwise draws from max(0, p_1 − q_1), which sums to
1 − α_1. So token v comes out

    as a draft, with probability  q_1(v) min(1, p_1(v) / q_1(v)) = p_1(v) w_1(v),
    in place of one, with  (1 − α_1) max(0, p_1 − q_1)(v) / (1 − α_1) = p_1(v) (1 − w_1(v)),

together p_1(v), whatever the heads do. Hence

1. Summed over v: the first draft is accepted with probability α_1.
2. By Bayes' rule: *given the text*, the token at t + 2 was an accepted draft with probability w_1,
   whatever came before it; what comes behind it does not depend on how it came. The next head then
   reads that very token, so the argument repeats: the step accepts at least k drafts with
   probability Π_{j≤k} w_j(t).
3. Steps are therefore a Markov chain on the positions of the text. It starts at the last position
   before the first sampled token; from t it goes to t + a + 1 when a drafts are accepted. With s(t)
   the probability that a step reads t, w_{D+1} = 0 and u = t − a − 1,

       s(t) = Σ_a s(u) Π_{j≤a} w_j(u) (1 − w_{a+1}(u)),

   and tokens / Σ_t s(t) is the accepted length.
4. Draft k is put to the test where the drafts before it were accepted: with probability
   V_k(t) = s(t) Π_{j<k} w_j(t). It is then accepted with probability α_k(t), so its acceptance is

       Σ_t V_k α_k / Σ_t V_k.

Why not Π_k α_k? Accepted drafts are distributed as min(p, q) / α, not as p, and α_2 depends on the
token before: E[w_1 α_2] = Σ_v min(p_1, q_1)(v) α_2(v) is α_1 E[α_2] only if α_2 does not. Π α_k on
text of the policy is off by that covariance, and a mean over all positions by steps not starting
everywhere alike; w and V carry both.

Shape suffixes: B samples, S tokens of a padded sequence, D depths, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.online_rl.rollout import Rollouts, probabilities
from examples.online_rl.speculative import SpeculativeRollouts
from megatron.core.models.gpt import GPTModel

_QUANTILE_99 = 2.5758293035489004  # of the normal distribution, two-sided


@dataclass(frozen=True)
class Scores:
    """What a training forward says about every draft; entry [k - 1, b, t] is head k's at t.

    Attributes:
        target_DBS: bool, whether x_{t+1} and x_{t+k+1} are both sampled tokens of the row.
        overlap_DBS: float64, α, 0 without a target.
        kept_DBS: float64, w, 0 without a target.
    """

    target_DBS: Tensor
    overlap_DBS: Tensor
    kept_DBS: Tensor

    def visits(self) -> Tensor:
        """Return V, float64 [d, b, s]: the probability that head k's draft from t is tested."""
        length = self.kept_DBS.shape[-1]
        starts_BS = torch.zeros_like(self.kept_DBS[0])
        first_B = self.target_DBS[0].long().argmax(dim=1, keepdim=True)
        starts_BS.scatter_(1, first_B, self.target_DBS[0].gather(1, first_B).double())
        for t in range(length):
            going_B = starts_BS[:, t].clone()  # probability that the step goes on so far
            for accepted in range(len(self.kept_DBS) + 1):
                if t + accepted + 1 == length:
                    break
                last = accepted == len(self.kept_DBS)
                kept_B = 0.0 if last else self.kept_DBS[accepted, :, t]
                starts_BS[:, t + accepted + 1] += going_B * (1.0 - kept_B)
                going_B = going_B * kept_B
        chain_DBS = self.kept_DBS.cumprod(dim=0)
        reached_DBS = torch.cat([torch.ones_like(chain_DBS[:1]), chain_DBS[:-1]])
        return starts_BS * reached_DBS * self.target_DBS


@torch.no_grad()
def score(
    model: GPTModel, rollouts: Rollouts, temperature: float = 1.0, greedy: bool = False
) -> Scores:
    """Read a text as training does, all heads at all positions in one forward.

    Args:
        model: the policy with its heads, in eval mode, without context parallelism.
        rollouts: the text.
        temperature: of the rollouts.
        greedy: whether they take the most likely token everywhere.
    """
    tokens_BS, sampled_BS = rollouts.tokens_BS, rollouts.token_mask_BS
    depths, length = len(model.mtp.layers), tokens_BS.shape[1]
    positions_BS = torch.arange(length, device=tokens_BS.device).expand_as(tokens_BS)
    hidden_SBH = model(
        tokens_BS, positions_BS, None, output_processor=lambda hidden_states, **_: hidden_states
    )
    rows = model.mtp(  # the policy's and every head's, one behind the other
        tokens_BS,
        positions_BS,
        hidden_SBH,
        None,
        rotary_pos_emb=model.rotary_pos_emb(length),
        embedding=model.embedding,
    )
    logits, _ = model.output_layer(rows)
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    policy_SBV, *heads = probabilities(log_probs, greedy).double().unflatten(0, (1 + depths, -1))
    scores = [torch.zeros(3, *tokens_BS.shape, device=tokens_BS.device).double() for _ in heads]
    for k, (head_SBV, filled) in enumerate(zip(heads, scores), start=1):
        last = length - k - 1  # positions with a token k + 1 further on
        p_SBV, q_SBV = policy_SBV[k : k + last], head_SBV[:last]
        label_SB1 = tokens_BS.t()[k + 1 :].unsqueeze(-1)
        p_SB, q_SB = (value.gather(-1, label_SB1)[..., 0] for value in (p_SBV, q_SBV))
        target_BS = sampled_BS[:, 1 : last + 1] & sampled_BS[:, k + 1 :]
        kept_SB = torch.where(p_SB > 0, (q_SB / p_SB).clamp(max=1.0), 0.0)
        values = (torch.ones_like(p_SB), torch.minimum(p_SBV, q_SBV).sum(-1), kept_SB)
        for place, value_SB in enumerate(values):
            filled[place, :, :last] = value_SB.t() * target_BS
    target_DBS, overlap_DBS, kept_DBS = torch.stack(scores, dim=1)
    return Scores(target_DBS.bool(), overlap_DBS, kept_DBS)


@dataclass(frozen=True)
class Check:
    """A measured number, what was expected, and how far chance may take them apart (99%)."""

    name: str
    measured: float
    expected: float
    margin: float

    @property
    def agrees(self) -> bool:
        """Whether what was expected lies in the interval around what was measured."""
        return abs(self.measured - self.expected) <= self.margin


def check(rollouts: SpeculativeRollouts, scores: Scores) -> list[Check]:
    """Compare the accepted length, then every draft's acceptance, with what training expects.

    Args:
        rollouts: what the speculative decoder wrote and how.
        scores: of the same text with the same policy and heads.
    """
    visits_DBS = scores.visits()
    steps_B, expected_steps_B = rollouts.steps_B.double(), visits_DBS[0].sum(dim=1)
    tokens_B = rollouts.token_mask_BS.sum(dim=1).double() - 1.0
    checks = [_compare("accepted length", tokens_B, steps_B, tokens_B, expected_steps_B)]
    for depth, visits_BS in enumerate(visits_DBS):
        tested_BS = (rollouts.accepted_BS >= depth) & scores.target_DBS[depth]
        accepted_B = (tested_BS & (rollouts.accepted_BS > depth)).sum(dim=1).double()
        checks.append(
            _compare(
                f"acceptance of draft {depth + 1}",
                accepted_B,
                tested_BS.sum(dim=1).double(),
                (visits_BS * scores.overlap_DBS[depth]).sum(dim=1),
                visits_BS.sum(dim=1),
            )
        )
    return checks


def _compare(name: str, above_B: Tensor, below_B: Tensor, *expected: Tensor) -> Check:
    """Compare two ratios of sums over independent rows: Σ above / Σ below and the expected pair.

    The variance of their difference is that of its linear part, row by row (delta method): rows
    are paired, so what text both saw cancels.
    """
    ratios, parts = [], []
    for top_B, bottom_B in ((above_B, below_B), expected):
        ratio = top_B.sum() / bottom_B.sum()
        ratios.append(float(ratio))
        parts.append((top_B - ratio * bottom_B) / bottom_B.sum())
    difference_B = parts[0] - parts[1]
    margin = _QUANTILE_99 * float(difference_B.square().sum().sqrt())
    return Check(name, *ratios, margin)
