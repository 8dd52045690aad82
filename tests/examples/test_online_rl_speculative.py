"""The speculative decoder of the online RL example: exact, greedy and sampled; steps counted.

    pytest tests/examples/test_online_rl_speculative.py

Runs on a machine without a GPU.
"""

import contextlib
import dataclasses
from collections import Counter

import pytest
import torch

from tests.support import parallel_world, prepare

prepare()

from examples.online_rl import speculative
from examples.online_rl.batch import TrainingBatch
from examples.online_rl.grpo import token_log_probs
from examples.online_rl.model import policy_logits
from examples.online_rl.settings import PRESETS
from examples.online_rl.speculative import SpeculativeRollouts, verify
from examples.online_rl.trainer import Trainer
from tests.support import device

PROMPTS = ["1+2=", "9-5=", "0-7=", "8+8="] * 8
DEPTHS = PRESETS["tiny"].mtp_depths
LIKELY, ABSURD = 1e-3, 1e-6  # p-values: sound samples stay above one, biased ones below the other


def generator(seed: int = 0) -> torch.Generator:
    """Random numbers of the tensors' device."""
    return torch.Generator(device()).manual_seed(seed)


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One index per row."""
    return torch.multinomial(probabilities, 1)[:, 0]


def p_value(statistic: float, freedom: int) -> float:
    """Probability of a chi-square statistic at least as large."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


@contextlib.contextmanager
def warm_trainer(warm_steps: int):
    """A small policy with heads after some supervised steps, its engine loaded."""
    settings = dataclasses.replace(PRESETS["tiny"], warm_steps=max(1, warm_steps))
    with parallel_world() as groups:
        trainer = Trainer(settings, groups)
        if warm_steps:
            list(trainer.warm_start())
        trainer._engine.load_weights(trainer.policy_model)
        yield trainer, groups


# --- verifying ---


def joint_p_value(rows: int = 60_000, vocabulary: int = 5) -> float:
    """Chi-square test of the first two tokens that two drafts lead to, against the policy's own.

    Policy and heads are random tables, each token depending on the one before. Where fewer than
    two tokens come out, the policy continues.
    """
    torch.manual_seed(11)
    first, second, third = (torch.randn(5, 5).mul(1.5).softmax(-1) for _ in range(3))
    draft_first, draft_second = (torch.randn(5, 5).mul(1.5).softmax(-1) for _ in range(2))
    q_1 = draft_first[0].expand(rows, vocabulary)
    one = draw(q_1)
    q_2 = draft_second[one]
    two = draw(q_2)
    p = torch.stack([first[0].expand(rows, vocabulary), second[one], third[two]], dim=1)
    drafts = torch.stack([one, two], dim=1)
    verdict = verify(p, torch.stack([q_1, q_2], dim=1), drafts, torch.default_generator)
    accepted, own = verdict.accepted_B, verdict.next_B
    assert {0, 1, 2} == set(accepted.tolist())  # all three ways occur
    x_1 = torch.where(accepted >= 1, one, own)
    x_2 = torch.where(accepted >= 2, two, torch.where(accepted == 1, own, draw(second[x_1])))
    seen = torch.bincount(x_1 * vocabulary + x_2, minlength=vocabulary**2).double()
    expected = rows * (first[0].unsqueeze(1) * second).flatten().double()
    return p_value(float(((seen - expected).square() / expected).sum()), vocabulary**2 - 1)


def test_two_drafts_leave_the_policys_joint_distribution_as_it_is():
    assert joint_p_value() > LIKELY


def test_that_test_sees_a_rejection_that_forgets_what_the_draft_took(monkeypatch):
    monkeypatch.setattr(speculative, "residual", lambda p_BV, q_BV: p_BV)
    assert joint_p_value() < ABSURD


def test_drafts_from_the_policys_own_distribution_are_all_accepted():
    p = torch.randn(500, 3, 7).softmax(-1)
    drafts = torch.stack([draw(p[:, k]) for k in range(2)], dim=1)
    verdict = verify(p, p[:, :2], drafts, torch.default_generator)
    assert (verdict.accepted_B == 2).all()


def test_greedily_the_first_disagreement_ends_the_drafts():
    def one_hot(*ids):
        return torch.nn.functional.one_hot(torch.tensor([ids]), 6).float()

    drafts = torch.tensor([[3, 4, 5]])
    for policy, accepted, own in [
        ((3, 4, 5, 1), 3, 1),
        ((3, 4, 2, 1), 2, 2),
        ((0, 4, 5, 1), 0, 0),  # what agrees behind a disagreement does not count
    ]:
        verdict = verify(one_hot(*policy), one_hot(3, 4, 5), drafts, torch.default_generator)
        assert (int(verdict.accepted_B), int(verdict.next_B)) == (accepted, own)


# --- decoding ---


@pytest.mark.parametrize("warm_steps", [0, 60])
def test_greedy_speculative_output_is_plain_greedy_token_for_token(warm_steps):
    prompts = [*PROMPTS, "1+2-3+4=", "5="]  # of different lengths
    with warm_trainer(warm_steps) as (trainer, _):
        plain = trainer._engine.sample(prompts, generator(), greedy=True)
        drafted = trainer._drafting.sample(prompts, generator(), greedy=True)
    assert torch.equal(drafted.tokens_BS, plain.tokens_BS)
    assert torch.equal(drafted.token_mask_BS, plain.token_mask_BS)
    torch.testing.assert_close(drafted.log_probs_BS, plain.log_probs_BS, rtol=1e-4, atol=1e-5)
    if warm_steps:  # drafts were accepted and rejected on the way
        assert 1.1 < drafted.accepted_length < 1 + DEPTHS
    else:  # an untrained policy finds no end: the length ends its answers
        assert plain.token_mask_BS[:, -1].any()


def head_choices(model, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Each head's most likely token at every position, [d, b, s], by the block that trains them."""
    positions_BS = torch.arange(tokens_BS.shape[1]).to(tokens_BS).expand_as(tokens_BS)
    whole = (tokens_BS, positions_BS)
    hidden = model(*whole, None, output_processor=lambda hidden_states, **_: hidden_states)
    rotary = model.rotary_pos_emb(tokens_BS.shape[1])
    heads = model.mtp(*whole, hidden, None, rotary_pos_emb=rotary, embedding=model.embedding)
    logits, _ = model.output_layer(heads)
    return logits.argmax(-1).unflatten(0, (1 + DEPTHS, -1))[1:].transpose(1, 2)


def steps_of(row: list[int], choices: list[list[int]], prompt: int, end: int) -> int:
    """Steps of greedy speculation that write `row`, whose last token is the end if it has one.

    Position t of head k's choices is its guess of token t + k + 1, k from 1.
    """
    known, steps = prompt + 1, 0
    while row[known - 1] != end and known < len(row):
        accepted = 0
        while accepted < DEPTHS and row[known + accepted : known + accepted + 1] == [
            choices[accepted][known - 2]
        ]:
            accepted += 1
        known, steps = known + accepted + 1, steps + 1
        known = min(known, len(row))
    return steps


def test_greedy_steps_are_those_that_the_trained_heads_choices_lead_to():
    with warm_trainer(60) as (trainer, _), torch.no_grad():
        rollouts = trainer._drafting.sample(PROMPTS, generator(), greedy=True)
        choices_DBS = head_choices(trainer._engine.model, rollouts.tokens_BS)
    expected = []
    for index, prompt in enumerate(PROMPTS):
        length = len(prompt) + int(rollouts.token_mask_BS[index].sum())
        row = rollouts.tokens_BS[index, :length].tolist()
        choices = choices_DBS[:, index].tolist()
        expected.append(steps_of(row, choices, len(prompt), trainer.tokenizer.end))
    assert rollouts.steps_B.tolist() == expected


def sampled_p_value(trainer: Trainer, rows: int = 3000) -> float:
    """Two-sample chi-square test of what stands first in speculative and in plain answers.

    Categories are the first three symbols; those seen less than 20 times in all are one.
    """
    prompts = ["3-8="] * rows
    counts = []
    for sample in (trainer._drafting.sample, trainer._engine.sample):
        texts = sample(prompts, generator(len(counts))).completions(trainer.tokenizer)
        counts.append(Counter(text[:3] for text in texts))
    total = counts[0] + counts[1]
    common = [text for text, count in total.items() if count >= 20]
    table = [[count[text] for text in common] for count in counts]
    table = [[*row, rows - sum(row)] for row in table]
    statistic = sum(
        (ours - theirs) ** 2 / (ours + theirs) for ours, theirs in zip(*table) if ours + theirs
    )
    assert len(common) > 10
    return p_value(statistic, len(common))


def test_speculative_samples_are_distributed_as_plain_ones(monkeypatch):
    with warm_trainer(60) as (trainer, _):
        for name, parameter in trainer._engine.model.named_parameters():
            if name.startswith("mtp."):  # heads that are sure of themselves, and often wrong
                parameter.data.mul_(3.0)
        assert sampled_p_value(trainer) > LIKELY
        monkeypatch.setattr(speculative, "residual", lambda p_BV, q_BV: p_BV)
        assert sampled_p_value(trainer) < ABSURD  # and the test would see a bias


def test_every_step_yields_one_to_depths_plus_one_tokens_and_nothing_follows_the_end():
    with warm_trainer(60) as (trainer, groups):
        rollouts = trainer._drafting.sample(PROMPTS, generator())
        batch = TrainingBatch.of(
            rollouts.tokens_BS, rollouts.token_mask_BS, groups.cp, rollouts.log_probs_BS
        )
        logits = policy_logits(trainer.policy_model, batch, train_heads=False, isolated=True)
        trained = token_log_probs(logits, batch.labels_BS) * batch.loss_mask_BS
        texts = rollouts.completions(trainer.tokenizer)
    # The log-probabilities are those of the policy that verified: a trainer can use the samples.
    torch.testing.assert_close(trained, batch.old_log_probs_BS, rtol=1e-4, atol=1e-5)
    drafted_B = rollouts.token_mask_BS.sum(dim=1) - 1
    assert (rollouts.steps_B <= drafted_B).all()
    assert (drafted_B <= rollouts.steps_B * (1 + DEPTHS)).all()
    assert any(text.endswith(".") for text in texts)
    assert all("." not in text[:-1] for text in texts)


def test_the_accepted_length_leaves_the_first_token_of_each_answer_out():
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    # 5 tokens in 2 steps; the other answer is its first token.
    accepted = torch.tensor([[2, -1, -1, 1, -1, -1, -1], [-1] * 7])
    rollouts = SpeculativeRollouts(torch.zeros(2, 7).long(), mask, torch.zeros(2, 7), accepted)
    assert rollouts.steps_B.tolist() == [2, 0]
    assert rollouts.accepted_length == 2.5
    none = dataclasses.replace(rollouts, accepted_BS=torch.full_like(accepted, -1))
    assert none.accepted_length is None
