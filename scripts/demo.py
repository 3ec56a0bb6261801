"""`python scripts/demo.py`: from a fresh machine to a learned policy, with nothing but Python.

Makes the environment when there is none, trains PPO on shortest walks through the graph of the README's picture,
and says what to try next. Further arguments go to the example.
"""

from __future__ import annotations

import sys

from environment import Environment, run, say


def main(arguments: list[str]) -> int:
    """Exit code of the example."""
    environment = Environment()
    python = environment.ensure()
    code = run([python, "-m", "examples.randomwalks.ppo", "--problem", "44", *arguments])
    if code:
        say(f"The demo ended with exit code {code}; the lines above say why.")
        return code
    programs = environment.programs.relative_to(environment.root)
    say(f"\nWhat to try next, from {environment.root}:")
    for command, purpose in (
        (f"{programs / 'trlx-like'} train configs/ppo_randomwalks.yml", "the same from a YAML file"),
        (f"{programs / 'trlx-like'} doctor", "what this machine has and what is missing"),
        (f"{programs / 'trlx-like'} --help", "the other commands"),
        ("python scripts/test.py", "the whole test suite"),
    ):
        say(f"  {command:<60} {purpose}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
