"""Optimizer state saved with another number of chained optimizers than the one that loads it.

With expert parallelism Megatron chains an optimizer of the dense parameters and one of the experts;
without it, one optimizer has all. A distributed checkpoint holds the state of each parameter under
the parameter's name, which any layout finds, and what is common to an optimizer (its parameter
groups and its step) under the optimizer's number, or under none where there was one. Loading in the
other layout therefore returns both forms in one dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

EXPERTS = "is_expert_parallel"


def match_layout(
    state_dict: Any, optimizers: Sequence[MegatronOptimizer], identifiers: Sequence[str]
) -> Any:
    """The state in the layout of ``optimizers``, with the common part that was saved in another.

    Args:
        state_dict: what ``dist_checkpointing.load`` returned for the optimizers.
        optimizers: those that are chained now.
        identifiers: keys whose values tell one parameter group from another.

    Returns:
        ``state_dict`` itself unless it has both forms. Else the state of the one optimizer, or
        {number: state of that optimizer}.

    Raises:
        ValueError: no saved parameter group fits one of an optimizer.
    """
    if not isinstance(state_dict, dict):
        return state_dict
    numbered = [state_dict[key] for key in sorted(k for k in state_dict if isinstance(k, int))]
    flat = {key: state for key, state in state_dict.items() if not isinstance(key, int)}
    alone = len(optimizers) == 1
    mine, saved = ([flat], numbered) if alone else (numbered, [flat])
    if not numbered or not flat or len(mine) != len(optimizers):
        return state_dict
    groups = [group for state in saved for group in _inner(state)["param_groups"]]
    for state, optimizer in zip(mine, optimizers):
        own_groups = _inner(state).get("param_groups")
        _fill(state, saved[0])
        _inner(state)["param_groups"] = [
            _group(current, groups, identifiers, own_groups[i] if own_groups else {})
            for i, current in enumerate(optimizer.param_groups)
        ]
    return mine[0] if alone else dict(enumerate(mine))


def _inner(state: dict) -> dict:
    """Where the parameter groups are: below "optimizer", except in FP32Optimizer's state."""
    return state.get("optimizer", state)


def _fill(into: dict, common: dict) -> None:
    """Add what ``into`` lacks, at every level of dictionaries."""
    for key, value in common.items():
        if key not in into:
            into[key] = dict(value) if isinstance(value, dict) else value
        elif isinstance(value, dict):
            _fill(into[key], value)


def _group(current: dict, saved: list[dict], identifiers: Sequence[str], own: dict) -> dict:
    """The saved settings of a group; whether experts are apart is not among them."""
    names = [name for name in identifiers if name != EXPERTS]
    for group in saved:
        if all(group.get(name) == current.get(name) for name in names):
            return {**group, **own, EXPERTS: current.get(EXPERTS)}
    raise ValueError(
        f"the checkpoint holds no parameter group with {_named(current, names)}, only "
        f"{[_named(group, names) for group in saved]}: build the optimizer with the settings it "
        "was saved with."
    )


def _named(group: dict, names: Sequence[str]) -> dict:
    return {name: group.get(name) for name in names if name in group}
