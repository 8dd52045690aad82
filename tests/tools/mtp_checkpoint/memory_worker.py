"""Imports or exports a head of about 300 MB and prints how far memory rose, as JSON.

    python -m tests.tools.mtp_checkpoint.memory_worker make|import|export FOLDER

A process for each: what is measured are peaks of a process that has freed nothing big before. A
tiny head goes first. It loads every library and makes every group once, so that what follows is
the large head's own memory.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch

from tools.tiny_checkpoint import weights
from tools.tiny_checkpoint.families import FAMILIES
from tools.tiny_checkpoint.family import Sizes

EXPERTS = 64
TINY = Sizes()
LARGE = Sizes(hidden=1024, experts=EXPERTS, vocab=64, expert_intermediate=384)


def make_head(path: Path, sizes: Sizes) -> Path:
    """A Qwen3.5-MoE directory in bfloat16 with a head, and of the target nothing but its name."""
    family = FAMILIES["qwen3_5_moe"]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: weights.random_tensor(key, shape, True, generator).bfloat16()
        for key, shape in family.head_shapes(sizes, "per-expert").items()
    }
    path.mkdir()
    keys = list(tensors)
    halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    weights.write_shards(path, [{key: tensors[key] for key in half} for half in halves])
    config = family.model_config(sizes, defaultdict(int))
    (path / "config.json").write_text(json.dumps(config))
    return path


def memory(field: str) -> int:
    """``VmRSS``, now, or ``VmHWM``, its peak, of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def rise(call) -> int:
    """How far a call takes memory above what it was, at its peak, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def make(folder: Path) -> dict[str, int]:
    """Both directories; the sizes of the large head are what is printed."""
    make_head(folder / "tiny", TINY)
    large = make_head(folder / "large", LARGE)
    files = large.glob("*.safetensors")
    shapes = FAMILIES["qwen3_5_moe"].head_shapes(LARGE, "per-expert")
    numbers = {key: torch.Size(shape).numel() for key, shape in shapes.items()}
    experts = sum(n for key, n in numbers.items() if ".experts." in key)
    assert sum(file.stat().st_size for file in files) >= 2 * sum(numbers.values())
    return {"parameters": 4 * sum(numbers.values()), "experts": 4 * experts}


def import_(folder: Path) -> dict[str, int]:
    """On two ranks, then on one."""
    from tools.mtp_checkpoint.importing import import_directory

    def peak(name: str) -> int:
        report = import_directory(folder / name, folder / f"{name}-head-2", ranks=2)
        return max(used["peak_rss_bytes"] for used in report.ranks)

    import_directory(folder / "tiny", folder / "tiny-head")
    of_two = peak("large") - peak("tiny")
    head = folder / "head"
    return {"1": rise(lambda: import_directory(folder / "large", head)), "2": of_two}


def export(folder: Path) -> dict[str, int]:
    """What `import_` wrote."""
    from tools.mtp_checkpoint.exporting import export_directory

    export_directory(folder / "tiny-head", folder / "tiny", folder / "tiny-out")
    head, like, out = (folder / name for name in ("head", "large", "out"))
    return {"1": rise(lambda: export_directory(head, like, out))}


def main(verb: str, folder: Path) -> None:
    """Measure, and print."""
    from tools.mtp_checkpoint import launch

    launch.on_cpu()
    print(json.dumps({"make": make, "import": import_, "export": export}[verb](folder)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
