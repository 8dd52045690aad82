"""The findings behind tools/doctor.py: installed packages, Megatron and its series, features."""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forklib import checkout, environment, project

ROOT = Path(__file__).resolve().parents[2]
OK, MISSING, WRONG = "ok", "missing", "wrong"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: heading it stands under.
        name: what was looked for.
        state: `OK`, `MISSING` (optional, not there) or `WRONG` (needed and absent or broken).
        detail: version, place or what is the matter.
        advice: what to do about it, where something can be done.
    """

    topic: str
    name: str
    state: str
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Package:
    """An optional package: `distribution` is its name for pip, `module` what is imported."""

    distribution: str
    module: str
    advice: str


_OPTIONAL = (
    Package(
        "transformer-engine", "transformer_engine",
        "pip install --no-build-isolation 'transformer_engine[pytorch]' (needs CUDA)",
    ),
    Package("triton", "triton", "it comes with CUDA builds of torch"),
    Package("transformers", "transformers", "pip install -r requirements.txt"),
    Package("safetensors", "safetensors", "pip install -r requirements.txt"),
    Package("tensorboard", "tensorboard", "pip install tensorboard"),
    Package("wandb", "wandb", "pip install wandb"),
)  # fmt: skip

# Feature, what must all be there (`a or b`: one of them), what happens without.
_FEATURES = (
    ("training on GPUs over NCCL", ("cuda",), "CPU over gloo, with the stand-in of the tests"),
    ("context-parallel attention", ("transformer-engine",), "CP 1, or the tests' plain attention"),
    (
        "attention over packed sequences",
        ("transformer-engine",),
        "padded batches, or the tests' plain attention",
    ),
    ("grouped-GEMM experts", ("transformer-engine",), "experts run one after the other"),
    ("fused Adam", ("apex or transformer-engine",), "torch's Adam"),
    ("fused gradient accumulation", ("apex",), "unfused"),
    ("Hugging Face heads, in and out", ("transformers", "safetensors"), "not available"),
    ("TensorBoard scalars", ("tensorboard",), "not written"),
    ("Weights & Biases scalars", ("wandb",), "not written"),
)


def installed(package: Package) -> Finding:
    """Whether an optional package is there and can be imported."""
    if importlib.util.find_spec(package.module) is None:
        return Finding("packages", package.distribution, MISSING, "not installed", package.advice)
    try:
        importlib.import_module(package.module)
    except Exception as error:  # whatever a broken binary raises
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        return Finding("packages", package.distribution, WRONG, detail, "reinstall or remove it")
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return Finding("packages", package.distribution, OK, version)


def apex() -> Finding:
    """NVIDIA's apex, none, or the unrelated web toolkit of that name."""
    problem = environment.apex_problem()
    if problem:
        return Finding("packages", "apex", WRONG, problem, "python -m pip uninstall apex")
    if importlib.util.find_spec("apex") is None:
        advice = "build NVIDIA's from source; `pip install apex` gets something else"
        return Finding("packages", "apex", MISSING, "not installed", advice)
    return Finding("packages", "apex", OK, "NVIDIA's")


def torch_and_devices() -> Iterator[Finding]:
    """torch, the GPUs it sees and its communication library."""
    try:
        import torch
    except Exception as error:
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding("torch", "torch", WRONG, detail, "make setup, or pip install torch")
        return
    yield Finding("torch", "torch", OK, f"{torch.__version__}, CUDA build {torch.version.cuda}")
    if not torch.cuda.is_available():
        yield Finding("torch", "cuda", MISSING, "no usable GPU", "a GPU and its driver")
        return
    names = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("torch", "cuda", OK, f"{names}; NCCL {nccl}")


def megatron(fork: project.Project) -> Iterator[Finding]:
    """Where Megatron is imported from and whether this series is in it, whole and unchanged."""
    spec = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        yield Finding(
            "megatron", "megatron.core", WRONG, "cannot be found",
            "make tree and PYTHONPATH=build/tree, or pip install .",
        )  # fmt: skip
        return
    core = Path(next(iter(spec.submodule_search_locations)))
    yield Finding("megatron", "megatron.core", OK, f"{_version_of(core)} in {core}")
    fork = checkout.choose(fork.root, core.parents[1])
    added = {
        path: file for path, file in fork.added_files().items() if path.startswith("megatron/")
    }
    present = [path for path in added if (core.parents[1] / path).is_file()]
    changed = [p for p in present if (core.parents[1] / p).read_bytes() != added[p].read_bytes()]
    count = f"{len(fork.patches)} patches"
    if not present:
        yield Finding(
            "megatron", "series", WRONG, f"{fork.version} is not in it",
            f"git am {fork.patches_dir}/* in that checkout, or PYTHONPATH=build/tree",
        )  # fmt: skip
    elif changed or len(present) < len(added):
        odd = changed or sorted(set(added) - set(present))
        detail = f"{fork.version} in part, or another one: {odd[0]} and {len(odd) - 1} more differ"
        yield Finding("megatron", "series", WRONG, detail, "apply the series of this repository")
    else:
        yield Finding("megatron", "series", OK, f"{fork.version}, all of its {count}")


def features(found: list[Finding]) -> Iterator[Finding]:
    """What the packages found add up to."""
    there = {finding.name for finding in found if finding.state == OK}
    for name, needs, without in _FEATURES:
        missing = [need for need in needs if there.isdisjoint(need.split(" or "))]
        if missing:
            detail = f"off: {without}"
            yield Finding("features", name, MISSING, detail, f"needs {', '.join(missing)}")
        else:
            yield Finding("features", name, OK, "on")


def examine(fork: project.Project) -> list[Finding]:
    """All findings, in the order of the report."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = [Finding("python", "python", OK, f"{version} ({sys.executable})")]
    found += torch_and_devices()
    found += [apex()]
    found += [installed(package) for package in _OPTIONAL]
    found += megatron(fork)
    return found + list(features(found))


def render(found: list[Finding]) -> str:
    """The report as text, one line per finding, its advice below it."""
    signs = {OK: "ok     ", MISSING: "missing", WRONG: "WRONG  "}
    width = max(len(finding.name) for finding in found)
    lines, topic = [], None
    for finding in found:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(f"{topic}")
        lines.append(f"  {signs[finding.state]} {finding.name:<{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"          {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


def main(description: str, argv: list[str] | None = None) -> int:
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="only look for what breaks everything; no report"
    )
    args = parser.parse_args(argv)
    if args.quick:
        problem = environment.apex_problem()
        if problem:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if problem else 0
    found = examine(project.load(ROOT))
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=1))
    else:
        print(render(found))
    wrong = [finding for finding in found if finding.state == WRONG]
    if wrong:
        print(f"error: {len(wrong)} of these must be put right", file=sys.stderr)
    return 1 if wrong else 0


def _version_of(core: Path) -> str:
    """Major, minor and patch of megatron/core/package_info.py, read without importing it."""
    values = {}
    for line in (core / "package_info.py").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.strip() in ("MAJOR", "MINOR", "PATCH"):
            values[name.strip()] = value.strip()
    return ".".join(values.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
