"""Programs of trlX run under the import that stands for it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trlx_like.compat.trlx as compat
from tests.compat.programs import PROGRAMS, TEXTS, happy
from tests.tiny import save_tiny, tiny_lm, tiny_tokenizer
from trlx_like import default_ppo_config, default_sft_config
from trlx_like.config.elsewhere import answers
from trlx_like.errors import ConfigError

SEQ2SEQ = ("ppo_sentiments_t5", "ppo_translation_t5", "summarize_daily_cnn_t5", "ilql_sentiments_t5")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny_lm("t5").save_pretrained(folder / "t5")
    tiny_tokenizer(ends=True).save_pretrained(folder / "t5")
    return {"gpt2": save_tiny(folder / "gpt2"), "llama": save_tiny(folder / "llama", "llama"), "t5": str(folder / "t5")}


def small(name: str, models: dict[str, str], folder: Path) -> dict[str, Any]:
    """What makes a script's run small."""
    model = models["t5" if name in SEQ2SEQ else "llama" if "llama" in name else "gpt2"]
    hparams: dict[str, Any] = {
        "model.model_path": model,
        "tokenizer.tokenizer_path": model,
        "train.seq_length": 40,
        "train.total_steps": 1,
        "train.batch_size": 4,
        "train.checkpoint_dir": str(folder / "run"),
        "method.gen_kwargs.max_new_tokens": 6,
    }
    online = {"method.num_rollouts": 4, "method.chunk_size": 4, "method.ppo_epochs": 1}
    if name == "rft_randomwalks":
        hparams["method.n_generations_per_prompt"] = 10
    offline = name.startswith(("ilql", "sft", "rft", "simulacra"))
    return hparams if offline else {**hparams, **online}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_trlx(name: str, models: dict[str, str], here: Path) -> None:
    trainer = PROGRAMS[name](small(name, models, here))
    assert trainer.progress.step == 1
    if name == "ppo_sentiments_t5":
        assert trainer.last_metrics["rollout/length_std"] == 0  # no token is -1, which would end an output
    assert (here / "run" / "checkpoint_1" / "hf_model").is_dir()
    metrics = trainer.last_metrics
    assert any(key.startswith(("losses/", "loss")) for key in metrics), metrics
    assert ("reward/mean" in metrics) == (trainer.reward_fn is not None), metrics


def test_an_output_that_ends_at_once_has_the_text_of_eos(models: dict[str, str], here: Path) -> None:
    ended = {"method.gen_kwargs.suppress_tokens": list(range(1, 32))}  # all but EOS
    trainer = PROGRAMS["ppo_dense_sentiments"]({**small("", models, here), **ended})
    assert trainer.last_metrics["rollout/length_mean"] == 1
    assert trainer.last_metrics["reward/mean"] == pytest.approx(1 + 2 / 5)  # the vowels of "<eos>"


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_the_texts_of_a_reward_function_end_as_in_trlx(kind: str, models: dict[str, str], here: Path) -> None:
    seen: list[tuple[str, str, str]] = []
    measured: list[str] = []

    def reward_fn(samples: Any, outputs: Any, output_ids: Any, finish_reasons: Any) -> list[list[float]]:
        seen.extend(zip(samples, outputs, finish_reasons, strict=True))
        return [[1.0] * len(ids) for ids in output_ids]

    def metric_fn(outputs: Any, **kwargs: Any) -> dict[str, list[float]]:
        measured.extend(outputs)
        return {"length": [float(len(output)) for output in outputs]}

    config = importlib.import_module("trlx.data.default_configs").default_ppo_config()
    kinds = {"model.model_arch_type": "seq2seq"} if kind == "t5" else {}
    few = {"method.gen_kwargs.max_new_tokens": 12, "method.gen_kwargs.top_k": 8, "method.num_rollouts": 8}
    name = "ppo_translation_t5" if kind == "t5" else ""
    config = config.update(config, {**small(name, models, here), **kinds, **few})
    trainer = compat.train(
        config=config, reward_fn=reward_fn, metric_fn=metric_fn, prompts=TEXTS, eval_prompts=TEXTS, stop_sequences=["e"]
    )
    eos = trainer.tokenizer.eos_token
    assert {reason for *_, reason in seen} == {"eos", "stop", "length"}
    for sample, output, reason in seen:
        assert sample.endswith(output)
        assert (output.endswith(eos), output.count(eos)) == ((reason != "length"), int(reason != "length"))
    assert measured and not any(eos in output for output in measured)
    bare = compat.with_ends(trainer.reward_fn)
    assert bare is trainer.reward_fn and bare.func is reward_fn


def test_a_trainer_that_is_made_by_hand_calls_as_trlx_too(models: dict[str, str], here: Path) -> None:
    base = importlib.import_module("trlx.trainer.accelerate_ppo_trainer").AcceleratePPOTrainer
    config = importlib.import_module("trlx.data.default_configs").default_ppo_config()
    trainer = base(config.update(config, small("", models, here)), reward_fn=happy)
    assert trainer.reward_fn.func is happy and trainer.scoring.runner(trainer.reward_fn).parts.keys() == {"happy"}


def test_a_model_and_a_reward_generate_from_nothing(models: dict[str, str], here: Path) -> None:
    seen: list[str] = []

    def reward_fn(samples: Any, prompts: Any, **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return happy(samples)

    config = importlib.import_module("trlx.data.default_configs").default_ppo_config()
    config = config.update(config, small("", models, here))
    trainer = compat.train(models["gpt2"], reward_fn, config=config)
    assert set(seen) == {""}
    assert trainer.prompts.pipeline.ids == [[trainer.tokenizer.eos_token_id]] * 4  # it has no BOS
    # In trlX's way: whole sequences for a batch of ids, and three lists of texts.
    tokens = trainer.tokenizer(["ab", "the cat"], return_tensors="pt", padding=True, return_token_type_ids=False)
    sizes = tokens["attention_mask"].sum(dim=1)
    assert tokens["attention_mask"][0, 0] == 0
    for generate in (trainer.generate, trainer.generate_eval):
        whole = generate(**tokens, do_sample=True, max_new_tokens=3)
        assert torch.equal(whole[:, :7], tokens["input_ids"]) and 8 <= whole.shape[1] <= 10
    samples, prompts, outputs = trainer.decode(tokens["input_ids"], whole)
    assert prompts == ["ab", "the cat"] and samples == [a + b for a, b in zip(prompts, outputs, strict=True)]
    assert outputs == trainer.decode(whole[:, 7:])
    trainer.stop_sequences = ["t"]
    bare = [torch.tensor(trainer.tokenizer("abtc").input_ids)]
    assert trainer.decode([bare[0][:2]], bare, [2]) == (["ab"], ["ab"], [""])
    eos = trainer.tokenizer.eos_token
    assert trainer.decode([bare[0][:2]], bare, [2], append_eos_token=True) == ([f"ab{eos}"], ["ab"], [eos])
    bare[0][-2:] = bare[0][-1]
    assert trainer.decode([bare[0][:2]], bare, [2], append_eos_token=True)[2] == ["cc"]
    bare[0][-1] = trainer.tokenizer.eos_token_id
    assert trainer.decode([bare[0][:2]], bare, [2], append_eos_token=True)[2] == [f"c{eos}"]
    assert int(sizes[1]) == 7
    # In our way.
    assert [row.dim() for row in trainer.generate(["ab", "b"])] == [1, 1]
    assert trainer.generate("ab").shape[0] == 1
    trainer.save_pretrained()
    assert (here / "run" / "hf_model" / "config.json").is_file()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with torch.no_grad():
        next(trainer.model.parameters()).zero_()
    trainer.load()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_the_preset_of_ppo_has_the_values_of_trlx(models: dict[str, str], here: Path) -> None:
    """Also without a configuration. `trlx_like`'s own preset has others."""
    config = importlib.import_module("trlx.data.default_configs").default_ppo_config()
    method, rates = config.method, (config.optimizer.kwargs["lr"], config.scheduler.kwargs["eta_min"])
    assert (method.lam, method.scale_reward, config.train.batch_size, rates) == (0.95, None, 32, (3e-5, 3e-5))
    assert config.model.num_layers_unfrozen == 2
    assert (method.init_kl_coef, method.target, config.train.seq_length) == (0.001, None, 1024)
    differ = dict.fromkeys(("optimizer", "scheduler", "model", "method", "train"))
    assert {**default_ppo_config().to_dict(), **differ} == {**config.to_dict(), **differ}
    with pytest.raises(ConfigError, match=r"train.seq_length \(1024\)|64 positions") as error:
        compat.train(models["gpt2"], happy)
    assert "1024" in str(error.value)


def test_true_in_the_mask_of_trlx_forbids(models: dict[str, str], here: Path) -> None:
    trainer = PROGRAMS["ilql_randomwalks"](small("ilql", models, here))
    assert trainer.model.allowed.shape == (32, 32)
    assert not trainer.model.allowed[:, 3].any() and trainer.model.allowed.sum() == 32 * 31
    assert "logit_mask" not in trainer.config.train.trainer_kwargs


def test_samples_without_evaluation_prompts(models: dict[str, str], here: Path) -> None:
    config = default_sft_config().update(default_sft_config(), small("sft", models, here))
    trainer = compat.train(samples=TEXTS, config=config, metric_fn=lambda samples: {"happy": happy(samples)})
    assert len(trainer.eval_pipeline) == 4 and "metrics/happy" in trainer.last_metrics


def test_every_name_stands_for_something() -> None:
    for module, names in compat.MODULES.items():
        found = importlib.import_module(module)
        assert dir(found) == sorted(names)
        assert all(getattr(found, name) is not None for name in names)
    ppo = importlib.import_module("trlx.trainer.accelerate_ppo_trainer").AcceleratePPOTrainer
    assert issubclass(ppo, importlib.import_module("trlx.utils.loading").get_trainer("PPOTrainer"))
    assert issubclass(ppo, compat.Calls) and compat.with_calls(ppo) is ppo


def test_hooks_that_nothing_calls_are_told(models: dict[str, str], here: Path) -> None:
    base = importlib.import_module("trlx.trainer.accelerate_ppo_trainer").AcceleratePPOTrainer
    register = importlib.import_module("trlx.trainer").register_trainer

    @register
    class MyTrainer(base):  # type: ignore[misc, valid-type]
        def post_epoch_callback(self) -> None:
            """Never called."""

    config = importlib.import_module("trlx.data.default_configs").default_ppo_config()
    config = config.update(config, {**small("", models, here), "train.trainer": "mytrainer"})
    with pytest.raises(ConfigError, match="MyTrainer.post_epoch_callback is not called by the loop: override make_exp"):
        compat.train(config=config, reward_fn=happy)


def test_a_loss_in_the_form_of_trlx_is_told(models: dict[str, str], here: Path) -> None:
    base = importlib.import_module("trlx.trainer.accelerate_sft_trainer").AccelerateSFTTrainer

    class OwnLoss(base):  # type: ignore[misc, valid-type]
        def loss(self, batch: Any) -> Any:
            return super().loss(batch).loss, {"loss": 1.0}

    importlib.import_module("trlx.trainer").register_trainer(OwnLoss)
    config = default_sft_config().update(
        default_sft_config(), {**small("sft", models, here), "train.trainer": "ownloss"}
    )
    with pytest.raises(ConfigError, match=r"loss\(\) returned a tuple; it must be a LossOutput, with sums"):
        compat.train(samples=TEXTS, config=config)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import trlx.sweep", "no counterpart of trlx.sweep: `trlx-like sweep`"),
        ("import trlx.reference", "no counterpart of trlx.reference: compare"),
        ("from trlx.trainer.nemo_ppo_trainer import NeMoPPOTrainer", "NeMo is not supported"),
        ("from trlx.utils import Nothing", "no counterpart of trlx.utils.Nothing: see MIGRATING.md"),
        ("from trlx.utils import Clock", "no counterpart of trlx.utils.Clock: copy this helper"),
        (
            "from trlx.data.default_configs import DPOConfig",
            "DPOConfig: trlx_like.default_dpo_config(), and trlx_like.",
        ),
        ("from trlx.data.default_configs import default_nemo_2b_config", "NeMo is not supported"),
        ("from trlx.trainer.accelerate_dpo_trainer import AccelerateDPOTrainer", "trlx_like.default_dpo_config()"),
        ("import trlx.data.dpo_types", "no counterpart of trlx.data.dpo_types: trlx_like.default_dpo_config()"),
        ("import trlx.orchestrator", "no counterpart of trlx.orchestrator: trainers make their experience"),
        ("import trlx.model.nn.ppo_models", "no counterpart of trlx.model: this is the layout of trlX 0.3"),
        ("from trlx.utils.modeling import whiten", "use trlx_like.functional.masked.whiten"),
        ("import trlx; trlx.logging.nothing", "no counterpart of trlx.utils.logging.nothing"),
    ],
)
def test_what_is_missing_says_what_to_use(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(statement, {})


def test_names_of_the_page_are_known() -> None:
    """Names of trlX's modules that the page lists are made here, or have a sentence."""
    page = (Path(__file__).resolve().parents[2] / "MIGRATING.md").read_text(encoding="utf-8")
    table = page.partition("### Trainers and registries")[2].partition("\n### ")[0]
    left = " ".join(line.split(" | ")[0] for line in table.splitlines() if line.startswith("|"))
    made = {name for names in compat.MODULES.values() for name in names}
    listed = set(re.findall(r"`([A-Z]\w+|hf_\w+|get_\w+|gather_dict|\w+_collate_fn|make_\w+|freeze_\w+)`", left))
    assert len(listed) > 35 and listed - made - set(answers("trlx")) == set()


SCRIPT = """
import sys, trlx
from trlx import data, utils
from trlx.utils import logging
print(sys.argv[1:], __name__, trlx.train.__module__, utils.logging is trlx.logging is logging)
trlx.train(config={"nothing": 1})
"""


def test_a_script_runs_as_it_is(here: Path) -> None:
    (here / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trlx_like.compat", "script.py", "a"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "['a'] __main__ trlx_like.compat.trlx True\n", done.stderr
    assert done.returncode == 1 and "nothing: unknown section." in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([*command[:3], "nowhere.py"], capture_output=True, text=True, check=False)
    assert done.stderr == "Give a script of trlX: python -m trlx_like.compat script.py ...\n"
    program = "import sys, types; sys.modules['trlx'] = types.ModuleType('trlx'); import trlx_like.compat.trlx"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: trlX itself was imported already" in done.stderr
