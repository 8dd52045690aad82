"""Installs RL frameworks from PyPI beside the fork, for the tests that drive them.

    python tools/clients.py [NAME …] [--if-possible]

Each goes into a folder of its own under build/clients, without its dependencies: the frameworks pin
other versions of what is installed here. What is there already is left alone. Together they are a
download of about 15 MB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "clients"
RECEIPT = "requirements.txt"  # written last, so that a half-made folder is made again


@dataclass(frozen=True)
class Client:
    """One framework.

    Attributes:
        name: Of its folder.
        requirements: Installed without dependencies; the framework itself comes first.
        stubbed: Packages that it imports and that the tested path never calls.
        dropped: Top-level folders of its wheel that would hide others.
        bare: Its packages whose ``__init__`` is left out, because it imports everything there is.
    """

    name: str
    requirements: tuple[str, ...]
    stubbed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it is."""
        return FOLDER / self.name


_VERL = "accelerate cachetools codetiming datasets hydra omegaconf orjson pandas peft ray"
_VERL += " tensordict torchdata"
_AREAL = "aiohttp einops flask httpx hydra lark mbridge megatron.bridge numba omegaconf orjson ray"
_AREAL += " tenacity torchdata uvloop areal.infra.dist_rollout areal.models.mcore"
_AREAL += " areal.engine.megatron_utils.megatron_bridge_patches"
CLIENTS = {
    client.name: client
    for client in (
        Client("verl", ("verl==0.9.1",), tuple(_VERL.split()), ("tests", "scripts")),
        Client(
            "areal",
            ("areal==1.0.4", "colorlog==6.9.0"),
            tuple(_AREAL.split()),
            bare=("areal", "areal.infra"),
        ),
        Client(  # its tests stub by themselves: tests/tools/mtp_checkpoint/bridge_worker.py
            "megatron-bridge",
            (
                "megatron-bridge==0.6.2",
                "accelerate==1.15.0",
                "antlr4-python3-runtime==4.9.3",
                "hydra-core==1.3.2",
                "omegaconf==2.3.0",
                "peft==0.21.2",
            ),
        ),
        Client("miles", ("miles-rl==0.0.2",), ("httpx", "ray", "sglang"), ("megatron", "sglang")),
    )
}


def installed(name: str) -> bool:
    """Whether the framework is there in the version that is listed."""
    receipt = CLIENTS[name].folder / RECEIPT
    return receipt.is_file() and receipt.read_text() == _receipt(CLIENTS[name])


def install(client: Client) -> None:
    """Install one framework; raises ``CalledProcessError`` if pip fails."""
    shutil.rmtree(client.folder, ignore_errors=True)
    client.folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    command += ["--target", str(client.folder), *client.requirements]
    subprocess.run(command, check=True)
    for dropped in client.dropped:
        shutil.rmtree(client.folder / dropped, ignore_errors=True)
    (client.folder / RECEIPT).write_text(_receipt(client))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 if a framework could not be installed, 0 all the same with --if-possible."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--if-possible", action="store_true", help="succeed without a network")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(CLIENTS):
        parser.error(f"expected some of {', '.join(CLIENTS)}, got {', '.join(sorted(unknown))}")
    for name in given.names or CLIENTS:
        if installed(name):
            continue
        try:
            install(CLIENTS[name])
        except subprocess.CalledProcessError:
            print(
                f"{CLIENTS[name].requirements[0]} could not be installed (see above): tests that "
                "drive RL frameworks are skipped. `make clients` tries again.",
                file=sys.stderr,
            )
            return 0 if given.if_possible else 1
        print(f"{name}: {CLIENTS[name].folder}")
    return 0


def _receipt(client: Client) -> str:
    return "".join(f"{line}\n" for line in client.requirements)


if __name__ == "__main__":
    sys.exit(main())
