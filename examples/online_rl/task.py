"""The verifiable task: `chain_sum` of reasoning-gym, its generator and its scorer.

A prompt is the bare expression with an equals sign, `6-9+3=`. A completion is either the answer
alone, `0.`, or the running totals first, `6-9=-3;-3+3=0.`; the full stop ends it, and the number
after the last equals sign is what the library scores. The demonstrations of the warm start mix
both forms, so that RL has something to find out: writing the working pays.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import reasoning_gym

PAD, END = "_", "."
SYMBOLS = PAD + END + "0123456789+-=;"
_RL_OFFSET = 10_000_000  # warm start and RL draw from different stretches of the generator


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


class ChainSumTask:
    """Problems, demonstrations and rewards.

    Args:
        terms: numbers in a sum, at least 2.
        working_share: share of the demonstrations that show the running totals, 0 to 1.
        seed: seed of the generator and of the choice between the forms.
    """

    def __init__(self, terms: int, working_share: float, seed: int) -> None:
        if terms < 2:
            raise ValueError(f"a chain sum needs at least 2 terms, got {terms}")
        if not 0.0 <= working_share <= 1.0:
            raise ValueError(f"working_share is a share between 0 and 1, got {working_share}")
        self.terms = terms
        self.working_share = working_share
        self.seed = seed
        self._dataset = reasoning_gym.create_dataset(
            "chain_sum",
            min_terms=terms,
            max_terms=terms,
            min_digits=1,
            max_digits=1,
            seed=seed,
            size=2 * _RL_OFFSET,
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest right completion."""
        total = 1 + len(str(9 * self.terms))  # a signed running total
        step = total + 2 + 1 + total + 1  # `-12+3=-15;`
        return 2 * self.terms + (self.terms - 1) * step

    def problems(self, start: int, count: int) -> list[Problem]:
        """Return RL problems `start` .. `start + count - 1`, none seen in the warm start."""
        return [self._problem(_RL_OFFSET + index) for index in range(start, start + count)]

    def demonstrations(self, start: int, count: int) -> list[tuple[str, str]]:
        """Return (prompt, completion) pairs `start` .. `start + count - 1` for the warm start."""
        pairs = []
        for index in range(start, start + count):
            problem = self._problem(index)
            shows_working = random.Random(f"{self.seed}/{index}").random() < self.working_share
            pairs.append((problem.prompt, demonstration(problem, shows_working)))
        return pairs

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the library gives full marks to the final number, else 0.0.

        The library gives part of a mark to a text that merely contains the answer; a policy would
        learn to list numbers, so only its full mark counts. A completion without `END` gets none.
        """
        if not completion.endswith(END):
            return 0.0
        answer = completion[: -len(END)].rpartition("=")[2]
        return float(self._dataset.score_answer(answer, problem.entry) == 1.0)

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        expression = entry["metadata"]["expression"].replace(" ", "")
        return Problem(prompt=expression + "=", entry=entry)


def demonstration(problem: Problem, shows_working: bool) -> str:
    """Return a right completion of `problem`: `0.`, or `6-9=-3;-3+3=0.` with the working."""
    if not shows_working:
        return problem.entry["answer"] + END
    first, *rest = re.findall(r"[+-]?\d+", problem.prompt)
    total, steps = int(first), []
    for term in rest:
        before, total = total, total + int(term)
        steps.append(f"{before}{term}={total}")
    return ";".join(steps) + END


def shows_working(completion: str) -> bool:
    """Whether `completion` writes running totals."""
    return "=" in completion
