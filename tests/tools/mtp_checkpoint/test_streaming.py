"""What is written tensor by tensor is the checkpoint that Megatron itself writes and reads."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from tests.support import parallel_world, prepare, run_ranks
from tests.tools.mtp_checkpoint.native_support import Kind, directory, imported

prepare()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402
from tools.mtp_checkpoint import streaming  # noqa: E402
from tools.mtp_checkpoint.native.layer import build_mtp_block  # noqa: E402

KINDS = (
    Kind("qwen3_5_moe", "packed", "bf16"),
    Kind("deepseek_v3", "per-expert", "bf16"),
)


def _write(folder, kind):
    """The same head twice, by Megatron's own strategy and by ours, on two ranks."""
    with parallel_world(ep=2) as groups:
        head = imported(kind, groups)
        dist_checkpointing.save(head.sharded_state_dict(), str(folder / "megatron"))
        streaming.save(head, folder / "streamed")
        return {name: t.clone() for name, t in head.state_dict().items() if torch.is_tensor(t)}


def _empty(kind, groups):
    return build_mtp_block(directory(kind).config, groups=groups)


def _check(folder, kind, parts):
    ours, theirs = folder / "streamed", folder / "megatron"
    names = [sorted(file.name for file in path.iterdir()) for path in (ours, theirs)]
    assert names[0] == names[1]
    contents = [pickle.loads((path / ".metadata").read_bytes()) for path in (ours, theirs)]
    assert contents[0].state_dict_metadata == contents[1].state_dict_metadata
    assert contents[0].storage_data.keys() == contents[1].storage_data.keys()
    with parallel_world() as groups:
        plain, streamed, crossed = (_empty(kind, groups) for _ in range(3))
        wanted = plain.sharded_state_dict()
        state = dist_checkpointing.load(wanted, str(ours), strict=StrictHandling.RAISE_ALL)
        plain.load_state_dict(state)
        streaming.load(streamed, ours)
        streaming.load(crossed, theirs)
        shared = {n: t for n, t in parts[0].items() if "local_experts" not in n}
        for head in (plain, streamed, crossed):
            found = head.state_dict()
            assert all(torch.equal(found[name].cpu(), t.cpu()) for name, t in shared.items())
            assert torch.equal(_experts(found), torch.cat([_experts(part) for part in parts]))


def _experts(state):
    """First projections of all experts, in order."""
    names = [n for n in state if "local_experts" in n and n.endswith("linear_fc1.weight")]
    names.sort(key=lambda name: int(name.split("local_experts.")[1].split(".")[0]))
    return torch.stack([state[name].cpu() for name in names])


def test_megatron_reads_what_is_streamed_and_its_own_is_streamed_back(tmp_path):
    for kind in KINDS:
        directory(kind)  # made before the ranks fork
        folder = tmp_path / kind.family
        for name in ("megatron", "streamed"):
            (folder / name).mkdir(parents=True)
        _check(folder, kind, run_ranks(_write, 2, folder, kind))


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path):
    kind = KINDS[0]
    with parallel_world() as groups:
        head = imported(kind, groups)
        state = head.sharded_state_dict()
        gone, extra = "mtp.layers.0.final_layernorm.weight", "mtp.layers.0.more.weight"
        state[extra] = dataclasses.replace(state.pop(gone), key=extra)
        dist_checkpointing.save(state, str(tmp_path))
        with pytest.raises(CheckpointingException) as refused:
            streaming.load(head, tmp_path)
    said = str(refused.value)
    assert f"only in the checkpoint: ['{extra}'], only in the layer: ['{gone}']" in said


def test_a_head_is_read_into_the_memory_that_it_has(tmp_path):
    kind = KINDS[0]
    with parallel_world() as groups:
        streaming.save(imported(kind, groups), tmp_path)
        head = _empty(kind, groups)
        places = {name: p.data_ptr() for name, p in head.named_parameters()}
        merges = []
        real = head.sharded_state_dict

        def watched(*args, **kwargs):
            state = real(*args, **kwargs)
            for entry in state.values():
                if hasattr(entry, "merge_fn"):
                    entry.merge_fn = lambda parts: merges.append(parts)
            return state

        head.sharded_state_dict = watched
        streaming.load(head, tmp_path)
    assert merges == []  # nothing is joined in new memory
    assert {name: p.data_ptr() for name, p in head.named_parameters()} == places
    assert all(p.isfinite().all() for p in head.parameters())
