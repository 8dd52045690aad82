"""Compares objectives: `python -m examples.online_rl.objectives --help`."""

import argparse

from examples.online_rl.options import add_options, run_as_program, settings_of, start

DEFAULT_ARMS = ("ce", "kl", "tv", "chained-kl", "chained-tv")
ALL_ARMS = ("ce", "kl", "tv", "ce+tv", "chained-kl", "chained-tv")


def parse(
    arguments: list[str] | None = None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser, which words refusals, and the options.

    Exits with status 2 on arguments that cannot work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.online_rl.objectives",
        description="The RL run of examples.online_rl with its MTP heads frozen and trained by "
        "several objectives: one policy, bit for bit, and what speculative decoding gets out of it "
        "with each kind of heads. About as long as the demo per two arms and seed.",
        epilog="Exit status: 0 done, 1 the policies differ, 2 bad arguments, or something is not "
        "installed.",
    )
    add_options(parser, output="build/objectives", seeds=3)
    # Objectives lie closer together than frozen and online heads: fewer measurements, but better.
    parser.set_defaults(measure_every=10, measure_prompts=192)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ALL_ARMS,
        default=list(DEFAULT_ARMS),
        help=f"objectives to train heads by, beside the frozen ones ({' '.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--check-prompts",
        type=int,
        default=512,
        help="held-out problems answered by each arm's final heads (512)",
    )
    options = parser.parse_args(arguments)
    if len(set(options.arms)) < len(options.arms):
        parser.error(f"--arms names an objective twice: {' '.join(options.arms)}")
    if options.check_prompts < 2:
        parser.error(f"--check-prompts must be at least 2, got {options.check_prompts}")
    return parser, options


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    parser, options = parse(arguments)
    settings = settings_of(parser, options)

    def run_comparison(groups) -> bool:
        from examples.online_rl.arms import objective_arms
        from examples.online_rl.comparison import run

        arms = objective_arms(options.arms, settings.temperature)
        prompts, folder = options.check_prompts, options.output
        return run(settings, arms, options.seeds, prompts, folder, groups)

    return start(settings, run_comparison)


if __name__ == "__main__":
    run_as_program(main)
