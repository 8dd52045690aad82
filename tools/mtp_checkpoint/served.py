"""How a rollout engine runs a head of one layer: how often, and on which of its hidden states.

An engine drafts K tokens per step by running the layer K times. From the second time on it reads
the layer's own hidden state: what its closing norm put out ("post-norm") or took in ("pre-norm").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tools.mtp_checkpoint.engines import ENGINES
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families.family import Family

_KEY = "served"  # in mtp_head.json
_FEEDBACKS = ("post-norm", "pre-norm")


@dataclasses.dataclass(frozen=True)
class Served:
    """How a head is run.

    Attributes:
        depths: Draft steps that one layer makes, at least 1.
        engine: One of `ENGINES`.
        hidden_feedback: "post-norm" or "pre-norm", Megatron's ``mtp_hidden_feedback``. One depth
            feeds nothing back.
    """

    depths: int = 1
    engine: str = ENGINES[0]
    hidden_feedback: str = "post-norm"

    @classmethod
    def of(cls, family: Family, depths: int = 1, engine: str | None = None) -> Served:
        """As an engine runs the heads of a family.

        Args:
            family: Of the head.
            depths: Draft steps.
            engine: None takes the first of `ENGINES`.

        Raises:
            CheckpointError: Fewer than one step, an unknown engine, or more than one step of a
                family whose table does not say what the engine feeds back.
        """
        engine = engine or ENGINES[0]
        if depths < 1:
            raise CheckpointError(f"--depths must be at least 1, got {depths}")
        if engine not in ENGINES:
            raise CheckpointError(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
        if depths == 1:
            return cls(1, engine)
        if engine not in family.feedback:
            raise CheckpointError(
                f"--depths {depths}: the table of {family.name} does not say which hidden state "
                f"{engine} feeds back; add it to its `feedback`, or use --depths 1"
            )
        return cls(depths, engine, family.feedback[engine])

    @classmethod
    def read(cls, manifest: Mapping[str, Any]) -> Served:
        """From mtp_head.json, which says nothing of heads with one depth.

        Raises:
            CheckpointError: What it says makes no sense.
        """
        found = manifest.get(_KEY, {})
        try:
            served = cls(**found)
        except TypeError as error:
            raise CheckpointError(
                f"mtp_head.json: {_KEY} is {found!r}; import the head again"
            ) from error
        depths = served.depths
        known = served.engine in ENGINES and served.hidden_feedback in _FEEDBACKS
        if not (known and type(depths) is int and depths >= 1):
            raise CheckpointError(f"mtp_head.json: {_KEY} is {found!r}; import the head again")
        return served

    def written(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The contents of mtp_head.json with this in them."""
        kept = {key: value for key, value in manifest.items() if key != _KEY}
        return kept | ({_KEY: dataclasses.asdict(self)} if self.depths > 1 else {})
