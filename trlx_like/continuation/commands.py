"""The commands `trlx-like generate` and `trlx-like chat`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from trlx_like.errors import ConfigError, raised_as

Model = Annotated[
    str,
    typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its best checkpoint), a checkpoint, or any model."),
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of new tokens, at most half of a short context by default.")
]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens; 0: from all.")]
Beta = Annotated[float | None, typer.Option(help="Weight of the advantage of an ILQL model, by default 1.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Random seed; the same seed gives the same text.")]


def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue. Repeatable.")] = None,
    messages: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help='Dialogue to answer: [{"role": "user", "content": "Hi"}]. Repeatable.'),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts in any form that data.prompts may have, such as .jsonl.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    beta: Beta = None,
    number: Annotated[int, typer.Option("--num-samples", "--num", min=1, help="Number of samples per prompt.")] = 1,
    reward: Annotated[bool, typer.Option("--reward", help="Show the reward of each sample by data.reward_fn.")] = False,
    seed: Seed = None,
) -> None:
    """Sample from a trained model.

    Uses the chat template and the stop sequences of its run. Prints each prompt with its continuation, separated by
    empty lines. Text is continued as it is; messages are written by the chat template. By default a continuation has at
    most 40 new tokens.
    """
    from trlx_like.continuation.generator import Generator, find_model

    options = _options(temperature, top_k, beta)
    if not (prompt or messages or prompts):
        raise typer.BadParameter("Give a prompt: --prompt, --messages or --prompts.")
    trained = find_model(model)
    rows = [*(prompt or ()), *map(_messages, messages or ()), *(trained.prompts(prompts) if prompts else ())]
    runner = trained.reward() if reward else None
    generator = Generator(trained, options, seed, max_new_tokens, usual=40)
    samples = generator.sample(rows, number)
    texts = generator.texts(samples)
    if runner is not None:
        scores = generator.rewards(runner, samples)
        texts = [f"{text}\n[{_score(of)}]" for text, of in zip(texts, scores, strict=True)]
    typer.echo("\n\n".join(texts))


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message that every dialogue begins with.")] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    beta: Beta = None,
    seed: Seed = None,
) -> None:
    """Talk to a trained model, a line at a time.

    Messages are written by its chat template. An empty line begins a new dialogue; the end of the input (Ctrl-D) ends
    the command. If a dialogue becomes too long for the model, its beginning is cut off. By default an answer has at
    most 200 new tokens.
    """
    from trlx_like.continuation.generator import Generator, find_model

    options = _options(temperature, top_k, beta)
    generator = Generator(find_model(model), options, seed, max_new_tokens, usual=200)
    if not generator.tokenizer.chat_template:
        raise ConfigError(
            f"{model} has no chat template. Continue text with `trlx-like generate --prompt`, or train with "
            "tokenizer.chat_template."
        )
    beginning = [] if system is None else [{"role": "system", "content": system}]
    dialogue = list(beginning)
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            dialogue = list(beginning)
            continue
        dialogue.append({"role": "user", "content": line})
        (answer,) = generator.sample([{"messages": dialogue}]).outputs
        dialogue.append({"role": "assistant", "content": answer})
        typer.echo(answer)


def _options(temperature: float, top_k: int, beta: float | None) -> dict[str, Any]:
    """Return the generation options that the options of a command stand for."""
    for name, value in (("--temperature", temperature), ("--beta", beta)):
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name} ({value}) must be a finite number.")
    sampled = {"temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    return {**sampled, **({} if beta is None else {"beta": beta})}


def _messages(text: str) -> Any:
    """Read a dialogue that is given as JSON. Its form is checked with that of all prompts."""
    with raised_as(ConfigError, ValueError, f"--messages ({text!r:.60}) must be JSON"):
        return json.loads(text)


def _score(rewards: Mapping[str, float | None]) -> str:
    """Return the reward of a sample, and those of several functions, in words."""
    return ", ".join(f"{name} {'none' if value is None else format(value, '.4g')}" for name, value in rewards.items())
