"""Say where a run on a game loses its score, and whether its values are to blame, by comparison with exact ones.

    python -m examples.diagnose randomwalks runs/randomwalks/ilql --problem 44 [--beta 100] [--picture FILE.svg]
    python -m examples.diagnose maze runs/maze/ilql --problem 21 [--beta 80] [--picture FILE.svg]
    python -m examples.diagnose wordle runs/wordle/ilql --problem 5 --words 40 [--beta 4] [--picture FILE.svg]

The folder is that of a run, of which the last checkpoint is read, or an exported model. `--problem` is that of the run.
`python -m examples.diagnose GAME --help` says what is compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch

import examples.maze.values
import examples.randomwalks.values
import examples.wordle.values
from examples.values import picture

GAMES = {
    "randomwalks": examples.randomwalks.values,
    "maze": examples.maze.values,
    "wordle": examples.wordle.values,
}
"""Each has `add_options(parser)`, and `diagnose(given)`, which prints and returns the panels of the picture."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    games = parser.add_subparsers(dest="game", required=True)
    for name, game in GAMES.items():
        own = games.add_parser(name, description=game.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        own.add_argument("run", type=Path, help="run folder, or folder of an exported model")
        own.add_argument("--picture", type=Path, help="SVG file to write: learned against exact values")
        game.add_options(own)
    given = parser.parse_args()
    torch.set_num_threads(1)
    panels = GAMES[given.game].diagnose(given)
    if given.picture and panels:
        given.picture.parent.mkdir(parents=True, exist_ok=True)
        given.picture.write_text(picture(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
