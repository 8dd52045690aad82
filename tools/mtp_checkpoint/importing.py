"""From a Hugging Face checkpoint into Megatron's MTP layer, every tensor accounted for."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from tools.mtp_checkpoint import launch
from tools.mtp_checkpoint.checkpoint import REPORT, load_head, manifest, save_head, write_json
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.mapping import fill
from tools.mtp_checkpoint.report import ImportReport, Row, checksum, peak_rss
from tools.mtp_checkpoint.rules import Piece, Rule
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.staging import check_destination, check_space, staged

__all__ = ["import_directory", "import_head", "load_head", "save_head"]

_LOSSLESS = {"torch.float32": ("torch.float32",), "torch.bfloat16": ("torch.bfloat16",)}
_LOSSLESS["torch.float32"] += ("torch.bfloat16", "torch.float16")


def import_directory(
    path: Path,
    out: Path,
    *,
    ranks: int = 1,
    dtype: torch.dtype | None = None,
    depths: int = 1,
    engine: str | None = None,
) -> ImportReport | None:
    """Import a checkpoint's head and write it as a distributed checkpoint.

    Args:
        path: Directory of the Hugging Face checkpoint, which is only read.
        out: New directory; it appears when all is written.
        ranks: Expert-parallel size: ranks that share the routed experts.
        dtype: Of the parameters; None takes float32, the dtype to train in.
        depths, engine: See `Served.of`. Written beside the one layer, which is the same.

    Returns:
        The report, on the first rank.

    Raises:
        CheckpointError: Something about the input or the destination; nothing has been written.
    """
    directory = HFDirectory.open(path)
    family = detect(directory)
    served = Served.of(family, depths, engine)
    rules = family.check(directory)
    family.check_copies(directory)
    check_experts(rules, ranks)
    check_destination(out, path)
    dtype = dtype or torch.float32
    check_space(out, dtype.itemsize * _parameters(rules))
    first = launch.is_first_rank()
    with staged(out, owner=first, token=launch.shared_token()) as temporary:
        report = launch.run(_import_rank, ranks, path, temporary, dtype, served)[0]
    return report if first else None


def check_experts(rules: tuple[Rule, ...], ranks: int) -> None:
    """Refuse ranks that cannot share the experts evenly.

    Raises:
        CheckpointError: They do not divide the number of experts.
    """
    experts = max((rule.expert for rule in rules if rule.expert is not None), default=-1) + 1
    if ranks < 1 or (ranks > 1 and experts == 0):
        raise CheckpointError(
            f"--expert-parallel-size is {ranks}, expected 1: this head has no routed experts"
            if experts == 0
            else f"--expert-parallel-size is {ranks}, expected at least 1"
        )
    if experts % ranks:
        raise CheckpointError(
            f"{experts} experts cannot be divided among {ranks} ranks; choose an "
            "--expert-parallel-size that divides them"
        )


def import_head(
    directory: HFDirectory, head: torch.nn.Module, groups: Any, *, progress: bool = False
) -> ImportReport:
    """Stream a checkpoint's head into a layer; every rank of the expert-parallel group calls it.

    Every parameter is filled with NaN, and then each of its elements written exactly once. Every
    tensor of the head is used exactly once over the group: an expert's by the rank that has the
    expert, any other by all ranks, which must have read the same bytes. Beside the parameters, one
    tensor is in memory.

    Args:
        directory: The checkpoint.
        head: A NativeHead of the "local" implementation.
        groups: Its process groups.
        progress: Show a bar on the first rank.

    Returns:
        The report of the whole group, on every rank.

    Raises:
        CheckpointError: On every rank, whichever rank met it.
    """
    family = detect(directory)
    rules = family.check(directory)
    check_experts(rules, groups.ep.size())
    started, rows, problems = time.monotonic(), [], ()
    try:
        rows = _fill_all(_local(rules, groups.ep), directory, head, groups.ep, progress)
    except (CheckpointError, OSError) as error:
        problems = error.problems if isinstance(error, CheckpointError) else (str(error),)
    usage = {
        "seconds": time.monotonic() - started,
        "bytes_read": sum(row.nbytes for row in rows),
        "peak_rss_bytes": peak_rss(),
    }
    gathered: list[Any] = [None] * groups.ep.size()
    dist.all_gather_object(gathered, (rows, problems, usage), group=groups.ep)
    if found := [problem for _, said, _ in gathered for problem in said]:
        raise CheckpointError(*dict.fromkeys(found))
    merged = merge_rows(rules, [theirs for theirs, _, _ in gathered])
    return ImportReport(
        family=family.name,
        layout=family.layout(directory),
        expert_parallel_size=groups.ep.size(),
        rows=merged,
        parameters=_parameters(rules),
        nbytes=sum(row.nbytes for row in merged),
        narrowed=any(row.dtype not in _LOSSLESS[row.target_dtype] for row in merged),
        ranks=tuple(usage for _, _, usage in gathered),
    )


def merge_rows(rules: tuple[Rule, ...], per_rank: list[list[Row]]) -> tuple[Row, ...]:
    """Check that all ranks together used every source as they should, and list each once.

    Raises:
        CheckpointError: A source was not used, or used once too often, or ranks read different
            bytes.
    """
    used = Counter(row.source for rows in per_rank for row in rows)
    times = {
        str(piece): len(per_rank) if rule.expert is None else 1
        for rule in rules
        for piece in rule.pieces
    }
    wrong = sorted(name for name in used.keys() | times.keys() if used[name] != times.get(name, 0))
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} sources were not used as often as they should, such as {wrong[0]}: "
            f"{used[wrong[0]]} times, expected {times.get(wrong[0], 0)}"
        )
    rows: dict[str, Row] = {}
    for row in (row for theirs in per_rank for row in theirs):
        first = rows.setdefault(row.source, row)
        if first.checksum != row.checksum:
            raise CheckpointError(
                f"rank {row.rank} read other bytes of {row.source} than rank {first.rank}; did "
                "the file change meanwhile, or do the ranks see different disks?"
            )
    return tuple(rows[name] for name in times)


def fill_and_report(
    rule: Rule, directory: HFDirectory, target: torch.Tensor, rank: int = 0
) -> list[Row]:
    """Fill a parameter, see `fill`, and return a row for each of its sources."""
    rows: list[Row] = []

    def observe(piece: Piece, source: torch.Tensor) -> None:
        rows.append(
            Row(
                source=str(piece),
                operation=rule.entry.operation.name,
                target=rule.target(),
                shape=tuple(source.shape),
                target_shape=tuple(target.shape),
                dtype=str(source.dtype),
                target_dtype=str(target.dtype),
                nbytes=source.nbytes,
                checksum=checksum(source),
                rank=rank,
            )
        )

    fill(rule, directory, target, observe)
    return rows


def layer_tensors(head: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of the MTP layer, by the names that rules use."""
    return {
        name: tensor
        for name, tensor in head.mtp.layers[0].state_dict(keep_vars=True).items()
        if torch.is_tensor(tensor) and not name.endswith("_extra_state")
    }


def _fill_all(
    rules: list[tuple[str, Rule]], directory: HFDirectory, head: Any, group: Any, progress: bool
) -> list[Row]:
    tensors = layer_tensors(head)
    names = [name for name, _ in rules]
    if unknown := sorted(set(names) ^ tensors.keys()):
        raise CheckpointError(
            f"layer and table do not belong together: {', '.join(unknown[:3])} "
            f"({len(unknown)} names) only in one of them"
        )
    rows = []
    total = sum(tensors[name].nbytes for name in names)
    hidden = None if progress and dist.get_rank() == 0 else True  # None: where there is a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="import", disable=hidden) as bar:
        for name, rule in rules:
            rows += fill_and_report(rule, directory, tensors[name], group.rank())
            bar.update(tensors[name].nbytes)
    return rows


def _local(rules: tuple[Rule, ...], group: Any) -> list[tuple[str, Rule]]:
    """The rules of this rank, with the names that its parameters have."""
    experts = max((rule.expert for rule in rules if rule.expert is not None), default=-1) + 1
    share = experts // group.size()
    first = share * group.rank()
    return [
        (rule.target(first), rule)
        for rule in rules
        if rule.expert is None or first <= rule.expert < first + share
    ]


def _parameters(rules: tuple[Rule, ...]) -> int:
    return sum(torch.Size(rule.target_shape).numel() for rule in rules)


def _import_rank(
    groups: Any, path: Path, out: Path, dtype: torch.dtype, served: Served
) -> ImportReport:
    from tools.mtp_checkpoint.native.layer import build_mtp_block

    directory = HFDirectory.open(path)
    head = build_mtp_block(directory.config, groups=groups, dtype=dtype, device="cpu")
    report = import_head(directory, head, groups, progress=True)
    contents = manifest(directory, report.family, report.layout, dtype)
    save_head(head, out, served.written(contents))
    peaks: list[Any] = [None] * groups.ep.size()
    dist.all_gather_object(peaks, peak_rss(), group=groups.ep)
    report = report.with_peaks(peaks)  # of writing, too
    if dist.get_rank() == 0:
        write_json(out / REPORT, report.to_json())
    return report
