"""Rules as tables: where every row goes, that both directions agree, and that nothing is left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.mtp_checkpoint.directories import same_bits
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import FAMILIES, detect
from tools.mtp_checkpoint.mapping import fill, read_piece, take
from tools.mtp_checkpoint.rules import (
    COPY,
    GATE_UP,
    SLICE,
    SWAP_HALVES,
    Entry,
    GroupedQKV,
    expand,
    shape_of,
)
from tools.mtp_checkpoint.source import HFDirectory

SYNTHETIC = [
    ("qwen3_5_moe", "per-expert", 30, 41),
    ("qwen3_5_moe", "packed", 30, 33),
    ("qwen3_5", None, 12, 15),
    ("deepseek_v3", None, 33, 42),
    ("mimo", None, 11, 16),
]


def filled(operation, dims, *sources):
    """The parameter that an operation makes of sources, which are lists of row names."""
    columns = [torch.tensor(source, dtype=torch.float32)[:, None] for source in sources]
    target = torch.full((sum(map(len, sources)), 1), float("nan"))
    for index, source in enumerate(columns):
        for ours, theirs in operation.views(dims, index, target, source):
            ours.copy_(theirs)
    return target.flatten().tolist()


def test_a_gated_projection_is_regrouped_by_kv_group_queries_before_gates():
    # Two groups of two heads of dimension one. Rows of q_proj, per head: query, gate.
    q_proj = [10, 910, 11, 911, 12, 912, 13, 913]
    made = filled(GroupedQKV(gated=True), dict(A=4, G=2, D=1), q_proj, [20, 21], [30, 31])
    assert made == [10, 11, 910, 911, 20, 30, 12, 13, 912, 913, 21, 31]


def test_an_ungated_projection_is_regrouped_by_kv_group():
    dims = dict(A=2, G=2, D=2)
    made = filled(GroupedQKV(), dims, [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33])
    assert made == [10, 11, 20, 21, 30, 31, 12, 13, 22, 23, 32, 33]


def test_gate_lies_above_up():
    assert filled(GATE_UP, {}, [1, 2], [3, 4]) == [1, 2, 3, 4]


def test_halves_of_the_input_change_places():
    source, target = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4)
    for ours, theirs in SWAP_HALVES.views({}, 0, target, source):
        ours.copy_(theirs)
    assert target.tolist() == [[3.0, 4.0, 1.0, 2.0]]


def test_shapes_are_read_from_letters():
    assert shape_of("2*A*D, H", dict(A=4, D=8, H=16)) == (64, 16)
    assert shape_of("1, H", dict(H=16)) == (1, 16)


def test_an_expert_of_a_packed_tensor_is_one_row_of_it():
    entry = Entry("experts.{e}.w", (("packed", "E, 2*I, H"),), SLICE)
    rules = expand([entry], "mtp.", dict(E=3, I=2, H=5))
    assert [str(r.pieces[0]) for r in rules] == [f"mtp.packed[{e}]" for e in range(3)]
    assert rules[2].pieces[0].shape == (4, 5)
    assert rules[2].pieces[0].tensor_shape == (3, 4, 5)
    assert rules[2].target(first_expert=2) == "experts.0.w"


def test_a_source_that_does_not_fit_is_refused_instead_of_broadcast():
    (rule,) = expand([Entry("w", (("w", "H, H"),), COPY)], "", dict(H=3))
    with pytest.raises(ValueError, match="does not fit"):
        rule.views(0, torch.zeros(3, 3), torch.zeros(3))


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    size=st.integers(1, 5),
    width=st.integers(0, 3),
    gated=st.booleans(),
)
def test_regrouping_is_a_bijection(groups, queries, size, width, gated):
    heads, kinds = groups * queries, 2 if gated else 1
    rows = f"{kinds}*A*D", "G*D", "G*D"
    shapes = [f"{row}, W" if width else row for row in rows]  # weights, or biases
    dims = dict(A=heads, G=groups, D=size, W=width)
    entry = Entry("qkv", tuple((name, shape) for name, shape in zip("qkv", shapes)))
    (rule,) = expand([Entry(entry.target, entry.sources, GroupedQKV(gated))], "", dims)
    count = torch.Size(rule.target_shape).numel()
    target = torch.arange(count, dtype=torch.float32).reshape(rule.target_shape)
    again = torch.full_like(target, float("nan"))
    for index in range(3):
        source = take(rule, index, target, torch.float32)
        for ours, theirs in rule.views(index, again, source):
            assert ours.isnan().all(), "written twice"
            ours.copy_(theirs)
    assert torch.equal(again, target)


@pytest.mark.parametrize("family, layout, parameters, sources", SYNTHETIC)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_tensor_of_every_family_comes_back_bit_for_bit(
    tiny, family, layout, parameters, sources, dtype
):
    directory = HFDirectory.open(tiny(family, layout, dtype))
    rules = detect(directory).check(directory)
    assert len(rules) == parameters
    used = []
    for rule in rules:
        parameter = torch.empty(rule.target_shape, dtype=torch.float32)
        fill(rule, directory, parameter, lambda piece, source: used.append(str(piece)))
        for index, piece in enumerate(rule.pieces):
            original = read_piece(directory, piece)
            assert same_bits(take(rule, index, parameter, original.dtype), original), piece
    assert len(used) == len(set(used)) == sources
    prefix = detect(directory).key_prefix(directory.text_config)
    head = {key for key in directory.tensors if key.startswith(prefix)}
    copies = detect(directory).copied_keys(directory).keys()
    assert {name.partition("[")[0] for name in used} == head - copies


def test_both_expert_layouts_name_the_same_parameters_of_the_same_shapes(tiny):
    directory = HFDirectory.open(tiny())
    family = detect(directory)
    one, other = (
        {(r.target(), r.target_shape) for r in family.rules(directory.text_config, layout)}
        for layout in ("per-expert", "packed")
    )
    assert one == other


def test_no_two_families_claim_the_same_model():
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(names) == len(set(names))


def test_a_parameter_of_another_shape_than_the_rules_is_refused(tiny):
    directory = HFDirectory.open(tiny())
    rule = detect(directory).check(directory)[0]
    with pytest.raises(CheckpointError, match="do not belong together"):
        fill(rule, directory, torch.empty(rule.target_shape[0] + 1))
