"""The verifiable task: `chain_sum` of reasoning-gym, its generator and its scorer.

A prompt is the bare expression with an equals sign, `6-9+3=`. A completion is either the answer
alone, `0.`, or the running totals first, `6-9=-3;-3+3=0.`; the full stop ends it, and the number
after the last equals sign is what the library scores. Working may be spaced, `6 - 9 = -3; -3 + 3 =
0.`: it has 5 gaps per running total less the first, each with a space or without. The
demonstrations of the warm start mix both forms and space a gap now and then, so that RL has
something to find out: working and spaces pay.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import reasoning_gym

PAD, END = "_", "."
SYMBOLS = PAD + END + "0123456789+-=; "
_STEP = re.compile(r"( ?)-?\d+( ?)[+-]( ?)\d+( ?)=( ?)-?\d+")
_GAPS_PER_STEP = 5  # before the step, around its sign, around its equals sign
_STRETCH = 10_000_000  # warm start, RL and measuring draw from different ones of the generator


class Tokenizer:
    """One token per character of `SYMBOLS`; `pad` and `end` are the ids of `PAD` and `END`."""

    pad = SYMBOLS.index(PAD)
    end = SYMBOLS.index(END)
    vocab_size = len(SYMBOLS)
    _ids = {symbol: index for index, symbol in enumerate(SYMBOLS)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; raises ValueError on a symbol that is not in `SYMBOLS`."""
        unknown = sorted(set(text) - set(SYMBOLS))
        if unknown:
            raise ValueError(f"cannot encode {unknown}: the vocabulary is {SYMBOLS!r}")
        return [self._ids[symbol] for symbol in text]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return "".join(SYMBOLS[index] for index in ids)


@dataclass(frozen=True)
class Problem:
    """One item of the generator: `prompt` is what the policy reads, `entry` the library's item."""

    prompt: str
    entry: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """What a completion is worth: `right` is 0 or 1, `spaced` the share of gaps with a space."""

    right: float
    spaced: float
    reward: float


class ChainSumTask:
    """Problems, demonstrations and rewards.

    Args:
        terms: numbers in a sum, at least 2.
        working_share: share of the demonstrations that show the running totals, 0 to 1.
        gap_share: share of the gaps in that working that have a space, 0 to 1.
        style_weight: part of the reward that a right answer earns by its spaces, 0 to 1.
        seed: seed of the generator and of the choice between the forms.
    """

    def __init__(
        self, terms: int, working_share: float, gap_share: float, style_weight: float, seed: int
    ) -> None:
        if terms < 2:
            raise ValueError(f"a chain sum needs at least 2 terms, got {terms}")
        shares = dict(working_share=working_share, gap_share=gap_share, style_weight=style_weight)
        for name, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} is a share between 0 and 1, got {share}")
        self.terms = terms
        self.working_share = working_share
        self.gap_share = gap_share
        self.style_weight = style_weight
        self.seed = seed
        self._dataset = reasoning_gym.create_dataset(
            "chain_sum",
            min_terms=terms,
            max_terms=terms,
            min_digits=1,
            max_digits=1,
            seed=seed,
            size=3 * _STRETCH,
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest right completion."""
        total = 1 + len(str(9 * self.terms))  # a signed running total
        step = _GAPS_PER_STEP + total + 2 + 1 + total + 1  # ` -12 + 3 = -15;`
        return 2 * self.terms + (self.terms - 1) * step

    def problems(self, start: int, count: int) -> list[Problem]:
        """Return RL problems `start` .. `start + count - 1`, none seen in the warm start."""
        return [self._problem(_STRETCH + index) for index in range(start, start + count)]

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` problems that neither the warm start nor RL draws from."""
        return [self._problem(2 * _STRETCH + index) for index in range(count)]

    def demonstrations(self, start: int, count: int) -> list[tuple[str, str]]:
        """Return (prompt, completion) pairs `start` .. `start + count - 1` for the warm start."""
        pairs = []
        for index in range(start, start + count):
            problem = self._problem(index)
            rng = random.Random(f"{self.seed}/{index}")
            if rng.random() < self.working_share:
                gaps = [rng.random() < self.gap_share for _ in range(num_gaps(self.terms))]
                pairs.append((problem.prompt, worked_out(problem, gaps)))
            else:
                pairs.append((problem.prompt, problem.entry["answer"] + END))
        return pairs

    def score(self, problem: Problem, completion: str) -> Score:
        """Return the score: reward = right · ((1 - style_weight) + style_weight · spaced).

        The library gives part of a mark to a text that merely contains the answer; a policy would
        learn to list numbers, so only its full mark is right. A completion without `END` is not.
        Example, style_weight 0.5 and 2 terms: `6-9=-3.` earns 0.5, `6 - 9 = -3.` earns 1.
        """
        if not completion.endswith(END):
            return Score(0.0, 0.0, 0.0)
        body = completion[: -len(END)]
        answer = body.rpartition("=")[2].strip()
        right = float(self._dataset.score_answer(answer, problem.entry) == 1.0)
        spaced = spaced_share(body, self.terms)
        weight = self.style_weight
        return Score(right, spaced, right * ((1.0 - weight) + weight * spaced))

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        expression = entry["metadata"]["expression"].replace(" ", "")
        return Problem(prompt=expression + "=", entry=entry)


def num_gaps(terms: int) -> int:
    """Return how many gaps the working of a sum has: none before its first running total."""
    return _GAPS_PER_STEP * (terms - 1) - 1


def worked_out(problem: Problem, gaps: list[bool]) -> str:
    """Return a right completion with its working; `gaps` says, in order, which ones are spaced.

    Example, no gaps: `6-9=-3;-3+3=0.`; all 9: `6 - 9 = -3; -3 + 3 = 0.`.
    """
    first, *rest = re.findall(r"[+-]?\d+", problem.prompt)
    spaces = iter([False, *gaps])
    total, steps = int(first), []
    for term in rest:
        before, total = total, total + int(term)
        parts = (str(before), term[0], term[1:], "=", str(total))
        steps.append("".join(" " * next(spaces) + part for part in parts))
    return ";".join(steps) + END


def spaced_share(body: str, terms: int) -> float:
    """Return the share of gaps with a space, 0 unless `body` is a complete working in form."""
    steps = [_STEP.fullmatch(step) for step in body.split(";")]
    if len(steps) != terms - 1 or not all(steps) or steps[0].group(1):
        return 0.0
    spaces = [space for step in steps for space in step.groups()]
    return sum(map(len, spaces)) / num_gaps(terms)


def shows_working(completion: str) -> bool:
    """Whether `completion` writes running totals."""
    return "=" in completion
