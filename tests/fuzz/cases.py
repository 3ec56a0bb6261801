"""Cases of what people write and disks return: each ends with a result, or with an error that the user can correct.

A property takes a folder and a drawn example, and tries it with others around it: to draw one takes as long as to try
ten. It returns how many cases it tried. Anything that it raises beside a `TrlxError` of one clear line or more is a
finding. `python -m tests.fuzz` tries as many as it is told; the tests try a few.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from trlx_like.algorithms import ALGORITHMS
from trlx_like.checkpoint import CheckpointStore
from trlx_like.checkpoint.manifest import MANIFEST, seal_folder, verify_folder
from trlx_like.checkpoint.tree import load_tree, save_tree
from trlx_like.config import METHODS, TRAINERS, TRLConfig
from trlx_like.errors import TrlxError
from trlx_like.pipelines.chat import encode_answer, encode_chat, encode_prompt
from trlx_like.pipelines.files import READERS
from trlx_like.pipelines.sources import load_rows
from trlx_like.presets import PRESETS

Property = Callable[[Path, Any], int]
CASES: dict[str, tuple[st.SearchStrategy[Any], Property]] = {}
"""By name: how examples are drawn, and what is done with each."""

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["no", "1e400", "0x", "<object X>", "<redacted>", "a:b", "x.py:f", "~", "..", "9" * 5000])
    | st.sampled_from(["\ud800", "\x00"])
)  # fmt: skip
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def case(name: str, strategy: st.SearchStrategy[Any]) -> Callable[[Property], Property]:
    """Add the decorated property to `CASES`."""

    def add(run: Property) -> Property:
        CASES[name] = strategy, run
        return run

    return add


def answers(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function, which may raise an error that the user can correct, if it says something."""
    try:
        return call(*given, **options)
    except TrlxError as error:
        assert str(error).strip(), "an error without a message"
        str(error).encode("utf-8", "backslashreplace")
        return None


def spoiled(text: bytes) -> st.SearchStrategy[bytes]:
    """Draw what may become of a file's bytes: some are cut out, replaced or added."""
    places = st.integers(0, len(text))
    parts = st.binary(max_size=6) | st.sampled_from(
        [b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xfe", b"\n", b"- &a [*a]"]
    )
    return st.builds(lambda i, n, new: text[:i] + new + text[i + n :], places, st.integers(0, 40), parts)


NEIGHBOURS = 20
SMALL = 300  # bytes; a longer file takes longer to read than to draw
PIECES = [
    *(b"", b"[", b"]", b"{", b"}", b":", b": ", b",", b"- ", b"&a ", b"*a", b"<<: ", b"!!int ", b"!x ", b"|\n"),
    *(b"\n", b"\r", b" ", b"\t", b"'", b'"', b"#", b"%YAML 9\n", b"@", b"?", b"---\n", b"...\n", b"~", b"\x00"),
    *(b"\xff", b"\xed\xa0\x80", b"\xc2\x85", b"1e400", b"-0", b"NaN", b"null", b"9" * 50, b"0x", b"0o9", b"\\u"),
    *(b">-\n", b"\\ud800"),
]


def around(content: bytes, seed: int) -> Iterator[bytes]:
    """Yield a file's bytes, and of a small file others that differ from them in one place."""
    yield content
    chance = random.Random(seed)
    for _ in range(NEIGHBOURS if len(content) <= SMALL else 0):
        place, gone = chance.randint(0, len(content)), chance.choice((0, 0, 1, 2, 5, 40))
        yield content[:place] + chance.choice(PIECES) + content[place + gone :]


seeds = st.integers(0, 2**32)


# Configurations.


@cache
def complete() -> dict[str, dict[str, Any]]:
    """The presets with all options; of these a case has those that the preset changes, and a few."""
    return {name: yaml.safe_load(str(preset())) for name, preset in PRESETS.items()}


@cache
def short() -> dict[str, str]:
    """The presets as JSON, without the options that have their defaults."""
    found = {}
    for row in ALGORITHMS:
        sections = {"model": {}, "tokenizer": {}, **json.loads(json.dumps(row.preset))}
        sections["method"] = {"name": row.method, **sections.get("method", {})}
        sections["train"] = {"trainer": row.trainer, **sections.get("train", {})}
        found[row.name] = json.dumps(sections)
    return found


@st.composite
def configurations(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A preset with some options replaced, removed or added, and words of `--set`."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    values, known = json.loads(short()[preset]), complete()[preset]
    names = st.sampled_from([*METHODS.names(), *TRAINERS.names()]) | st.text(max_size=4)
    for _ in range(draw(st.integers(1, 4))):
        section = draw(st.sampled_from([*known, "plugin"]))
        options = values.setdefault(section, {})
        if not isinstance(options, dict) or draw(st.integers(0, 9)) == 0:
            values[section] = draw(trees)
            continue
        option = draw(st.sampled_from([*known.get(section, {}), "trust_remote_code"]) | st.text(max_size=6))
        if draw(st.booleans()):
            options[option] = draw(trees | names)
        else:
            options.pop(option, None)
    values.pop("plugins", None)  # these are run
    dotted = st.sampled_from(["train.seed", "method.gen_kwargs.top_k", "optimizer.kwargs", "a.b", "train", ".", ""])
    words = st.builds(
        "{}={}".format, dotted, st.text(max_size=8) | st.sampled_from(["{a: 1}", "[", "*x", "!!int x", "1"])
    )
    return values, draw(st.lists(words | st.text(max_size=8), max_size=2))


@case("configuration", configurations())
def _configuration(folder: Path, given: tuple[dict[str, Any], list[str]]) -> int:
    """Values of any kind in any place. What is read can be written and read again, and is then the same."""
    values, overrides = given
    file = folder / "config.yml"
    file.write_bytes(yaml.dump(values, allow_unicode=False).encode("utf-8", "surrogatepass"))
    config = answers(TRLConfig.load_yaml, file, overrides)
    if config is not None:
        config.dump_yaml(file)
        again = answers(TRLConfig.load_yaml, file)
        assert again is None or str(again) == str(config)
        str(config), repr(config)
    return 1


SHORT = b"""# comment
model: &m {model_path: gpt2, peft_config: null}
tokenizer: {<<: {padding_side: left}, tokenizer_path: 'x y'}
train:
  trainer: PPOTrainer
  total_steps: 1_000
  epochs: 0x10
  batch_size: 8
  tags: [a, "b\\u0041", |
    text]
method:
  name: PPOConfig
  gamma: .5
  gen_kwargs: {max_new_tokens: 8, temperature: 1e0}
"""


SECTIONS = [SHORT[:66], SHORT[66:135], SHORT[135:210], SHORT[210:]]


@case("yaml text", st.tuples(st.text(max_size=60) | st.sampled_from(SECTIONS) | spoiled(SHORT), seeds))
def _yaml_text(folder: Path, given: tuple[str | bytes, int]) -> int:
    """Bytes of any kind in the place of YAML."""
    text, seed = given
    file, count = folder / "text.yml", 0
    for content in around(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), seed):
        file.write_bytes(content)
        answers(TRLConfig.load_yaml, file, plugins=False)
        count += 1
    return count


# Data files.

OPTIONS = ("data.prompts", "data.eval_prompts", "data.samples", "data.rewards", "data.preferences")
columns = st.sampled_from(["prompt", "output", "chosen", "rejected", "reward", "margin", "messages", "samples", "role"])
cells = trees | st.just([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
rows = st.lists(
    trees | st.dictionaries(columns, cells, max_size=4) | st.lists(st.text(max_size=4), max_size=3), max_size=4
)


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """An option, a suffix, and what is in the file: rows, spoiled rows, or any bytes."""
    option, suffix = draw(st.sampled_from(OPTIONS)), draw(st.sampled_from(sorted(READERS)))
    drawn = draw(rows)
    if suffix == ".jsonl":
        text = "\n".join(json.dumps(row) for row in drawn)
    elif suffix == ".json":
        text = json.dumps(drawn)
    elif suffix in (".csv", ".tsv"):
        between = "," if suffix == ".csv" else "\t"
        text = "\n".join(between.join(draw(st.lists(columns | st.text(max_size=5), max_size=3))) for _ in range(3))
    else:
        text = "\n".join(map(str, drawn))
    content = parquet() if suffix == ".parquet" else text.encode("utf-8", "surrogatepass")
    return option, suffix, draw(st.just(content) | spoiled(content) | st.binary(max_size=40))


@cache
def parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet as files

    sink = pyarrow.BufferOutputStream()
    files.write_table(pyarrow.table({"prompt": ["a", "b"], "reward": [1.0, None]}), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@case("data file", st.tuples(data_files(), seeds))
def _data_file(folder: Path, given: tuple[tuple[str, str, bytes], int]) -> int:
    """Files with rows of any kind, damaged files, and bytes that are no file of their suffix."""
    (option, suffix, whole), seed = given
    file, count = folder / f"data{suffix}", 0
    for content in around(whole, seed):
        file.write_bytes(content)
        found = answers(load_rows, str(file), option)
        assert found is None or (isinstance(found, list) and found)
        count += 1
    return count


# Checkpoints.

STATE = {
    "step": 3,
    "big": 2**70,
    "nan": float("nan"),
    "text": "\ud800",
    "pair": (1, [2.5, None]),
    "counts": {1: 2, "!": True},
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bits": torch.zeros(4, dtype=torch.float8_e5m2),
    "array": np.arange(4, dtype=np.int16).reshape(2, 2),
    "scalar": np.float64(0.5),
}


@cache
def saved(folder: Path) -> dict[str, bytes]:
    place = folder / "saved"
    place.mkdir(exist_ok=True)
    save_tree(STATE, place / "item")
    seal_folder(place)
    return {file.name: file.read_bytes() for file in place.iterdir()}


def changed(node: Any, draw: st.DrawFn) -> Any:
    """Replace one value, drawn at random, somewhere in JSON."""
    if isinstance(node, dict | list) and node and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        node[key] = changed(node[key], draw)
        return node
    parts: list[dict[str, Any]] = [
        {},
        {"hex": "zz", "bits": "00", "utf8": "0", "items": 3, "name": "0", "dtype": "S0", "shape": [-1, -1]},
        {"hex": "-0x1", "bits": "0" * 18, "utf8": "ff", "items": [[[], 1]], "name": [], "dtype": "f,,", "shape": 2},
    ]
    tags = ("int", "float", "str", "tuple", "tensor", "numpy", "dict", "Counter", "x")
    nodes = [{"!": tag, **part} for tag in tags for part in parts]
    dtypes = st.sampled_from(
        ["float8_e5m2", "uint4", "O", "V8", "M8[Y]", "i3", ",", "nn", "(2,)i4", "{", "S99999999999"]
    )
    return draw(trees | dtypes | st.sampled_from(nodes))


@case("checkpoint", st.tuples(st.sampled_from(["item.json", MANIFEST, "item.safetensors"]), st.data(), seeds))
def _checkpoint(folder: Path, given: tuple[str, Any, int]) -> int:
    """A manifest, an index of tensors, or tensors that were changed; those of the index in a folder that verifies."""
    name, data, seed = given
    files = dict(saved(folder))
    text = files[name]
    if name.endswith(".json") and data.draw(st.booleans()):
        text = json.dumps(changed(json.loads(text), data.draw)).encode()
    else:
        text = data.draw(spoiled(text))
    place = folder / "run" / "checkpoint_1"
    place.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (place / file).write_bytes(content)
    count = 0
    for content in around(text, seed):
        (place / name).write_bytes(content)
        if not count:  # it verifies as well
            answers(CheckpointStore(place.parent).resolve, "auto")
        answers(verify_folder, place)
        answers(load_tree, place / "item")
        count += 1
    return count


# Chat templates.

FRAGMENTS = r"""
{% for message in messages %}
{% endfor %}
{{ message.content }}
{{ message['role'] }}
{{ eos_token }}
{% if add_generation_prompt %}
{% endif %}
{% generation %}
{% endgeneration %}
{{ messages[0].content }}
{{ 1 / 0 }}
{{ raise_exception('no') }}
{{ messages[9].content }}
{{ message.content.encode('x') }}
{{ messages | tojson }}
{{ message.content % 1 }}
{{ 'a' * 9 }}
{{ tools[0] }}
{% break %}
{{ [].pop() }}
{{ range(10 ** 9) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ strftime_now('%') }}
{{ {}['a'] }}
{{ message.content | int(base=99) }}
{{ ''.format(*messages) }}
{{ '{0.a}'.format(1) }}
{%
}}
{#
ab
{{ messages.__class__ }}
{{ messages | map(attribute='content') | sum }}
{{ 10 ** 400 * 1.0 }}
{{ '%c' % -1 }}
""".strip().split("\n")
fragments = st.sampled_from(FRAGMENTS)
roles = st.sampled_from(["system", "user", "assistant", "tool", ""])
contents: st.SearchStrategy[Any] = st.text(max_size=4) | st.sampled_from(
    ["a b", "</s>", None, [{"type": "text", "text": "a"}], 3, {}]
)
talk = st.just([{"role": "user", "content": "a"}]) | st.just(
    [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
)
messages = talk | st.lists(
    st.fixed_dictionaries({"role": roles, "content": contents})
    | st.dictionaries(st.sampled_from(["role", "x"]), scalars),
    max_size=4,
)


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


TALKS: list[list[Any]] = [
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
    [{"role": "system", "content": ""}, {"role": "tool", "content": None}],
    [{"role": "user"}, {"content": [{"type": "text", "text": "a"}]}],
    [],
]
templates = st.lists(fragments | st.text(max_size=3), max_size=6)


@case("chat template", st.tuples(templates, messages, messages, seeds))
def _chat_template(folder: Path, given: tuple[list[str], list[Any], list[Any], int]) -> int:
    """Templates of any parts with conversations of any kind; a template is compiled once for all conversations."""
    parts, before, after, seed = given
    chance = random.Random(seed)
    others = [[*parts, chance.choice(FRAGMENTS)], chance.choices(FRAGMENTS, k=chance.randint(1, 5))]
    count = 0
    for template in map("".join, (parts, *others)):
        options = {"chat_template": template, "place": "here"}
        for talk in (before, *TALKS):
            answers(encode_prompt, talk, tokenizer(), **options)
            answers(encode_answer, talk, after, tokenizer(), **options)
            answers(encode_chat, [*talk, *after], tokenizer(), **options)
            count += 1
    return count
