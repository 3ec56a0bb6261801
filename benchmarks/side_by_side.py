"""Measure this project beside another library on the same work, in turns: CPU seconds, memory, and what was computed.

    python -m benchmarks.peers make                            # once: the environments of the peers
    python -m benchmarks.side_by_side ppo --size 1.8M --repeats 2 --write
    python -m benchmarks.side_by_side ppo --size 124M --unfrozen 2 --laps 3
    python -m benchmarks.side_by_side ppo --value-model policy     # beside the last PPO of TRL
    python -m benchmarks.side_by_side ppo --parts                  # what a lap of ours consists of

Both sides are processes of one thread that get the same model files, prompts and lengths, and take turns lap by lap,
so that other work on the machine slows both. A lap is a round (ppo, grpo, rloo, online_dpo, ddpo), some optimizer
steps (dpo, sft, reward) or one batch of responses (decode). With 1.8M weights a turn is two laps, of which the second
counts: a process that has waited is slower at first, and a trainer does not wait. The first turn of each is dropped.
In the second, which is not timed, each side counts what it computes; a difference above 3 % is printed. The model is a
GPT-2 with random weights, or a small Stable Diffusion for ddpo, and the reward costs next to nothing. `--write` puts
the result into docs/speed.md.

With `--device cuda` both sides run on one GPU, seconds are those of the clock after all work there, and memory is that
of tensors. The environments of the peers need a torch for GPUs then.

With `--parts` our side runs alone, and torch's profiler tells what its laps consist of, without the first two turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.ddpo import PROMPTS, pipeline
from benchmarks.peers.__main__ import interpreter
from benchmarks.peers.laps import COUNTED, WARM_UP
from benchmarks.ppo import tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "speed.md"

SIZES = {
    "1.8M": {"layers": 6, "width": 144, "heads": 6, "vocabulary": 2000, "positions": 320},
    "124M": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "positions": 1024},
}
PEERS = {
    "ppo": ("TRL 0.11.4", "trl_0_11"),
    "ddpo": ("TRL 0.23.1", "trl_0_23"),
    **dict.fromkeys(("grpo", "rloo", "online_dpo", "dpo", "sft", "reward"), ("TRL 1.16.0", "trl_1_16")),
    "decode": (f"transformers {transformers.__version__}", "transformers_generate"),
}
VALUE_MODEL = ("TRL 1.12.0", "trl_1_12")
"""The peer of PPO that has a value model."""
TURN = {"1.0M": 2, "1.8M": 2}
"""How many laps are a turn, of which the last counts, where it is more than one."""
# Of a lap: prompts (online) and their responses, tokens of a response, samples and number of the optimizer steps.
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "ppo": {
        "1.8M": {"prompts_a_lap": 32, "response": 48, "batch": 8, "steps": 16},
        "124M": {"prompts_a_lap": 8, "response": 48, "batch": 4, "steps": 8},
    },
    **{
        work: {
            "1.8M": {"prompts_a_lap": 4, "group": 8, "response": 48, "batch": 32, "steps": 1},
            "124M": {"prompts_a_lap": 2, "group": 4, "response": 48, "batch": 8, "steps": 1},
        }
        for work in ("grpo", "rloo")
    },
    "online_dpo": {
        "1.8M": {"prompts_a_lap": 8, "response": 48, "batch": 8, "steps": 1},
        "124M": {"prompts_a_lap": 4, "response": 48, "batch": 4, "steps": 1},
    },
    **{
        work: {"1.8M": {"response": 30, "batch": 8, "steps": 8}, "124M": {"response": 30, "batch": 4, "steps": 2}}
        for work in ("dpo", "sft", "reward")
    },
    "ddpo": {"1.0M": {"prompts_a_lap": 8, "denoising_steps": 10, "response": 0, "batch": 8, "steps": 1}},
}
WIDTHS = (32, 64)
"""Of the UNet of DDPO."""
PROMPT = 16
DIALOGUES = {"prompt": (90, 192), "response": (45, 127)}
"""The median and the most tokens of prompts and responses with `--varied`, which are log-normal with a sigma of 0.8."""
# Of decoding: prompts, responses to each, tokens of a prompt and of a response, whether lengths vary, batch size.
CASES: dict[str, list[tuple[str, int, int, int, int, bool, int]]] = {
    "1.8M": [
        ("1 prompt", 1, 1, 16, 48, False, 1),
        ("32 prompts", 32, 1, 16, 48, False, 32),
        ("128 prompts", 128, 1, 16, 48, False, 128),
        ("64 prompts, lengths vary", 64, 1, 16, 48, True, 64),
        ("128 prompts, lengths vary, 32 at a time", 128, 1, 16, 48, True, 32),
        ("4 prompts of 256 tokens, 8 responses each", 4, 8, 256, 48, False, 32),
    ],
    "124M": [("8 prompts", 8, 1, 16, 16, False, 8), ("32 prompts", 32, 1, 16, 16, False, 32)],
}
CALM = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""The environment variables of each side."""
ROOMY = {"MALLOC_TOP_PAD_": f"{2**30}", "MALLOC_TRIM_THRESHOLD_": f"{2**40}", "MALLOC_MMAP_THRESHOLD_": f"{2**30}"}
"""Let glibc keep freed memory beside that of torch's profiler. Otherwise large tensors get new pages in each lap."""
NOTABLE = 0.03
"""The least difference of a count, as a part of the larger one, that is printed."""


def texts(rng: random.Random, count: int, words: int, vocabulary: int) -> list[str]:
    """Draw texts of words, each of which is a token."""
    return [" ".join(str(rng.randrange(vocabulary - 1)) for _ in range(words)) for _ in range(count)]


def length(rng: random.Random, part: str) -> int:
    """Draw a number of tokens of a part of a dialogue."""
    median, most = DIALOGUES[part]
    return max(2, min(most, round(rng.lognormvariate(math.log(median), 0.8))))


def task(
    work: str,
    size: str,
    times: int,
    unfrozen: int = -1,
    sampling: str = "float32",
    value_model: str | None = None,
    varied: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return what both sides are to do, without the folder of the model."""
    made: dict[str, Any] = {"work": work, "layers": 1, "unfrozen": unfrozen, "sampling": sampling}
    made["device"], made["turn"] = device, TURN.get(size, 1)
    made["laps"] = laps = times * made["turn"]
    made["value_model"], (made["peer"], made["program"]) = value_model, VALUE_MODEL if value_model else PEERS[work]
    made |= {"prompt": PROMPT, "lr": 1e-6, "group": 1, "prompts_a_lap": 0, "prompts": PROMPTS, "pairs": []}
    if work == "ddpo":
        return made | SHAPES[work][size]
    rng, words, made["layers"] = random.Random(0), SIZES[size]["vocabulary"], SIZES[size]["layers"]
    if work == "decode":
        # A sixteenth of the words end a response whose length is to vary, so that the mean is 16.
        ends = list(range(0, words, 16))
        made["cases"] = [
            {
                "name": name,
                "prompts": texts(rng, count, before, words),
                "group": group,
                "prompt": before,
                "response": longest,
                "eos": ends if vary else None,
                "at_once": at_once,
            }
            for name, count, group, before, longest, vary, at_once in CASES[size]
        ]
        return made
    made["prompts"] = []
    made |= SHAPES[work][size]
    if made["prompts_a_lap"]:
        made["prompts"] = texts(rng, max(64, made["prompts_a_lap"] * laps), PROMPT, words)
    else:
        # With frozen blocks each lap is an epoch of the same rows, so that what these make of them may be kept. With
        # lengths that vary too, or one lap would have more tokens than another.
        rows = made["batch"] * made["steps"] * (laps if unfrozen < 0 and not varied else 1)
        # The last token of a completion is the EOS, which both sides add.
        columns = [texts(rng, rows, count, words) for count in (PROMPT, made["response"] - 1, made["response"] - 1)]
        if varied:
            parts = [("prompt", 0), ("response", 1), ("response", 1)]
            columns = [[texts(rng, 1, length(rng, part) - eos, words)[0] for _ in range(rows)] for part, eos in parts]
            made |= {part: most for part, (_, most) in DIALOGUES.items()}
        made["pairs"] = [
            (prompt, f" {chosen}", f" {rejected}") for prompt, chosen, rejected in zip(*columns, strict=True)
        ]
    return made


def save_model(size: str, folder: Path) -> None:
    """Write a GPT-2 with random weights and without dropout, and its tokenizer, or a Stable Diffusion."""
    if size not in SIZES:
        made = pipeline(WIDTHS)
        made.save_pretrained(folder)
        # The files that earlier versions of transformers read.
        (folder / "tokenizer" / "vocab.json").write_text(json.dumps(made.tokenizer.get_vocab()), encoding="utf-8")
        (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        return
    torch.manual_seed(0)
    sizes, eos = SIZES[size], SIZES[size]["vocabulary"] - 1
    names = {
        "n_layer": "layers",
        "n_embd": "width",
        "n_head": "heads",
        "vocab_size": "vocabulary",
        "n_positions": "positions",
    }
    options: dict[str, Any] = {theirs: sizes[name] for theirs, name in names.items()}
    options |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    options |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos)
    GPT2LMHeadModel(GPT2Config(**options)).save_pretrained(folder)
    tokenizer(sizes["vocabulary"]).save_pretrained(folder)


class Side:
    """One of two processes, which computes only while `lap` waits for it.

    Args:
        name: For messages.
        command: What to run, without its two arguments.
        folder: Of the task, and of what the process prints.
        environment: Further environment variables.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        read, write = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(folder / "task.json"), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                env={**os.environ, **CALM, **environment},
                cwd=folder,
                text=True,
            )
        os.close(write)
        self.replies = os.fdopen(read)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()

    def listen(self) -> dict[str, Any]:
        """Return the next line that the process says."""
        if not (line := self.replies.readline()):
            raise SystemExit(f"{self.name} has ended. The last that it printed:\n{self.log.read_text()[-3000:]}")
        said: dict[str, Any] = json.loads(line)
        return said

    def lap(self) -> dict[str, Any]:
        """Let the process run a lap, and return what it says of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.listen()


def turns(size: str, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Run both sides of a task once; return for each turn its case, its number, and what each side said of a lap."""
    work = made["work"]
    names = [case["name"] for case in made.get("cases", [{"name": ""}])]
    program = made["program"]
    commands = {"ours": [sys.executable, "-m", "benchmarks.ours"]}
    environment = {"CUDA_VISIBLE_DEVICES": ""} if made["device"] == "cpu" else {}
    if made.get("profiled"):
        environment |= ROOMY
    else:
        python = sys.executable if work == "decode" else str(interpreter(program))
        commands["peer"] = [python, "-m", f"benchmarks.peers.{program}"]
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(size, folder)
        (folder / "task.json").write_text(json.dumps({**made, "model": str(folder)}), encoding="utf-8")
        sides = {
            name: stack.enter_context(Side(name, command, folder, environment)) for name, command in commands.items()
        }
        for side in sides.values():
            side.listen()  # it is ready
        for turn, (number, case) in itertools.product(range(made["laps"] // made["turn"]), enumerate(names)):
            # Each side is first in every other turn of each case: who has waited longer is slower at first.
            order = list(sides) if (turn + number) % 2 else list(sides)[::-1]
            said = {name: [sides[name].lap() for _ in range(made["turn"])][-1] for name in order}
            found.append({"case": case, "lap": turn, "load": os.getloadavg()[0], **said})
    return found


def count(number: float) -> str:
    """Return a count as text."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def unequal(counts: dict[str, dict[str, float]]) -> list[str]:
    """Say which counts of the two sides differ notably, and which side has more."""
    lines = []
    for name, ours in counts["ours"].items():
        peer = counts["peer"][name]
        if abs(ours - peer) > NOTABLE * max(ours, peer):
            more = "ours" if ours > peer else "the peer"
            times = f"{max(ours, peer) / min(ours, peer):.2f} times" if min(ours, peer) else "all"
            lines.append(f"{name}: {count(ours)} ours, {count(peer)} of the peer; {more} has {times} as many")
    return lines


def summary(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the laps of one case."""
    timed = [lap for lap in laps if lap["lap"] not in (WARM_UP, COUNTED)]
    seconds = {side: [lap[side]["seconds"] for lap in timed] for side in ("ours", "peer")}
    ratios = [lap["peer"]["seconds"] / lap["ours"]["seconds"] for lap in timed]
    phases = {name: sum(lap["ours"]["phases"].get(name, 0.0) for lap in timed) for name in timed[0]["ours"]["phases"]}
    whole = sum(seconds["ours"])
    return {
        **{side: statistics.median(values) for side, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "laps": len(timed),
        "load": statistics.mean(lap["load"] for lap in timed),
        "rss": {side: max(lap[side]["rss"] for lap in laps) for side in ("ours", "peer")},
        "counts": {
            side: next(lap for lap in laps if lap["lap"] == COUNTED)[side]["counts"] for side in ("ours", "peer")
        },
        "phases": {name: spent / whole for name, spent in phases.items()},
    }


def parts(laps: list[dict[str, Any]]) -> dict[str, float]:
    """Return what part each kind of operation has of the laps of one case, which are profiled in every other turn.

    It is the mean of its seconds in those, divided by that of the other laps, which the profiler does not slow. It also
    slows each short operation a little, so that parts of many short ones are too large, and the rest too small.
    """
    kept = [lap["ours"] for lap in laps if lap["lap"] > COUNTED]
    whole = statistics.mean(lap["seconds"] for lap in kept if "counts" not in lap)
    profiled = [lap["counts"] for lap in kept if "counts" in lap]
    found = {kind: statistics.mean(taken[kind] for taken in profiled) / whole for kind in profiled[0]}
    return {**found, "rest": 1 - sum(found.values())}


def write_parts(key: str, found: dict[str, float]) -> None:
    """Put the parts of our laps into docs/speed.md, with the ratio if copies, sums and the rest took no time."""
    text = PAGE.read_text(encoding="utf-8")
    ratio = re.search(rf"^\| {re.escape(key)} \| .*\*\*([\d.]+)\*\*", text, re.MULTILINE)
    if ratio is None:
        raise SystemExit(f"{PAGE} has no row {key!r}: measure it beside the peer first, without --parts.")
    least = 1 - found["copies and sums"] - found["rest"]
    cells = [f"{100 * part:.0f} %" for part in found.values()]
    row = f"| {key} | {' | '.join(cells)} | {float(ratio[1]) / least:.2f} |"
    PAGE.write_text(put_row(text, "part of our lap", row), encoding="utf-8")


def shares(phases: dict[str, float]) -> str:
    """Return the phases of a lap as text, with their parts of it, the largest first."""
    parts = sorted(phases.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * part:.0f} %" for name, part in parts if part >= 0.005)


def shown(key: str, peer: str, found: dict[str, Any], unit: str = "CPU s") -> str:
    """Return the text of a result for the terminal."""
    rss = found["rss"]
    lines = [
        f"{key}: ours {found['ours']:.3f}, {peer} {found['peer']:.3f} {unit} a lap; {found['ratio']:.2f} times "
        f"({found['least']:.2f} to {found['most']:.2f} in {found['laps']} pairs of laps, load {found['load']:.1f}); "
        f"peak {rss['ours']:.0f} and {rss['peer']:.0f} MiB",
    ]
    if found["phases"]:
        lines.append(f"  our lap: {shares(found['phases'])}")
    different = unequal(found["counts"])
    lines += [f"  UNEQUAL WORK: {line}" for line in different] or ["  both sides compute the same, by all counts"]
    return "\n".join(lines)


def put_row(text: str, table: str, row: str) -> str:
    """Put a row into a table of a page, in place of the row with the same first cell.

    Args:
        text: The page.
        table: The first cell of the table's head.
        row: The row.
    """
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {table} |"))
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    key = row.split("|")[1]
    place = next((at for at in range(start + 2, end) if lines[at].split("|")[1] == key), None)
    lines[end if place is None else place : end if place is None else place + 1] = [row]
    return "\n".join(lines) + "\n"


def write(key: str, peer: str, found: dict[str, Any], command: str) -> None:
    """Put a result into the tables of docs/speed.md."""
    rss = found["rss"]
    both = found["counts"]
    counts = [f"{count(ours)} / {count(both['peer'][name])}" for name, ours in both["ours"].items()]
    ratio = f"**{found['ratio']:.2f}** ({found['least']:.2f} to {found['most']:.2f})"
    rows = {
        "work": [peer, f"{found['ours']:.3f}", f"{found['peer']:.3f}", ratio, f"{rss['ours']:.0f} / {rss['peer']:.0f}"],
        "what a lap computes": counts,
        **({"our lap": [shares(found["phases"])]} if found["phases"] else {}),
        "measured": [time.strftime("%Y-%m-%d"), commit(), found["laps"], f"{found['load']:.1f}", f"`{command}`"],
    }
    text = PAGE.read_text(encoding="utf-8")
    for table, row in rows.items():
        text = put_row(text, table, f"| {key} | {' | '.join(map(str, row))} |")
    PAGE.write_text(re.sub(r"(?m)^Machine: .*$", f"Machine: {machine()}.", text), encoding="utf-8")


def commit() -> str:
    """Return the last commit that changed the package, with a plus if what lies there differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "trlx_like")
    return git("log", "-1", "--abbrev=8", "--format=%h", "--", "trlx_like") + ("+" if changed else "")


def machine() -> str:
    """Return the processor and the versions of both sides, in words."""
    processor = platform.processor() or platform.machine()
    if (file := Path("/proc/cpuinfo")).exists():
        processor = re.findall(r"model name\s*: (.*)", file.read_text())[0]
    versions = f"torch {torch.__version__}, ours with transformers {transformers.__version__}"
    return f"{os.cpu_count()} CPUs ({processor}), one thread a side, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=PEERS)
    parser.add_argument("--size", help="weights of the model: 1.8M (default) or 124M; 1.0M for ddpo")
    parser.add_argument("--unfrozen", type=int, default=-1, help="top blocks that are trained; -1: all (ppo, dpo)")
    parser.add_argument("--sampling", default="float32", help="number format of our sampler's weights (ppo)")
    parser.add_argument(
        "--value-model",
        choices=["policy", "own", "none"],
        help="measure beside TRL 1.12, whose PPO has a value model in place of a head: the blocks of the policy, which "
        "run once more for it, a GPT-2 of its own, or none, so that each value is 0 (ppo)",
    )
    parser.add_argument(
        "--varied", action="store_true", help="lengths as in dialogues in place of equal ones (dpo, sft, reward)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: one GPU")
    parser.add_argument("--laps", type=int, default=5, help="timed turns of each process (default 5)")
    parser.add_argument("--repeats", type=int, default=1, help="pairs of processes, one after the other (default 1)")
    parser.add_argument("--parts", action="store_true", help="profile some laps of our side alone")
    parser.add_argument("--write", action="store_true", help="put the result into docs/speed.md")
    given = parser.parse_args()
    sizes = list(SHAPES.get(given.work, CASES))
    given.size = given.size or sizes[0]
    if given.size not in sizes:
        parser.error(f"--size of {given.work} is one of {', '.join(sizes)}")
    if given.unfrozen != -1 and given.work not in ("ppo", "dpo"):
        parser.error("--unfrozen is for ppo and dpo: the peer's side of the others trains all blocks")
    if given.sampling != "float32" and given.work != "ppo":
        parser.error("--sampling is for ppo")
    if given.value_model and given.work != "ppo":
        parser.error("--value-model is for ppo")
    if given.varied and (given.work not in ("dpo", "sft", "reward") or given.size != "1.8M"):
        parser.error("--varied is for dpo, sft and reward of 1.8M")
    if given.device == "cuda" and (given.write or given.parts):
        parser.error("--write and --parts are for CPUs: the page has CPU seconds")
    if given.parts and given.laps < 2:
        parser.error("--parts needs two laps, one with the profiler and one without")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU")
    options = given.unfrozen, given.sampling, given.value_model, given.varied, given.device
    made = task(given.work, given.size, given.laps + 2, *options)
    made["profiled"] = given.parts
    laps = [lap for _ in range(given.repeats) for lap in turns(given.size, made)]
    command = " ".join(["python -m benchmarks.side_by_side", *sys.argv[1:]])
    for case in dict.fromkeys(lap["case"] for lap in laps):
        top = f", {given.unfrozen} of {SIZES[given.size]['layers']} blocks" if given.unfrozen >= 0 else ""
        drawn = f", sampled in {given.sampling}" if given.sampling != "float32" else ""
        values = f", value model: {given.value_model}" if given.value_model else ""
        vary = ", lengths vary" if given.varied else ""
        place = ", on a GPU" if given.device == "cuda" else ""
        key = f"{given.work} {given.size}{top}{drawn}{values}{vary}{place}{case and f', {case}'}"
        of_case = [lap for lap in laps if lap["case"] == case]
        if given.parts:
            print(f"{key}: {shares(consists := parts(of_case))}")
            if given.write:
                write_parts(key, consists)
            continue
        found = summary(of_case)
        print(shown(key, made["peer"], found, "CPU s" if given.device == "cpu" else "s"))
        if given.write:
            write(key, made["peer"], found, command)


if __name__ == "__main__":
    main()
