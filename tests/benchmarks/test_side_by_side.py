"""What two libraries compute is counted alike, lap by lap, and a difference is said aloud."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import side_by_side
from benchmarks.peers.__main__ import ENVIRONMENTS, interpreter
from benchmarks.peers.laps import KERNELS, Counts, Operations

ROOT = Path(__file__).resolve().parents[2]


def test_passes_tokens_and_steps_are_counted() -> None:
    """A batch of 3 rows of 5 tokens: once without gradient, once with that of the upper of two blocks."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8))
    model.requires_grad_(False)
    model.transformer.h[1].requires_grad_(True)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    ids = torch.arange(15).view(3, 5) % 11
    counts = Counts(layers=2).begin()
    with torch.inference_mode():
        model(ids)
    model(ids).logits.sum().backward()
    optimizer.step()
    model.transformer.h[1](torch.zeros(1, 4, 8))  # 4 tokens through one of two blocks
    found = counts.end()
    found.pop("GFLOP")
    # A block of width 8: attention 8 * 24 + 24 + 8 * 8 + 8, two norms of 16, MLP 8 * 32 + 32 + 32 * 8 + 8.
    assert found == {
        "forward passes": 2,
        "tokens forward": 15 + 15 + 2,
        "tokens backward": 15 / 2,
        "optimizer steps": 1,
        "trained weights": 872,
    }
    model(ids)
    assert counts.work.found["forward passes"] == 2, "nothing is counted after the end"


@pytest.mark.parametrize("learns", [False, True])
def test_operations_are_those_of_the_products(learns: bool) -> None:
    """[3000, 400] @ [400, 500] is 2 * 3000 * 400 * 500 operations, backward once more for the weight and the input."""
    layer, states = nn.Linear(400, 500), torch.ones(3000, 400, requires_grad=learns)
    counts = Counts(layers=1).begin()
    with torch.inference_mode(not learns):
        output = layer(states)
    if learns:
        output.sum().backward()
    assert counts.end()["GFLOP"] == pytest.approx(1.2 * (3 if learns else 1))


def laps(ours: list[float], peer: list[float], counts: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """What the sides say of a warm-up, a counted lap, and laps that took so many seconds."""

    def said(side: str, seconds: float, number: int) -> dict[str, Any]:
        more = {"counts": counts[side]} if number == 1 else {}
        return {"seconds": seconds, "phases": {"generate": seconds / 4}, "rss": 100.0 + number, **more}

    rows = enumerate(zip([99.0, 99.0, *ours], [1.0, 1.0, *peer], strict=True))
    return [
        {"case": "", "lap": number, "load": 2.0, "ours": said("ours", a, number), "peer": said("peer", b, number)}
        for number, (a, b) in rows
    ]


def test_a_summary_is_of_the_timed_laps_and_says_which_side_does_more() -> None:
    counts = {"ours": {"tokens forward": 100.0, "steps": 4.0}, "peer": {"tokens forward": 150.0, "steps": 4.1}}
    found = side_by_side.summary(laps([1.0, 2.0, 4.0], [2.0, 3.0, 12.0], counts))
    assert (found["ours"], found["peer"], found["ratio"]) == (2.0, 3.0, 2.0)
    assert (found["least"], found["most"], found["laps"], found["rss"]["ours"]) == (1.5, 3.0, 3, 104.0)
    assert found["phases"] == {"generate": 0.25}
    text = side_by_side.shown("ppo", "TRL", found)
    assert "UNEQUAL WORK: tokens forward: 100 ours, 150 of the peer; the peer has 1.50 times as many" in text
    assert "steps:" not in text, "a difference of 2.4 % is not notable"
    found["counts"]["peer"] = counts["ours"]
    assert "both sides compute the same" in side_by_side.shown("ppo", "TRL", found)


def test_a_row_of_a_table_is_replaced_or_added() -> None:
    page = "# Page\n\n| work | a |\n|---|---|\n| ppo | 1 |\n\nText.\n\n| other | a |\n|---|---|\n| ppo | 2 |\n"
    page = side_by_side.put_row(page, "work", "| ppo | 3 |")
    page = side_by_side.put_row(page, "other", "| ppo 124M | 4 |")
    assert page == (
        "# Page\n\n| work | a |\n|---|---|\n| ppo | 3 |\n\nText.\n\n"
        "| other | a |\n|---|---|\n| ppo | 2 |\n| ppo 124M | 4 |\n"
    )


def test_the_page_has_the_tables_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "speed.md"
    page.write_text(side_by_side.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(side_by_side, "PAGE", page)
    counts = {name: float(number) for number, name in enumerate(Counts(layers=1).begin().end())}
    found = side_by_side.summary(laps([1.0], [2.0], {"ours": counts, "peer": counts}))
    side_by_side.write("nothing", "TRL", found, "python -m nothing")
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| nothing |")]
    assert "| **2.00** (2.00 to 2.00) | 102 / 102 |" in rows[0]
    assert rows[2] == "| nothing | generate 25 % |"
    assert "`python -m nothing` |" in rows[3]
    heads = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| w")]
    assert "| ".join([" ", *(f"{name} " for name in counts), ""]).strip()[2:] in heads[1]


def test_parts_of_a_lap_and_the_ratio_without_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two turns are dropped. Twice as fast with a tenth of copies and three of the rest: 2 / .6 without."""
    monkeypatch.setattr(side_by_side, "PAGE", page := tmp_path / "speed.md")
    page.write_text("| work | times |\n|---|---|\n| nothing | **2.00** (1 to 3) |\n\n| part of our lap |\n|---|\n")
    profiled = [{"seconds": 90.0, "counts": dict.fromkeys(KERNELS, float(lap))} for lap in (1, 3, 5)]
    others = [{"seconds": seconds} for seconds in (80.0, 30.0, 50.0)]
    turns = [said for pair in zip(others, profiled, strict=True) for said in pair]
    found = side_by_side.parts([{"lap": lap, "ours": said} for lap, said in enumerate(turns)])
    assert found == {**dict.fromkeys(KERNELS, 0.1), "rest": pytest.approx(1 - 0.1 * len(KERNELS))}
    kinds = list(found)
    taken = {**dict.fromkeys(kinds, 0.0), "products": 0.6, "copies and sums": 0.1, "rest": 0.3}
    side_by_side.write_parts("nothing", taken)
    assert page.read_text().endswith("| nothing | 60 % | 0 % | 0 % | 0 % | 0 % | 0 % | 10 % | 30 % | 3.33 |\n")
    with pytest.raises(SystemExit, match="no row 'other'"):
        side_by_side.write_parts("other", taken)


def test_the_profiler_tells_seconds() -> None:
    measured, begun = Operations().begin(), time.perf_counter()
    torch.ones(300, 300) @ torch.ones(300, 300)
    found, whole = measured.end(), time.perf_counter() - begun
    assert set(found) == set(KERNELS) and 0 < found["products"] <= sum(found.values()) < whole


def test_a_value_model_is_for_the_last_ppo_of_trl() -> None:
    made = side_by_side.task("ppo", "1.8M", 3, value_model="own")
    other = side_by_side.task("ppo", "1.8M", 3)
    assert (made["peer"], made["program"], other["program"]) == ("TRL 1.12.0", "trl_1_12", "trl_0_11")
    assert {name: made[name] for name in side_by_side.SHAPES["ppo"]["1.8M"]} == side_by_side.SHAPES["ppo"]["1.8M"]
    assert made["prompts"] == other["prompts"]


def test_lengths_of_dialogues() -> None:
    """Of 64 pairs, the same in each lap, the words of each part are within bounds; EOS is one more of an answer."""
    made = side_by_side.task("dpo", "1.8M", 3, varied=True)
    prompts, *answers = ([len(text.split()) for text in column] for column in zip(*made["pairs"], strict=True))
    assert len(prompts) == 64 and made["prompt"] + made["response"] <= side_by_side.SIZES["1.8M"]["positions"]
    for counts, most in ((prompts, made["prompt"]), *((answer, made["response"] - 1) for answer in answers)):
        assert most / 4 < statistics.median(counts) < most and max(counts) == most and min(counts) < most / 4


def test_each_peer_is_the_version_that_its_environment_has() -> None:
    for peer, program in [side_by_side.VALUE_MODEL, *side_by_side.PEERS.values()]:
        if program != "transformers_generate":
            assert ENVIRONMENTS[program][0] == peer.lower().replace(" ", "==")


def test_an_environment_that_is_missing_is_named() -> None:
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.peers make trl_9"):
        interpreter("trl_9")


@pytest.mark.parametrize("size", ["1.8M", "124M"])
def test_each_side_is_first_in_every_other_turn_of_a_case(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second lap of a turn is reported where a turn has two, and the cases of `decode` have equally many laps."""
    called: list[str] = []

    class Counting(nullcontext[Any]):
        def __init__(self, name: str, *_: Any) -> None:
            super().__init__(self)
            self.name = name

        def listen(self) -> None:
            pass

        def lap(self) -> dict[str, int]:
            called.append(self.name)
            return {"seen": called.count(self.name)}

    monkeypatch.setattr(side_by_side, "Side", Counting)
    monkeypatch.setattr(side_by_side, "save_model", lambda *_: None)
    made = side_by_side.task("decode", size, 3)
    said, cases = side_by_side.turns(size, made), len(made["cases"])
    many = {"1.8M": 2, "124M": 1}[size]
    assert [turn["ours"]["seen"] for turn in said] == [many * (1 + number) for number in range(3 * cases)]
    first = [called[2 * many * number] for number in range(3 * cases)]
    assert called == [name for one in first for name in sorted(("ours", "peer"), key=one.__ne__) for _ in range(many)]
    assert all(first[number] != first[number + cases] for number in range(2 * cases))
    assert sum(made["laps"] for _ in made["cases"]) * 2 == len(called)


@pytest.mark.slow
def test_two_processes_take_turns() -> None:
    """13 CPU seconds. A prompt of 16 tokens and 48 new ones, of which the last is not read: both read 63."""
    cases = [("one", 1, 1, 16, 48, False, 1), ("two", 2, 1, 16, 4, False, 2)]
    program = f"""
from benchmarks import side_by_side as s
s.CASES["1.8M"] = {cases!r}
laps = s.turns("1.8M", s.task("decode", "1.8M", 3))
for case in ("one", "two"):
    print(s.shown(case, "generate", s.summary([lap for lap in laps if lap["case"] == case])))
    print([lap[side]["counts"]["tokens forward"] for lap in laps if lap["case"] == case and lap["lap"] == 1
           for side in ("ours", "peer")])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert "[63.0, 63.0]" in run.stdout and "[38.0, 38.0]" in run.stdout
    assert "in 1 pairs of laps" in run.stdout
