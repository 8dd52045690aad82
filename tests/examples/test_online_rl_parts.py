"""The parts of the online RL example: task, advantages, policy loss, rollouts, comparison."""

import dataclasses

import pytest
import torch

from tests.support import parallel_world, prepare

prepare()

from examples.online_rl.batch import TrainingBatch
from examples.online_rl.grpo import group_normalised_advantages, policy_loss, token_log_probs
from examples.online_rl.model import ModelShape, build_model, policy_logits
from examples.online_rl.rollout import RolloutEngine
from examples.online_rl.task import ChainSumTask, Problem, Tokenizer, num_gaps, worked_out
from examples.online_rl.verify import Snapshot, compare
from tests.support import device


def make_task() -> ChainSumTask:
    return ChainSumTask(terms=3, working_share=0.5, gap_share=0.25, style_weight=0.5, seed=1)


@pytest.fixture(scope="module")
def task() -> ChainSumTask:
    return make_task()


def problem_with_answer(task: ChainSumTask, minimum: int) -> Problem:
    """The first problem whose answer is at least `minimum`."""
    return next(p for p in task.problems(0, 500) if int(p.entry["answer"]) >= minimum)


def three_ones(task: ChainSumTask) -> Problem:
    """1+1+1, as the generator would give it."""
    return Problem("1+1+1=", {**task.problems(0, 1)[0].entry, "answer": "3"})


@pytest.mark.parametrize("spaced", [False, True])
def test_every_working_is_right_fits_and_is_scored_by_its_spaces(task, spaced):
    for problem in task.problems(0, 200):
        text = worked_out(problem, [spaced] * num_gaps(3))
        assert dataclasses.astuple(task.score(problem, text)) == (1.0, spaced, 0.5 + 0.5 * spaced)
        assert len(Tokenizer().encode(problem.prompt + text)) <= task.max_length


def test_the_working_is_a_chain_of_running_totals():
    problem = Problem("6-9+3=", {"answer": "0"})
    assert worked_out(problem, [False] * 9) == "6-9=-3;-3+3=0."
    assert worked_out(problem, [True] * 9) == "6 - 9 = -3; -3 + 3 = 0."
    assert worked_out(problem, [False] * 4 + [True] + [False] * 4) == "6-9=-3; -3+3=0."


def test_demonstrations_mix_both_forms_and_space_a_quarter_of_the_gaps(task):
    texts = [text for _, text in task.demonstrations(0, 400)]
    working = [text for text in texts if "=" in text]
    assert 0.4 < len(working) / len(texts) < 0.6
    spaces = sum(text.count(" ") for text in working)
    assert 0.2 < spaces / (len(working) * num_gaps(3)) < 0.3


def test_only_the_librarys_full_mark_is_right(task):
    problem = problem_with_answer(task, 10)
    answer = problem.entry["answer"]
    partly = task._dataset.score_answer(f"{answer};1", problem.entry)
    assert 0 < partly < 1  # the library gives this some marks …

    def right(text: str) -> float:
        return task.score(problem, text).right

    assert right(f"{answer};1.") == 0.0  # … and the policy gets none
    assert right(f"{answer}.") == right(f"1+1={answer}.") == 1.0  # the last number counts
    assert right(f"1+1= {answer}.") == 1.0
    assert right(answer) == 0.0  # cut off before the end token
    assert right(f"{int(answer) + 1}.") == right(".") == 0.0


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        ("1+1=2;2+1=3", 0.0),
        ("1 + 1 = 2; 2 + 1 = 3", 1.0),
        ("1 +1=2;2+1=3", 1 / 9),
        ("1 + 1 = 2", 0.0),  # a total is missing
        (" 1+1=2;2+1=3", 0.0),  # there is no gap before the first total
        ("1  +1=2;2+1=3", 0.0),  # nor room for two spaces in one
        ("1 + 1 = 2; 2 + 1 = ", 0.0),
        ("3", 0.0),
    ],
)
def test_only_complete_working_earns_by_its_spaces(task, text, spaced):
    score = task.score(three_ones(task), text + ".")
    assert score.spaced == pytest.approx(spaced)
    assert score.reward == pytest.approx(score.right * (0.5 + 0.5 * spaced))


def test_spaces_do_not_pay_where_the_answer_is_wrong(task):
    score = task.score(three_ones(task), "1 + 1 = 2; 2 + 1 = 4.")
    assert (score.right, score.spaced, score.reward) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", ["working_share", "gap_share", "style_weight"])
def test_a_share_beyond_one_is_refused(name):
    shares = dict(terms=3, working_share=0, gap_share=0, style_weight=0, seed=1)
    with pytest.raises(ValueError, match=f"{name} is a share between 0 and 1, got 1.5"):
        ChainSumTask(**{**shares, name: 1.5})


def test_warm_start_and_rl_use_different_problems_and_repeat_exactly(task):
    again = make_task()
    assert task.demonstrations(5, 20) == again.demonstrations(5, 20)
    indices = {problem.entry["metadata"]["source_index"] for problem in task.problems(0, 50)}
    assert len(indices) == 50 and min(indices) >= 10_000_000
    measured = {problem.entry["metadata"]["source_index"] for problem in task.held_out(50)}
    assert len(measured) == 50 and min(measured) >= 20_000_000


def test_a_symbol_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="cannot encode"):
        Tokenizer().encode("1*2=")


def test_advantages_are_normalised_inside_each_group():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    advantages = group_normalised_advantages(rewards, 2)
    right = 0.5 / (0.5**0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([right, -right, 0.0, 0.0, 0.0, 0.0]))
    for group_size in (1, 4):
        with pytest.raises(ValueError, match="whole groups of at least 2"):
            group_normalised_advantages(rewards, group_size)


def test_the_policy_loss_is_the_clipped_surrogate_over_masked_tokens():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.tensor([[1, 2, -100], [0, 4, 3]]), torch.tensor([[1, 1, 0], [0, 1, 1.0]])
    advantages, tokens = torch.tensor([2.0, -1.0]), torch.tensor(4.0)
    new = token_log_probs(logits, labels).detach()
    shift = torch.tensor([[0.0, -1.0, 9.0], [9.0, 1.0, 0.1]])  # old = new + shift
    result = policy_loss(logits, labels, mask, new + shift, advantages, tokens, clip=0.2)
    terms = [2 * 1.0, 2 * 1.2, -0.8, -(torch.tensor(-0.1).exp())]
    assert float(result.loss.detach()) == pytest.approx(-float(sum(terms)) / 4, rel=1e-6)
    assert float(result.clipped) == 2
    result.loss.backward()
    assert (logits.grad[0, 1] == 0).all() and (logits.grad[1, 1] == 0).all()  # clipped
    assert (logits.grad[0, 2] == 0).all() and (logits.grad[1, 0] == 0).all()  # masked
    assert (logits.grad[0, 0] != 0).all() and (logits.grad[1, 2] != 0).all()


def test_rollouts_carry_the_log_probabilities_of_the_training_forward():
    tokenizer = Tokenizer()
    shape = ModelShape(32, 2, 4, 2, tokenizer.vocab_size, 24)
    with parallel_world() as groups:
        policy = build_model(shape, groups, seed=3)
        engine = RolloutEngine(shape, tokenizer, groups)
        engine.load_weights(policy)
        prompts = ["1+2=", "1+2-3+4=", "9="] * 4  # of different lengths
        generator = torch.Generator(device()).manual_seed(0)
        rollouts = engine.sample(prompts, generator)
        batch = TrainingBatch.of(
            rollouts.tokens_BS, rollouts.token_mask_BS, groups.cp, rollouts.log_probs_BS
        )
        logits = policy_logits(policy, batch, train_heads=False, isolated=True)
        trained = token_log_probs(logits, batch.labels_BS) * batch.loss_mask_BS
    torch.testing.assert_close(trained, batch.old_log_probs_BS, rtol=1e-4, atol=1e-5)
    assert batch.loss_mask_BS.sum() == rollouts.token_mask_BS.sum() > len(prompts)
    for row, prompt in enumerate(prompts):
        assert tokenizer.decode(rollouts.tokens_BS[row, : len(prompt)].tolist()) == prompt
    for text in rollouts.completions(tokenizer):
        assert "." not in text[:-1]  # nothing is sampled behind the end token


def snapshot(policy=1.0, heads=2.0, state=3.0, sample=7, reward=8):
    """A run of two steps with one tensor of each kind."""
    return Snapshot(
        policy={"w": torch.tensor([policy, 0.0])},
        heads={"mtp.w": torch.tensor([heads])},
        optimizer={"w/exp_avg": torch.tensor(state)},
        samples=[5, sample],
        rewards=[6, reward],
    )


START = {"w": torch.zeros(2), "mtp.w": torch.zeros(1)}


def test_equal_runs_pass_the_comparison_though_the_heads_differ():
    report = compare(snapshot(heads=2.0), snapshot(heads=0.0), START)
    assert report.passed and report.steps == 2
    assert "same bit for bit" in report.describe()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"policy": 1.0000001}, "first: w; parameters by up to 1.19e-07"),
        ({"state": 3.0000002}, "first: w/exp_avg"),
        ({"sample": 8}, "sampled tokens on the way differ"),
        ({"reward": 9}, "rewards on the way differ"),
    ],
)
def test_the_smallest_difference_fails_the_comparison(other, words):
    report = compare(snapshot(), snapshot(**other), START)
    assert not report.passed
    assert words in report.describe()


def test_a_zero_of_another_sign_is_a_difference():
    other = snapshot()
    other.policy["w"][1] = -0.0
    assert not compare(snapshot(), other, START).passed


def test_runs_in_which_something_stood_still_prove_nothing():
    for still in (snapshot(heads=0.0), snapshot(policy=0.0)):
        report = compare(still, still, START)
        assert not report.passed and "nothing was proved" in report.describe()


def test_runs_of_different_length_are_not_compared():
    with pytest.raises(ValueError, match="cannot compare 2 steps with 1"):
        compare(snapshot(), dataclasses.replace(snapshot(), samples=[5]), START)
