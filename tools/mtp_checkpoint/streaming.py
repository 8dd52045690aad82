"""Megatron's distributed checkpoints, written and read one tensor at a time.

What is on disk is what ``dist_checkpointing`` writes, and it reads it: only the copies in memory
are left out. Its own writer clones every view before it writes the first byte, and an expert's
gate and up projection are views of one parameter; its loader joins them again in new tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as torch_checkpoint

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

# Scales of FP8, which a head never has. Megatron's local modules and Transformer Engine's do not
# have them in the same places: they are written, as a GPTModel expects, and never read.
_EXTRA_STATE = re.compile(r"\._extra_state\d*($|/)")


class StreamingSave(TorchDistSaveShardedStrategy):
    """Saves with torch's own writer, in this process: a view is cloned when its turn comes."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the tensors and objects of all ranks; every rank calls it.

        Raises:
            torch.distributed.checkpoint.api.CheckpointException: With what each rank met.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=torch_checkpoint.FileSystemWriter(
                checkpoint_dir, thread_count=1, per_thread_copy_ahead=0
            ),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )


def save(module: Any, directory: Path) -> None:
    """Write what ``module.sharded_state_dict()`` holds.

    Args:
        module: Of Megatron, or with such a method.
        directory: An empty directory on a disk that all ranks share.
    """
    dist_checkpointing.save(
        module.sharded_state_dict(), str(directory), sharded_strategy=StreamingSave()
    )


def load(module: torch.nn.Module, directory: Path) -> None:
    """Read a distributed checkpoint into the module's own parameters and buffers.

    Raises:
        megatron.core.dist_checkpointing.core.CheckpointingException: Module and checkpoint do not
            have the same tensors.
    """
    state = module.sharded_state_dict()
    state = {name: entry for name, entry in state.items() if not _EXTRA_STATE.search(name)}
    # A factory's parts are views of its parameter. Without it nothing joins them: they are there.
    factories = {k: f for k, f in state.items() if isinstance(f, ShardedTensorFactory)}
    for name, factory in factories.items():
        state[name] = factory.build()
    loaded, *differing = dist_checkpointing.load(
        state, str(directory), strict=StrictHandling.RETURN_ALL
    )
    _check_keys(*differing)
    whole = module.state_dict()
    for name, factory in factories.items():
        in_place = all(_is_part(part, whole[name]) for part in nested_values(loaded[name]))
        loaded[name] = whole[name] if in_place else factory.merge_fn(loaded[name])
    extra = {name: state for name, state in whole.items() if _EXTRA_STATE.search(name)}
    module.load_state_dict(loaded | extra)


def _check_keys(only_there: set[str], only_here: set[str]) -> None:
    """Raise unless checkpoint and module have the same keys."""
    only_there = {key for key in only_there if not _EXTRA_STATE.search(key)}
    if only_there or only_here:
        raise CheckpointingException(
            f"keys only in the checkpoint: {sorted(only_there) or 'none'}, only in the layer: "
            f"{sorted(only_here) or 'none'}"
        )


def _is_part(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of another."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
