"""What a layer needs of config.json beyond single values; each check returns the problems it sees.

Both `inspect` and whoever builds the layer go through these, so that they cannot disagree. A field
that is missing is another check's problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools.mtp_checkpoint.families.numbers import is_count, is_number
from tools.mtp_checkpoint.families.rotary import rotary_kind, rotary_parameters

Config = Mapping[str, Any]
Check = Callable[[Config], list[str]]


def positive(*names: str) -> Check:
    """These fields are numbers above 0."""

    def check(config: Config) -> list[str]:
        return _not_positive(config, names, "config.json")

    return check


def whole(*names: str) -> Check:
    """These fields are whole numbers above 0."""

    def check(config: Config) -> list[str]:
        return [
            f"{name} is {value!r}, expected a whole number above 0"
            for name in names
            if (value := config.get(name)) is not None and not is_count(value)
        ]

    return check


def chosen_of(experts: str) -> Check:
    """A token goes to at least one expert, and to no more than there are."""

    def check(config: Config) -> list[str]:
        chosen, count = config.get("num_experts_per_tok"), config.get(experts)
        if problems := whole("num_experts_per_tok")(config):
            return problems
        if is_count(chosen) and is_count(count) and chosen > count:
            return [f"num_experts_per_tok is {chosen}, more than {experts} {count}"]
        return []

    return check


def expert_groups(config: Config) -> list[str]:
    """DeepSeek-V3's groups of experts, of which each token's router looks into some.

    Megatron scores a group by its topk / topk_group best experts, DeepSeek-V3 by its two best.
    """
    values = {
        name: config.get(name)
        for name in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    }
    if problems := whole(*values)(config):
        return problems
    if None in values.values():
        return []
    experts, groups, chosen, topk = values.values()
    problems = []
    if experts % groups:
        problems.append(f"n_routed_experts {experts} cannot be divided into n_group {groups}")
    elif experts // groups < 2:
        problems.append(
            f"n_group {groups} leaves {experts // groups} expert in a group, expected two or more"
        )
    if chosen > groups:
        problems.append(f"topk_group is {chosen}, more than n_group {groups}")
    if topk != 2 * chosen:
        problems.append(
            "a group of experts is chosen by its two best, which Megatron does for "
            f"num_experts_per_tok = 2 · topk_group; got {topk} and {chosen}"
        )
    return problems


def even_rotary(head: str, fraction: float) -> Check:
    """The rotated part of a head, a fraction of it, has an even number of dimensions."""

    def check(config: Config) -> list[str]:
        size = config.get(head)
        found = rotary_parameters(config).get(
            "partial_rotary_factor", config.get("partial_rotary_factor", fraction)
        )
        if not is_number(found) or not 0 < found <= 1:
            return [f"partial_rotary_factor is {found!r}, expected a number above 0, at most 1"]
        if is_count(size) and (int(size * found) < 2 or int(size * found) % 2):
            return [
                f"partial_rotary_factor {found} of {head} {size} are {int(size * found)} "
                "dimensions, expected an even number above 0"
            ]
        return []

    return check


def yarn(config: Config) -> list[str]:
    """The fields of a YaRN rotary embedding, where it is one."""
    if rotary_kind(config) != "yarn":
        return []
    scaled, where = rotary_parameters(config), "the rotary embedding in config.json"
    needed = ("factor", "original_max_position_embeddings")
    problems = [
        f"{where} has no {name}, which YaRN depends on"
        for name in needed
        if scaled.get(name) is None
    ]
    problems += _not_positive(scaled, (*needed, "beta_fast", "beta_slow", "mscale"), where)
    if not is_number(scaled.get("mscale_all_dim", 0.0)):
        problems.append(f"{where} has mscale_all_dim {scaled['mscale_all_dim']!r}, not a number")
    if scaled.get("attention_factor") is not None:
        problems.append(
            f"{where} has an attention_factor; the layer derives it from mscale and factor"
        )
    if scaled.get("truncate", True) is not True:
        problems.append(f"{where} has truncate {scaled['truncate']!r}; the layer rounds to bands")
    return problems


def _not_positive(config: Config, names: tuple[str, ...], where: str) -> list[str]:
    return [
        f"{name} in {where} is {value!r}, expected a number above 0"
        for name in names
        if (value := config.get(name)) is not None and not (is_number(value) and value > 0)
    ]
