"""What training expects of drafts against what the speculative decoder accepts.

    pytest tests/examples/test_online_rl_acceptance.py

Runs on a machine without a GPU.
"""

import contextlib
import dataclasses
import math

import pytest
import torch

from tests.support import parallel_world, prepare

prepare()

from examples.online_rl.acceptance import Check, Scores, check, score
from examples.online_rl.arms import Arm
from examples.online_rl.batch import TrainingBatch
from examples.online_rl.model import policy_logits
from examples.online_rl.settings import PRESETS
from examples.online_rl.trainer import Trainer
from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from tests.support import device

TEMPERATURE, WRONG = 0.7, 1.0
# A target counts where the position's own token was sampled, as steps start only there.
PATH = Arm(
    "path",
    objective={
        "mtp_loss_mask_mode": "path",
        "mtp_expected_acceptance": True,
        "mtp_teacher_temperature": TEMPERATURE,
    },
)
ROWS = 1500


@contextlib.contextmanager
def warm_trainer(arm: Arm = PATH):
    """A small policy after some supervised steps with heads that often guess wrong, and groups."""
    settings = dataclasses.replace(
        PRESETS["tiny"], warm_steps=60, working_share=1.0, temperature=TEMPERATURE
    )
    with parallel_world() as groups:
        trainer = Trainer(settings, groups, arm)
        list(trainer.warm_start())
        with torch.no_grad():
            for parameter in trainer.heads.values():
                parameter.mul_(1.5)
        trainer._engine.load_weights(trainer.policy_model)
        yield trainer, groups


def answers(trainer: Trainer, rows: int, greedy: bool = False):
    """What the speculative decoder writes to held-out problems."""
    prompts = [problem.prompt for problem in trainer.task.held_out(rows)]
    return trainer._drafting.sample(prompts, torch.Generator(device()).manual_seed(1), greedy)


def metrics_of(trainer: Trainer, groups, text):
    """The trainer's own metrics of one training forward on `text`."""
    mtp_metrics(trainer.policy_model)
    batch = TrainingBatch.of(text.tokens_BS, text.token_mask_BS, groups.cp)
    policy_logits(trainer.policy_model, batch, train_heads=True, isolated=True)
    return mtp_metrics(trainer.policy_model)


# --- the chain of steps ---


def steps_by_hand(kept: list[list[float]], targets: list[int], t: int) -> float:
    """Expected steps from position t on, by the tree of all ways to accept."""
    if t >= len(targets) or not targets[t]:
        return 0.0
    steps, going = 1.0, 1.0
    for accepted in range(len(kept) + 1):
        stays = kept[accepted][t] if accepted < len(kept) else 0.0
        steps += going * (1.0 - stays) * steps_by_hand(kept, targets, t + accepted + 1)
        going *= stays
    return steps


def test_visits_follow_every_way_to_accept():
    torch.manual_seed(0)
    depths, length, first, last = 3, 9, 2, 7  # steps may read 2 to 6
    target = torch.zeros(depths, 1, length, dtype=torch.bool)
    for depth in range(depths):
        target[depth, 0, first : last - depth] = True
    kept = torch.rand(depths, 1, length).double() * target
    scores = Scores(target, kept, kept)
    visits = scores.visits()
    by_hand = steps_by_hand(kept[:, 0].tolist(), target[0, 0].tolist(), first)
    assert float(visits[0].sum()) == pytest.approx(by_hand, rel=1e-12)
    assert float(visits[0, 0, first]) == 1.0
    assert (visits[~target] == 0).all()
    # Every token is an accepted draft or the last one of a step.
    accepted = float((visits * kept).sum())
    ends = accepted + float(visits[0].sum())
    assert last - first <= ends + 1e-12 <= last - first + 1  # the last step may end with a draft


def test_a_row_without_a_step_counts_nothing():
    nothing = torch.zeros(2, 1, 5)
    assert (Scores(nothing.bool(), nothing.double(), nothing.double()).visits() == 0).all()


# --- measured against expected ---


@pytest.fixture(scope="module")
def sampled() -> dict[float, list[Check]]:
    """Checks of one sampled text, scored at the rollouts' temperature and at another one."""
    with warm_trainer() as (trainer, _):
        text = answers(trainer, ROWS)
        model = trainer._engine.model
        return {heat: check(text, score(model, text, heat)) for heat in (TEMPERATURE, WRONG)}


def test_sampled_drafts_are_accepted_as_training_expects(sampled):
    names = [found.name for found in sampled[TEMPERATURE]]
    assert names == ["accepted length", "acceptance of draft 1", "acceptance of draft 2"]
    for found in sampled[TEMPERATURE]:
        assert found.agrees, found
        assert 0 < found.margin < 0.03  # the interval is narrow enough to say something
        assert 0.1 < found.measured % 1 < 0.95  # and drafts are accepted and rejected


def test_that_comparison_sees_a_teacher_of_another_temperature(sampled):
    for found in sampled[WRONG]:
        assert not found.agrees, found


def test_greedy_drafts_are_accepted_exactly_as_training_expects():
    with warm_trainer() as (trainer, groups):
        text = answers(trainer, 200, greedy=True)
        scores = score(trainer._engine.model, text, TEMPERATURE, greedy=True)
        found = metrics_of(trainer, groups, text)
    checks = check(text, scores)
    for one in checks:
        assert one.measured == one.expected and one.margin == 0.0 and one.agrees
    assert 1.05 < checks[0].measured < 1 + PRESETS["tiny"].mtp_depths
    for depth, target_BS in enumerate(scores.target_DBS):  # the trainer's own metric, all positions
        rate = float(scores.overlap_DBS[depth][target_BS].mean())
        assert found.acceptance[depth] == pytest.approx(rate, rel=1e-12)
        assert found.supervised_tokens[depth] == int(target_BS.sum())
    whole_BS = scores.target_DBS.all(dim=0)
    lengths_BS = 1.0 + scores.overlap_DBS.cumprod(dim=0).sum(dim=0)
    assert found.accepted_length == pytest.approx(float(lengths_BS[whole_BS].mean()), rel=1e-12)


def test_that_comparison_sees_other_heads():
    with warm_trainer() as (trainer, _):
        text = answers(trainer, 200, greedy=True)
        with torch.no_grad():
            for name, parameter in trainer._engine.model.named_parameters():
                if name.startswith("mtp."):
                    parameter.mul_(1.5)
        scores = score(trainer._engine.model, text, TEMPERATURE, greedy=True)
    assert not all(one.agrees for one in check(text, scores))


def test_overlaps_are_the_trainers_expected_acceptance():
    with warm_trainer() as (trainer, groups):
        text = answers(trainer, 200)
        scores = score(trainer._engine.model, text, TEMPERATURE)
        cold = score(trainer._engine.model, text, WRONG)
        found = metrics_of(trainer, groups, text)
    for depth, target_BS in enumerate(scores.target_DBS):
        overlap = float(scores.overlap_DBS[depth][target_BS].mean())
        assert found.expected_acceptance[depth] == pytest.approx(overlap, rel=1e-5)
        other = float(cold.overlap_DBS[depth][target_BS].mean())
        assert other != pytest.approx(overlap, rel=1e-2)
    whole_BS = scores.target_DBS.all(dim=0)
    lengths_BS = 1.0 + scores.overlap_DBS.cumprod(dim=0).sum(dim=0)
    length = float(lengths_BS[whole_BS].mean())
    assert found.expected_accepted_length == pytest.approx(length, rel=1e-5)


def test_overlaps_and_kept_tokens_are_those_of_the_distributions():
    with warm_trainer() as (trainer, _):
        text = answers(trainer, 40)
        scores = score(trainer._engine.model, text, TEMPERATURE)
    assert (scores.overlap_DBS[scores.target_DBS] <= 1 + 1e-6).all()
    assert (scores.kept_DBS[scores.target_DBS] > 0).all()
    assert (scores.overlap_DBS[~scores.target_DBS] == 0).all()
    mask_BS = text.token_mask_BS
    for depth in range(2):  # a target is a sampled token whose position's own token was sampled
        tail = depth + 2
        own_BS = mask_BS[:, 1 : 1 + mask_BS.shape[1] - tail]
        expected = own_BS & mask_BS[:, tail:]
        assert torch.equal(scores.target_DBS[depth][:, : mask_BS.shape[1] - tail], expected)
        assert not scores.target_DBS[depth][:, mask_BS.shape[1] - tail :].any()


def test_an_interval_is_as_wide_as_its_confidence():
    # Of many repetitions on one text's length, about 1 in 100 falls outside.
    torch.manual_seed(3)
    outside = 0
    for _ in range(400):
        kept = torch.full((1, 300, 12), 0.6).double()
        target = torch.ones(1, 300, 12, dtype=torch.bool)
        target[:, :, -1] = False  # the last position has no target
        scores = Scores(target, kept * target, kept * target)
        outside += not check(_text_of(scores), scores)[0].agrees
    assert 0 < outside < 14  # 4 expected; more than 13 in 10,000 such tests would be chance


def _text_of(scores: Scores):
    """A text whose steps are drawn from the chain of `scores`: one draft a step."""
    _, rows, length = scores.target_DBS.shape
    accepted = torch.full((rows, length), -1)
    at = torch.zeros(rows, dtype=torch.long)
    while (inside := at < length - 1).any():
        hit = (torch.rand(rows) < 0.6).long()
        accepted[inside, at[inside]] = hit[inside]
        at = at + 1 + hit
    mask = torch.ones(rows, length + 1, dtype=torch.bool)
    mask[:, 0] = False
    return _Text(accepted, mask)


@dataclasses.dataclass
class _Text:
    """What `check` reads of a text."""

    accepted_BS: torch.Tensor
    token_mask_BS: torch.Tensor

    @property
    def steps_B(self) -> torch.Tensor:
        return (self.accepted_BS >= 0).sum(dim=1)


def test_a_check_agrees_up_to_its_margin():
    assert Check("", 2.0, 2.1, 0.11).agrees and not Check("", 2.0, 2.1, 0.09).agrees
    assert not Check("", math.nan, 2.1, 0.09).agrees
