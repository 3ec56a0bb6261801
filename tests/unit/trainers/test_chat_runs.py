"""Messages through whole runs of every trainer: what they learn from, with tools, and what truncation takes away."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import trlx_like
from tests.contract.recipes import GENERATION, NO_DROPOUT, RECIPES
from tests.contract.runs import rows
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.pipelines.families import family_tokenizer, template
from tests.unit.pipelines.templates import CHATML, assistant, chat_tokenizer, user
from tests.unit.pipelines.test_families import CALL, SYSTEM, TWO, WEATHER, get_weather
from trlx_like.errors import ConfigError

ASKED = [SYSTEM, user("Hi")]
NEEDS: dict[str, dict[str, Any]] = {
    "samples": {"samples": [[*ASKED, assistant("Yo")], {"messages": [user("2+2?"), assistant("4")]}] * 2},
    "preferences": {"preferences": [{"prompt": ASKED, "chosen": [assistant("Yo")], "rejected": [assistant("Oy")]}] * 3},
    "prompts": {"prompts": [ASKED, {"prompt": [user("2+2?")], "answer": "4"}] * 2},
}


def run(
    name: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any,
    length: int = 600,
    **arguments: Any,
) -> Any:
    """Make one step of a trainer on messages.

    options: dotted keys of the configuration ("train.seed"). arguments: those of `train`, instead of the usual ones.
    """
    recipe = RECIPES[name]
    method = {**recipe.method, "gen_kwargs": {**GENERATION, "max_new_tokens": 3}}
    if name == "RewardTrainer":
        method.pop("gen_kwargs")
    kinds = {name: ["samples"] for name in ("SFTTrainer", "ILQLTrainer", "KTOTrainer")} | {
        "DPOTrainer": ["preferences"]
    }
    needs = kinds.get(name, ["preferences"] if name == "RewardTrainer" else ["prompts"])
    usual = {key: value for need in needs for key, value in NEEDS[need].items()}
    if name in ("ILQLTrainer", "KTOTrainer"):
        usual["rewards"] = [1.0, -2.0, 3.0, -4.0]
    if needs == ["prompts"]:
        usual["reward_fn"] = lambda outputs, **_: [float(len(output)) for output in outputs]
    model = {"model_path": tiny_config(vocabulary=160, n_positions=length, **NO_DROPOUT)}
    if name == "DistillTrainer":
        model["ref_model_path"] = tiny_config(vocabulary=160, n_positions=length)
    config = {
        "model": model,
        "tokenizer": {"tokenizer_path": tokenizer},
        "method": method,
        "train": {
            **{"trainer": name, "seq_length": length, "batch_size": 2, "total_steps": 1, "epochs": 1},
            **{"seed": 2, "checkpoint_dir": str(folder), **({"best_metric": None} if name == "RewardTrainer" else {})},
        },
    }
    return trlx_like.train(trlx_like.TRLConfig.update(config, options or {}), **{**usual, **arguments})


def read(trainer: Any) -> list[str]:
    """The texts that a trainer learned from; of preferences the chosen ones."""
    names = ("prompt", "response" if hasattr(trainer.store.elements[0], "response") else "chosen")
    parts = [[getattr(element, name) for name in names if hasattr(element, name)] for element in trainer.store.elements]
    return [str(trainer.tokenizer.decode(torch.cat(ids))) for ids in parts]


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"DDPOTrainer"}))  # which makes images
def test_every_trainer_learns_from_messages_with_tools(name: str, tmp_path: Path) -> None:
    """Llama 3's template: BOS once, the tools in the first question, the answer after its header."""
    trainer = run(name, tmp_path, tokenizer=family_tokenizer("llama3"), tools=[get_weather])
    assert trainer.config.tokenizer.chat_template_kwargs == {"tools": [WEATHER]}
    texts = read(trainer)
    assert len(texts) >= 2
    schema = json.dumps(WEATHER, indent=4)
    for text in texts:
        asked, header, answer = text.partition("assistant<|end_header_id|>\n\n")
        assert asked.count("<|begin_of_text|>") == 1 and asked.startswith("<|begin_of_text|><|start_header_id|>")
        assert header and answer
        assert text.split("user<|end_header_id|>\n\n")[1].startswith("You can call these functions:\n\n{")
        assert sorted(text.split("functions:\n\n")[1].split("\n\n")[0]) == sorted(schema)
    assert any("Be brief." in text for text in texts)


@pytest.mark.parametrize("name", ["SFTTrainer", "ILQLTrainer"])
@pytest.mark.parametrize("marked", [False, True])
def test_only_what_the_assistant_says_is_learned(name: str, marked: bool, tmp_path: Path) -> None:
    called = [user("Rome?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    samples = [[SYSTEM, *TWO], [*called, {"role": "tool", "content": "21"}, assistant("Warm")]]
    rewards: dict[str, Any] = {"rewards": [1.0, 2.0]} if name == "ILQLTrainer" else {}
    trainer = run(name, tmp_path, tokenizer=family_tokenizer("llama3", marked), samples=samples, **rewards)
    said = [trainer.tokenizer.decode(element.response[element.scored]) for element in trainer.store.elements]
    assert said[0] == "Yo<|eot_id|>4<|eot_id|>"
    assert said[1].startswith('{"name": "get_weather"') and said[1].endswith("<|eot_id|>Warm<|eot_id|>")
    assert not cut(tmp_path)


def test_the_loss_is_that_of_the_answers_tokens(tmp_path: Path) -> None:
    """By hand: -log p of the five tokens of `Yo<|im_end|>` and `4<|im_end|>`, and of no other."""
    trainer = run("SFTTrainer", tmp_path, {"train.batch_size": 1}, tokenizer=family_tokenizer("qwen2"), samples=[TWO])
    (element,) = trainer.store.elements
    ids = torch.cat([element.prompt, element.response])
    text = trainer.tokenizer.decode(ids)
    with torch.no_grad():
        logprobs = trainer.model.lm(ids[None]).logits.double().log_softmax(-1)[0]
    picked = []
    for answer in ("Yo<|im_end|>", "4<|im_end|>"):
        start = len(trainer.tokenizer(text[: text.index("assistant\n" + answer) + len("assistant\n")]).input_ids)
        for place, token in enumerate(trainer.tokenizer(answer).input_ids, start):
            assert ids[place] == token
            picked.append(-float(logprobs[place - 1, token]))
    assert len(picked) == 5
    output = trainer.loss(trainer.experience_class.collate([element]))
    assert trainer.units(trainer.experience_class.collate([element])) == 5
    assert float(output.loss.detach()) == pytest.approx(sum(picked), rel=1e-5)


def test_preferences_are_between_what_the_assistant_says(tmp_path: Path) -> None:
    """By hand: of `Yo<|im_end|>`, a question and `4<|im_end|>` the log-probabilities of the five tokens."""
    pair = {"prompt": TWO[:1], "chosen": TWO[1:], "rejected": [assistant("Oy")]}
    trainer = run("DPOTrainer", tmp_path, tokenizer=family_tokenizer("qwen2"), preferences=[pair])
    batch = trainer.experience_class.collate(trainer.store.elements)
    ids = torch.cat([batch.prompt, batch.chosen], dim=1)
    with torch.no_grad():
        logprobs = trainer.model.lm(ids).logits.double().log_softmax(-1)[0]
    said = trainer.tokenizer.convert_ids_to_tokens(batch.chosen[0])
    own = [0, 1, 2, len(said) - 2, len(said) - 1]
    assert [said[place] for place in own] == ["Y", "o", "<|im_end|>", "4", "<|im_end|>"]
    start = batch.prompt.shape[1]
    by_hand = sum(float(logprobs[start + place - 1, batch.chosen[0, place]]) for place in own)
    assert trainer.units(batch) == {"pairs": 1, "chosen_tokens": 5.0, "rejected_tokens": 3.0, "tokens": 8.0}
    assert float(trainer.loss(batch).metrics["logps/chosen"]) == pytest.approx(by_hand, rel=1e-5)


def test_a_template_that_is_not_prefix_stable_trains_with_marks_only(tmp_path: Path) -> None:
    with pytest.raises(trlx_like.errors.DataError, match=r"samples\[0\]: the chat template .* not prefix-stable"):
        run("SFTTrainer", tmp_path / "a", tokenizer=family_tokenizer("qwen3"), samples=[TWO])
    trainer = run("SFTTrainer", tmp_path / "b", tokenizer=family_tokenizer("qwen3", marked=True), samples=[TWO])
    (element,) = trainer.store.elements
    said = trainer.tokenizer.decode(element.response[element.target])
    assert said == "Yo<|im_end|><think>\n\n</think>\n\n4<|im_end|>"


# The configuration.


def test_a_template_of_the_configuration_and_what_it_is_told(tmp_path: Path) -> None:
    """A file names the template, its options reach it, and the exported tokenizer has it."""
    file = tmp_path / "qwen3.jinja"
    file.write_text(template("qwen3"), encoding="utf-8")
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = None
    options = {"tokenizer.chat_template": str(file), "tokenizer.chat_template_kwargs": {"enable_thinking": False}}
    trainer = run("PPOTrainer", tmp_path / "run", options, tokenizer=tokenizer)
    for element in trainer.store.elements:
        text = trainer.tokenizer.decode(element.prompt)
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    query = trainer.by_hand.ids(ASKED)
    assert query == next(
        e.prompt.tolist() for e in trainer.store.elements if "Be brief" in trainer.decode([e.prompt])[0]
    )
    assert len(trainer.generate([ASKED, "plain", torch.tensor(query)])) == 3
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint_1" / "hf_model")
    assert exported.chat_template == template("qwen3")
    inline = run("PPOTrainer", tmp_path / "inline", {"tokenizer.chat_template": CHATML}, tokenizer=tiny_tokenizer())
    assert inline.tokenizer.chat_template == CHATML


def test_a_template_that_is_no_file(tmp_path: Path) -> None:
    words = r"tokenizer\.chat_template \('none\.jinja'\) is neither a template, nor one of alpaca, .*, nor a file"
    with pytest.raises(ConfigError, match=words):
        run("SFTTrainer", tmp_path, {"tokenizer.chat_template": "none.jinja"}, tokenizer=tiny_tokenizer())


def test_tools_of_a_file_are_named_and_what_was_used_is_in_the_run_folder(tmp_path: Path) -> None:
    place = f"{Path(__file__).parents[1] / 'pipelines' / 'test_families.py'}:get_weather"
    options = {"tokenizer.chat_template_kwargs": {"tools": [place]}}
    trainer = run("SFTTrainer", tmp_path, options, tokenizer=family_tokenizer("llama3"))
    assert all('"get_weather"' in text for text in read(trainer))
    with pytest.raises(ConfigError, match=r"train\.tools: 'print' must be a function with types and a docstring"):
        run("SFTTrainer", tmp_path, tokenizer=family_tokenizer("llama3"), tools=[print])


# Truncation.


def cut(folder: Path) -> dict[str, float]:
    """The metrics about it, of the first row that has any."""
    names = ("data/cut_rows", "data/cut_outputs", "data/cut_output_tokens", "data/dropped_rows")
    found = [row for row in rows(folder) if names[0] in row]
    return {name.removeprefix("data/"): found[0][name] for name in names} if found else {}


SHORT = [user("a"), assistant("b")]  # <|user|>a<eos>_<|assistant|>b<eos>_ are eight tokens
LONG = [user("abc"), assistant("defgh")]  # fourteen, of which six are output


@pytest.mark.parametrize("name", ["SFTTrainer", "ILQLTrainer"])
def test_answers_of_samples_are_never_cut_silently(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of fourteen tokens the last four are lost: a line break, which is nobody's, EOS and two letters."""
    rewards: dict[str, Any] = {"rewards": [1.0, 2.0]} if name == "ILQLTrainer" else {}
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer = run(name, tmp_path, tokenizer=chat_tokenizer(CHATML), length=10, samples=[SHORT, LONG], **rewards)
    assert cut(tmp_path) == {"cut_rows": 1, "cut_outputs": 1, "cut_output_tokens": 3, "dropped_rows": 0}
    said = [trainer.tokenizer.decode(element.response[element.scored]) for element in trainer.store.elements]
    assert said == ["b<eos>", "def"]
    assert (
        "1 of 2 samples are longer than train.seq_length (10 tokens) and were cut: 1 tokens of prompts and 3 tokens of "
        "1 outputs are lost." in caplog.messages
    )


@pytest.mark.parametrize("name", ["DPOTrainer", "RewardTrainer"])
def test_answers_of_preferences_are_never_cut_silently(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt has seven tokens, which leaves four of the answers' six and five."""
    pairs = [
        {"prompt": LONG[:1], "chosen": LONG[1:], "rejected": [assistant("efgh")]},
        {"prompt": SHORT[:1], "chosen": SHORT[1:], "rejected": [assistant("c")]},
    ]
    arguments: dict[str, Any] = {"tokenizer": chat_tokenizer(CHATML), "length": 11, "preferences": pairs}
    keep = {"method.truncation_mode": "keep_start"}
    with caplog.at_level(logging.WARNING, "trlx_like"):
        run(name, tmp_path / "cut", {**keep, "method.too_long": "truncate"}, **arguments)
        run(name, tmp_path / "drop", {**keep, "method.too_long": "drop"}, **arguments)
    assert cut(tmp_path / "cut") == {"cut_rows": 1, "cut_outputs": 1, "cut_output_tokens": 3, "dropped_rows": 0}
    assert cut(tmp_path / "drop") == {"cut_rows": 0, "cut_outputs": 0, "cut_output_tokens": 0, "dropped_rows": 1}
    assert caplog.messages == [
        "1 of 2 preferences are longer than max_length (11 tokens) and were cut: 3 tokens of 1 outputs are lost.",
        "1 of 2 preferences are longer than max_length (11 tokens) and were dropped.",
    ]


@pytest.mark.parametrize("name", ["PPOTrainer", "RFTTrainer", "GRPOTrainer", "OnlineDPOTrainer"])
def test_prompts_that_are_cut_are_still_questions(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three of eight tokens are for the response: of `<|user|>abc<eos>_<|assistant|>` the first four and the last."""
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer = run(name, tmp_path, tokenizer=chat_tokenizer(CHATML), length=8, prompts=[LONG[:1], SHORT[:1]])
    texts = read(trainer)
    assert any(text.startswith("<|user|>abc<|assistant|>") for text in texts)
    assert any(text.startswith("<|user|>a<eos> <|assistant|>") for text in texts)
    limit = "train.seq_length less max_new_tokens (5 tokens)"
    assert f"1 of 2 prompts are longer than {limit} and were cut: 2 tokens of prompts are lost." in caplog.messages


# Files.


def test_messages_and_tools_from_files(tmp_path: Path) -> None:
    """A JSON line and a Parquet row are the same sample; Parquet fills missing keys with None and has tools as text."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    called: list[dict[str, Any]] = [user("Rome?"), {"role": "assistant", "tool_calls": [CALL]}]
    called += [{"role": "tool", "content": "21"}, assistant("Warm")]
    row = {"messages": called, "tools": [WEATHER]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    table = arrow.Table.from_pylist([{"messages": called, "tools": json.dumps([WEATHER])}])
    parquet.write_table(table, tmp_path / "chat.parquet")
    assert table.to_pylist()[0]["messages"][0] == {"role": "user", "content": "Rome?", "tool_calls": None}
    learned = []
    for name in ("chat.jsonl", "chat.parquet"):
        options = {"data.samples": str(tmp_path / name), "train.batch_size": 1}
        arguments: dict[str, Any] = {"tokenizer": family_tokenizer("llama3"), "length": 900, "samples": None}
        trainer = run("SFTTrainer", tmp_path / name[5:], options, **arguments)
        (element,) = trainer.store.elements
        learned.append((element.response.tolist(), element.target.tolist()))
    assert learned[0] == learned[1]
    said = trainer.tokenizer.decode(element.response[element.target])
    assert said.startswith('{"name": "get_weather"') and said.endswith("<|eot_id|>Warm<|eot_id|>")
