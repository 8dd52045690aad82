"""Command line of the example: `python -m examples.finetune_mtp_head --help`."""

import os
import subprocess
import sys
from pathlib import Path

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.options import Options, missing, parse, quieten

EXIT_OK, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2  # argparse exits with 2 on bad arguments
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    options = parse(arguments)
    if problem := missing():
        print(f"error: {problem}; see README.md", file=sys.stderr)
        return EXIT_BAD_INPUT
    quieten()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from examples.finetune_mtp_head.ranks import on_ranks

    try:
        results = on_ranks(options.ranks, options)
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if options.preflight:
        return EXIT_OK if all(results) else EXIT_CHECK_FAILED
    if options.export is not None and os.environ.get("RANK", "0") == "0":
        return _export(results[0], options)
    return EXIT_OK


def _export(checkpoint: Path, options: Options) -> int:
    """Splice the trained head into a copy of the model's directory; return the exit status.

    In a process of its own: the tool works on the CPU, whatever this one has used.
    """
    command = [sys.executable, "-m", "tools.mtp_checkpoint", "export", checkpoint / "head"]
    command += ["--like", options.settings.model, "--out", options.export]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    return subprocess.run([str(part) for part in command], env=environment).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
