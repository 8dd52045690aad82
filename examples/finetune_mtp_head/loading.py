"""Everything a run reads before its first step: samples, frozen target, head."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.finetune_mtp_head.bundled import write_bundled
from examples.finetune_mtp_head.conversations import Encoder, Sample, read_conversations
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.head import TORCH_DTYPES
from examples.finetune_mtp_head.settings import Settings
from examples.finetune_mtp_head.trainer import Corpus
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support import device
from tools.mtp_checkpoint.checkpoint import REPORT, load_head, manifest, read_manifest
from tools.mtp_checkpoint.families import Family, by_name, detect
from tools.mtp_checkpoint.importing import import_head, layer_tensors
from tools.mtp_checkpoint.mapping import take
from tools.mtp_checkpoint.native.layer import NativeHead, build_mtp_block
from tools.mtp_checkpoint.report import checksum
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import HFDirectory

_NOT_ARCHITECTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")


@dataclass(frozen=True)
class LoadedHead:
    """A head with what is known of its source.

    Attributes:
        head: on this rank's device.
        manifest: for ``mtp_head.json`` of its checkpoints.
        sources: of an imported head, the SHA-256 of each source's bytes and its dtype; of a
            trained one nothing.
        ep_group: ranks that share the experts.
        directory: the Hugging Face directory of the target.
    """

    head: NativeHead
    manifest: dict[str, Any]
    sources: dict[str, tuple[str, str]]
    ep_group: dist.ProcessGroup
    directory: HFDirectory

    @property
    def description(self) -> str:
        """What the import gate compares."""
        if self._comparable():
            return f"{len(self.sources)} sources read back with their checksums"
        return "trained before, or rounded: there is no source to compare with"

    def problem(self) -> str | None:
        """Take the parameters of this rank apart again and compare every source's checksum.

        Returns:
            What is wrong, or None.
        """
        if not self._comparable():
            return None
        tensors, compared = layer_tensors(self.head), set()
        rules = by_name(self.manifest["family"]).check(self.directory)
        experts = max((r.expert for r in rules if r.expert is not None), default=-1) + 1
        share = experts // self.ep_group.size()
        mine = range(share * self.ep_group.rank(), share * (self.ep_group.rank() + 1))
        for rule in rules:
            if rule.expert is not None and rule.expert not in mine:
                continue
            tensor = tensors[rule.target(mine.start)].detach().cpu()
            for index, piece in enumerate(rule.pieces):
                digest, dtype = self.sources[str(piece)]
                if checksum(take(rule, index, tensor, getattr(torch, dtype))) != digest:
                    return f"{rule.target()} does not hold {piece} of {self.directory.path}"
                compared.add(str(piece))
        return None if compared else "no source was compared"

    def _comparable(self) -> bool:
        """Whether the parameters hold every bit of their sources."""
        held = {"fp32": ("float32", "bfloat16", "float16"), "bf16": ("bfloat16",)}
        name = {dtype: name for name, dtype in TORCH_DTYPES.items()}[self.head.dtype]
        is_local = self.head.implementation == "local"
        kinds = {dtype for _, dtype in self.sources.values()}
        return is_local and bool(kinds) and kinds <= set(held[name])


def load_trainable(
    settings: Settings,
    groups: ProcessGroupCollection,
    directory: HFDirectory,
    checkpoint: Path | None = None,
) -> LoadedHead:
    """Load or import the head.

    Args:
        settings: of the run.
        groups: process groups.
        directory: of the target, checked.
        checkpoint: what ``tools.mtp_checkpoint`` or this example wrote; None imports the head
            that the target's directory holds.

    Raises:
        FinetuneError: the checkpoint belongs to another model, or the Transformer Engine layer,
            which only loads checkpoints, was asked to import.
        tools.mtp_checkpoint.errors.CheckpointError: something cannot be read.
    """
    dtype = TORCH_DTYPES[settings.dtype]
    if checkpoint is not None:
        found = read_manifest(checkpoint)
        _check_same_model(directory, found, checkpoint)
        served = _served(settings, by_name(found["family"]), Served.read(found))
        head = load_head(
            checkpoint,
            groups=groups,
            dtype=dtype,
            device=device(),
            implementation=settings.implementation,
            served=served,
        )
        return LoadedHead(head, served.written(found), _reported(checkpoint), groups.ep, directory)
    if settings.implementation != "local":
        raise FinetuneError(
            "--implementation te reads checkpoints only: run `python -m tools.mtp_checkpoint "
            f"import {settings.model} --out CKPT` first, and pass --head CKPT"
        )
    served = _served(settings, detect(directory), Served())
    head = build_mtp_block(
        directory.config, groups=groups, dtype=dtype, device=device(), served=served
    )
    report = import_head(directory, head, groups)
    contents = manifest(directory, report.family, report.layout, dtype)
    sources = {row.source: (row.checksum, row.dtype.removeprefix("torch.")) for row in report.rows}
    return LoadedHead(head, served.written(contents), sources, groups.ep, directory)


def _served(settings: Settings, family: Family, found: Served) -> Served:
    """What the settings say; where they are silent, what the head was made for."""
    return Served.of(family, settings.depths or found.depths, settings.engine or found.engine)


def _reported(checkpoint: Path) -> dict[str, tuple[str, str]]:
    """Checksums and dtypes from the import's report, if the head comes straight from one."""
    path = checkpoint / REPORT
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["source"]: (row["checksum"], row["dtype"].removeprefix("torch.")) for row in rows}


def _check_same_model(directory: HFDirectory, found: dict[str, Any], checkpoint: Path) -> None:
    """Raise FinetuneError unless the head was made for a model of this configuration."""
    ours, theirs = directory.text_config, found["text_config"]
    differing = sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in _NOT_ARCHITECTURE and ours.get(name) != theirs.get(name)
    )
    if differing:
        shown = [f"{n} {theirs.get(n)!r} instead of {ours.get(n)!r}" for n in differing[:3]]
        raise FinetuneError(
            f"{checkpoint} is the head of another model than {directory.path} "
            f"(it came from {found.get('source')}): {', '.join(shown)}"
        )


def load_corpus(settings: Settings, group: dist.ProcessGroup, vocabulary: int) -> Corpus:
    """Read, encode and split the conversations; every rank does.

    Args:
        settings: of the run.
        group: all ranks.
        vocabulary: rows of the target's embedding.

    Raises:
        FinetuneError: see `conversations`; or fewer samples than are to be held out, or a
            tokenizer with more tokens than the target.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FinetuneError(f"no tokenizer can be loaded from {settings.model}: {error}") from error
    if len(tokenizer) > vocabulary:
        raise FinetuneError(
            f"the tokenizer of {settings.model} has {len(tokenizer)} tokens, the model's embedding "
            f"{vocabulary} rows"
        )
    encoder = Encoder(
        tokenizer, settings.max_length, settings.long_samples, settings.split_turns
    )
    train_folder, held_out_folder = settings.data, settings.held_out_data
    if train_folder is None:
        if group.rank() == 0:
            write_bundled(settings.bundled)
        dist.barrier(group=group)
        train_folder, held_out = write_bundled(settings.bundled)
        held_out_folder = held_out_folder or held_out
    train = encoder.encode(read_conversations(train_folder))
    train = [train[i] for i in _shuffled(len(train), settings.seed)]
    if held_out_folder is None:
        held_out, train = train[: settings.held_out], train[settings.held_out :]
    else:
        held_out = encoder.encode(read_conversations(held_out_folder))
        held_out = [held_out[i] for i in _shuffled(len(held_out), settings.seed)]
        held_out = held_out[: settings.held_out]
    train = train[: settings.max_samples]
    if not train:
        raise FinetuneError(
            f"{train_folder} has no more than the {settings.held_out} samples that are to be held "
            "out; lower --held-out or pass --held-out-data"
        )
    pad = tokenizer.pad_token_id
    return Corpus(train, held_out, tokenizer.eos_token_id or 0 if pad is None else pad)


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 of all samples in their order."""
    digest = hashlib.sha256()
    for sample in (*corpus.train, *corpus.held_out):
        digest.update(_bytes(sample))
    return digest.hexdigest()


def _bytes(sample: Sample) -> bytes:
    return sample.tokens.numpy().tobytes() + sample.mask.numpy().tobytes()


def _shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
