"""Command line of the demo: `python -m examples.online_rl --help`."""

import argparse
from pathlib import Path

from examples.online_rl.options import add_options, run_as_program, settings_of, start
from examples.online_rl.settings import Settings


def parse(arguments: list[str] | None = None) -> tuple[Settings, int, Path]:
    """Return the settings, how many seeds and the output folder.

    Exits with status 2 on arguments that cannot work.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.online_rl",
        description="Online RL of a small GPT on reasoning-gym's chain_sum, once with its MTP "
        "heads trained on the sampled tokens in the same forward and once with frozen heads: the "
        "same policy to the bit, and what speculative decoding gets out of either.",
        epilog="Exit status: 0 done, 1 the isolation proof failed, 2 bad arguments, or "
        "something is not installed.",
    )
    add_options(parser, output="build/demo", seeds=1)
    options = parser.parse_args(arguments)
    return settings_of(parser, options), options.seeds, options.output


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    settings, seeds, folder = parse(arguments)

    def run_demo(groups) -> bool:
        from examples.online_rl.run import run

        return run(settings, seeds, folder, groups)

    return start(settings, run_demo)


if __name__ == "__main__":
    run_as_program(main)
