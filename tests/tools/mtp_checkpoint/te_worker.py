"""Verifies heads of Transformer Engine's modules on `te_standin`, and prints figures as JSON.

    python -m tests.tools.mtp_checkpoint.te_worker FOLDER

A process of its own: Megatron sees Transformer Engine, or does not, when it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.tools.mtp_checkpoint import te_standin

te_standin.install()

import torch  # noqa: E402

from tests.support import parallel_world, prepare  # noqa: E402
from tests.tools.mtp_checkpoint.native_support import Kind, directory, imported  # noqa: E402
from tools.mtp_checkpoint.checkpoint import (  # noqa: E402
    MANIFEST,
    load_head,
    manifest,
    read_manifest,
    save_head,
    write_json,
)
from tools.mtp_checkpoint.families import by_name  # noqa: E402
from tools.mtp_checkpoint.importing import layer_tensors  # noqa: E402
from tools.mtp_checkpoint.served import Served  # noqa: E402
from tools.mtp_checkpoint.verifying import verify  # noqa: E402

KINDS = (
    Kind("qwen3_5_moe", "packed", "fp32"),
    Kind("qwen3_5", "dense", "fp32"),
    Kind("mimo", "dense", "fp32"),
    Kind("deepseek_v3", "per-expert", "fp32"),
)


def figures(groups, kind: Kind, folder: Path) -> dict:
    """A head imported into the local layer, verified in the other one, and back."""
    contents = manifest(directory(kind), kind.family, kind.layout, torch.float32)
    local = imported(kind, groups)
    save_head(local, folder / "local", contents)
    report = verify(
        groups, directory(kind).path, folder / "local", rows_from="random", implementation="te"
    )
    served = Served.of(by_name(kind.family), 3, "vllm")
    write_json(folder / "local" / MANIFEST, served.written(read_manifest(folder / "local")))
    chained = verify(
        groups, directory(kind).path, folder / "local", rows_from="random", implementation="te"
    )
    other = load_head(folder / "local", groups=groups, implementation="te", device="cpu")
    save_head(other, folder / "te", contents)
    back, start = load_head(folder / "te", groups=groups, device="cpu"), layer_tensors(local)
    differing = [n for n, t in layer_tensors(back).items() if not torch.equal(t, start[n])]
    return {
        "passed": report.passed,
        "hidden_delta": report.comparison.hidden_delta,
        "later depths": {c.name: c.value for c in chained.checks if c.name.startswith("depth")},
        "argmax_agreement": report.comparison.argmax_agreement,
        "flips": int(report.comparison.flipped_N.sum()),
        "changed on the way back": differing,
        "modules": sorted({type(module).__name__ for module in other.modules()}),
        "parameters": sorted(name for name, _ in other.mtp.layers[0].named_parameters()),
    }


def main(folder: Path) -> None:
    """All kinds."""
    prepare()
    found = {}
    for kind in KINDS:
        place = folder / kind.family
        place.mkdir()
        with parallel_world() as groups:
            found[kind.family] = figures(groups, kind, place)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
