"""What trlX's public example scripts do, in our own words and in small: each function is a script's `main`.

`hparams` makes the model and the run small, and is applied as trlX's scripts apply theirs. Rewards are rules on letters
where the scripts have classifiers.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from examples.randomwalks.task import RandomWalks

VOWELS = set("aeiou")
TEXTS = ["a good film", "a bad plot", "the cat sat", "dull and long", "odd", "i like it a lot", "no", "yes please"]


def happy(texts: Any) -> list[float]:
    """Stand for a sentiment classifier: the share of vowels."""
    return [sum(letter in VOWELS for letter in text) / max(len(text), 1) for text in texts]


def walk_metrics(task: RandomWalks, samples: Any) -> dict[str, list[float]]:
    """Measure walks by their length, 100 if they fail, and by how short they are."""
    walks = [sample.removesuffix("<eos>") for sample in samples]
    return {"lengths": [float(task.length(walk) or 100) for walk in walks], "optimality": task.optimality(walks)}


def ppo_sentiments(hparams: Any) -> Any:
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)

    def reward_fn(samples: Any, **kwargs: Any) -> list[float]:
        return happy(samples)

    return trlx.train(reward_fn=reward_fn, prompts=TEXTS, eval_prompts=["a"] * 4, config=config)


def ppo_dense_sentiments(hparams: Any) -> Any:
    """A reward for each token of the output: how the score of the text up to it changes, and 1 more at its end."""
    import torch
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    def reward_fn(samples: Any, prompts: Any, outputs: Any, tokenizer: Any, **kwargs: Any) -> Any:
        dense = []
        for output in outputs:
            ids = tokenizer(output).input_ids
            so_far = happy([tokenizer.decode(ids[: end + 1]) for end in range(len(ids))])
            scores = torch.tensor([0.0, *so_far]).diff()
            scores[-1] += 1.0
            dense.append(scores)
        return dense

    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    return trlx.train(reward_fn=reward_fn, prompts=TEXTS, eval_prompts=["a"] * 4, config=config)


def ppo_sentiments_peft(hparams: Any) -> Any:
    import trlx
    from peft import LoraConfig
    from peft.utils.peft_types import TaskType
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    config.model.peft_config = LoraConfig(r=2, task_type=TaskType.CAUSAL_LM, lora_alpha=4, lora_dropout=0.1)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: happy(samples), prompts=TEXTS, eval_prompts=["a"] * 4, config=config
    )


def ppo_sentiments_llama(hparams: Any) -> Any:
    """Every section is written out."""
    import trlx
    from trlx.data.configs import (
        ModelConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainConfig,
        TRLConfig,
    )
    from trlx.models.modeling_ppo import PPOConfig

    config = TRLConfig(
        train=TrainConfig(
            seq_length=1024,
            epochs=100,
            total_steps=400,
            batch_size=32,
            checkpoint_interval=10000,
            eval_interval=100,
            pipeline="PromptPipeline",
            trainer="AcceleratePPOTrainer",
            save_best=False,
        ),
        model=ModelConfig(model_path="a-llama", num_layers_unfrozen=2),
        tokenizer=TokenizerConfig(tokenizer_path="a-llama", truncation_side="right"),
        optimizer=OptimizerConfig(name="adamw", kwargs={"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1.0e-8}),
        scheduler=SchedulerConfig(name="cosine_annealing", kwargs={"T_max": 10000, "eta_min": 1.0e-5}),
        method=PPOConfig(
            name="PPOConfig",
            num_rollouts=128,
            chunk_size=128,
            ppo_epochs=4,
            init_kl_coef=0.001,
            target=6,
            horizon=10000,
            gamma=1,
            lam=0.95,
            cliprange=0.2,
            cliprange_value=0.2,
            vf_coef=1,
            scale_reward="ignored",
            ref_mean=None,
            ref_std=None,
            cliprange_reward=10,
            gen_kwargs={"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True},
        ),
    )
    config = TRLConfig.update(config.to_dict(), hparams)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: happy(samples), prompts=TEXTS, eval_prompts=["a"] * 4, config=config
    )


def ppo_sentiments_t5(hparams: Any) -> Any:
    """Every section of an encoder-decoder is written out; outputs have a fixed length, as no token is an end."""
    import trlx
    from trlx.data.configs import (
        ModelConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainConfig,
        TRLConfig,
    )
    from trlx.models.modeling_ppo import PPOConfig

    config = TRLConfig(
        train=TrainConfig(
            seq_length=128,
            epochs=100,
            total_steps=100000,
            batch_size=12,
            checkpoint_interval=10000,
            eval_interval=100,
            pipeline="PromptPipeline",
            trainer="AcceleratePPOTrainer",
            save_best=False,
        ),
        model=ModelConfig(model_path="a-t5", num_layers_unfrozen=-1, model_arch_type="seq2seq"),
        tokenizer=TokenizerConfig(tokenizer_path="a-t5", padding_side="right", truncation_side="right"),
        optimizer=OptimizerConfig(
            name="adamw", kwargs={"lr": 5.0e-5, "betas": [0.9, 0.999], "eps": 1.0e-8, "weight_decay": 1.0e-6}
        ),
        scheduler=SchedulerConfig(name="cosine_annealing", kwargs={"T_max": 100000, "eta_min": 5.0e-5}),
        method=PPOConfig(
            name="PPOConfig",
            num_rollouts=128,
            chunk_size=12,
            ppo_epochs=4,
            init_kl_coef=0.05,
            target=6,
            horizon=10000,
            gamma=0.99,
            lam=0.95,
            cliprange=0.2,
            cliprange_value=0.2,
            vf_coef=1,
            scale_reward=None,
            ref_mean=None,
            ref_std=None,
            cliprange_reward=10,
            gen_kwargs={"max_new_tokens": 50, "do_sample": True, "top_k": 0, "top_p": 1, "eos_token_id": -1},
        ),
    )
    config = TRLConfig.update(config.to_dict(), hparams)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: happy(samples),
        metric_fn=lambda samples, **kwargs: {"sentiments": happy(samples)},
        prompts=[f"{text} sentiment" for text in TEXTS],
        eval_prompts=[f"{text} sentiment" for text in TEXTS[:4]],
        config=config,
    )


def ppo_translation_t5(hparams: Any) -> Any:
    """An encoder-decoder; what is right is looked up by the prompt, and metrics are computed beside the reward."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    right = {f"translate {text}": text[::-1] for text in TEXTS}
    changes = {
        "model.model_arch_type": "seq2seq",
        "tokenizer.padding_side": "right",
        "method.scale_reward": None,
        "method.gen_experience_kwargs": {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0},
    }
    config = TRLConfig.update(default_ppo_config().to_dict(), {**changes, **hparams})

    def metric_fn(samples: Any, prompts: Any, outputs: Any, **kwargs: Any) -> dict[str, list[float]]:
        shared = [len({*out} & {*right[prompt.strip()]}) for prompt, out in zip(prompts, outputs, strict=True)]
        return {"letters": [float(count) for count in shared]}

    def reward_fn(samples: Any, prompts: Any, outputs: Any, **kwargs: Any) -> list[float]:
        return metric_fn(samples, prompts, outputs)["letters"]

    return trlx.train(
        reward_fn=reward_fn, metric_fn=metric_fn, prompts=[*right], eval_prompts=[*right][:4], config=config
    )


def summarize_daily_cnn_t5(hparams: Any) -> Any:
    """The summary that people wrote comes with each prompt. Rollouts are drawn with a cut of the distribution."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    changes = {
        "model.model_arch_type": "seq2seq",
        "method.gen_experience_kwargs": {"max_new_tokens": 6, "do_sample": True, "top_k": 10, "top_p": 0.95},
    }
    config = TRLConfig.update(default_ppo_config().to_dict(), {**changes, **hparams})

    def reward_fn(samples: Any, prompts: Any, outputs: Any, original_summaries: Any, **kwargs: Any) -> list[float]:
        pairs = zip(outputs, original_summaries, strict=True)
        return [len({*out} & {*written}) / len({*written}) for out, written in pairs]

    prompts = [{"prompt": f"summarize {text}", "original_summaries": text[:4]} for text in TEXTS]
    return trlx.train(reward_fn=reward_fn, prompts=prompts, eval_prompts=prompts[:4], config=config)


def summarize_rlhf(hparams: Any) -> Any:
    """A reward model scores the summary, less the score of the one that a person wrote; outputs end at a stop word."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    summaries = {f"{text} tldr": text[:5] for text in TEXTS}

    def reward_fn(samples: Any, prompts: Any, outputs: Any, **kwargs: Any) -> Any:
        import torch

        written = [prompt + summaries[prompt] for prompt in prompts]
        return torch.tensor(happy(samples)) - torch.tensor(happy(written))

    return trlx.train(
        reward_fn=reward_fn,
        prompts=[*summaries],
        eval_prompts=[*summaries][:4],
        config=config,
        stop_sequences=["zz"],
    )


def ppo_hh(hparams: Any) -> Any:
    """Dialogues as prompts; the reward function counts in the tokenizer's own tokens."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    changes = {"train.minibatch_size": 2, "method.chunk_size": 4, "method.num_value_layers_unfrozen": 1}
    config = TRLConfig.update(default_ppo_config().to_dict(), {**changes, **hparams})
    prompts = [{"prompt": f"human {text} assistant", "original_output": text} for text in TEXTS]

    def reward_fn(samples: Any, prompts: Any, original_output: Any, **kwargs: Any) -> list[float]:
        given = happy(p + o for p, o in zip(prompts, original_output, strict=True))
        return [score - other for score, other in zip(happy(samples), given, strict=True)]

    return trlx.train(
        reward_fn=reward_fn, prompts=prompts, eval_prompts=prompts[:4], config=config, stop_sequences=["human", "assi"]
    )


def grounded_program_synthesis(hparams: Any) -> Any:
    """Write a program that makes an output of an input. An interpreter runs it: right 1, wrong 0, no program -1."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    commands: dict[str, Any] = {"r": lambda x: x[::-1], "s": sorted, "t": lambda x: x[:2], "d": lambda x: x[1:]}

    def run(program: str, given: str) -> str | None:
        letters = [*given]
        for command in program.split("<eos>")[0]:
            if command not in commands:
                return None
            letters = [*commands[command](letters)]
        return "".join(letters)

    def reward_fn(samples: Any, **kwargs: Any) -> list[float]:
        scores = []
        for sample in samples:
            given, right = sample.removeprefix("input ").split(" function ")[0].split(" output ")
            made = run(sample.split(" function ")[1], given)
            scores.append(-1.0 if made is None else float(made == right))
        return scores

    words, programs = ["cab", "plum", "fig", "date"], ["r", "s", "t", "rs", "dr"]
    prompts = [f"input {word} output {run(program, word)} function " for word in words for program in programs]
    changes = {"train.save_best": False, "method.gen_kwargs": {"max_new_tokens": 8, "do_sample": True, "top_p": 0.95}}
    config = TRLConfig.update(default_ppo_config().to_dict(), {**changes, **hparams})
    trainer = trlx.train(reward_fn=reward_fn, prompts=prompts[:16], eval_prompts=prompts[16:], config=config)
    trainer.save_pretrained()
    return trainer


def architext(hparams: Any) -> Any:
    """An analytic reward, prompts in the script, and no evaluation prompts."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    return trlx.train(
        config.model.model_path,
        reward_fn=lambda samples, **kwargs: [float(sample.count(".")) for sample in samples],
        prompts=[f"a house with {text} layout" for text in TEXTS[:4]],
        config=config,
    )


def ilql_sentiments(hparams: Any) -> Any:
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ilql_config

    config = TRLConfig.update(default_ilql_config().to_dict(), {"train.batch_size": 4, **hparams})

    def metric_fn(samples: Any, **kwargs: Any) -> dict[str, list[float]]:
        return {"sentiments": happy(samples)}

    return trlx.train(
        samples=TEXTS,
        rewards=[1.0, 0.0] * 4,
        eval_prompts=["a", "i"] * 2,
        metric_fn=metric_fn,
        config=config,
    )


def ilql_sentiments_t5(hparams: Any) -> Any:
    """Plain texts for an encoder-decoder, which begin from nothing; decoding with several weights of the advantage."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ilql_config

    changes = {
        "model.model_arch_type": "seq2seq",
        "train.batch_size": 4,
        "method.gen_kwargs": {"max_new_tokens": 6, "top_k": 20, "beta": [0, 1], "temperature": 1.0},
    }
    config = TRLConfig.update(default_ilql_config().to_dict(), {**changes, **hparams})
    return trlx.train(
        samples=TEXTS,
        rewards=happy(TEXTS),
        eval_prompts=["a"] * 4,
        metric_fn=lambda samples, **kwargs: {"sentiments": happy(samples)},
        config=config,
    )


def ilql_hh(hparams: Any) -> Any:
    """Dialogues of several turns as samples."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ilql_config

    config = TRLConfig.update(default_ilql_config().to_dict(), {"train.batch_size": 4, **hparams})
    chosen = [[f"q {text}", text[:4]] for text in TEXTS]
    rejected = [[f"q {text}", text[-4:], "and", "no"] for text in TEXTS]
    return trlx.train(
        samples=chosen + rejected,
        rewards=[1.0] * len(chosen) + [-1.0] * len(rejected),
        eval_prompts=[{"prompt": text, "original_output": text} for text in TEXTS[:4]],
        metric_fn=lambda samples, original_output, **kwargs: {"score": happy(samples)},
        config=config,
        stop_sequences=["q"],
    )


def simulacra(hparams: Any) -> Any:
    """Prompts of pictures with ratings: the samples in the older form `dataset`."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ilql_config

    config = TRLConfig.update(default_ilql_config().to_dict(), {"train.batch_size": 4, **hparams})
    return trlx.train(dataset=(TEXTS, [1, 5, 3, 2, 4, 9, 7, 8]), eval_prompts=["an owl"] * 4, config=config)


def sft_sentiments(hparams: Any) -> Any:
    import trlx
    from trlx.data.default_configs import TRLConfig, default_sft_config

    config = TRLConfig.update(default_sft_config().to_dict(), hparams)
    return trlx.train(
        samples=TEXTS,
        eval_prompts=["a"] * 4,
        metric_fn=lambda samples, **kwargs: {"sentiments": happy(samples)},
        config=config,
    )


def sft_hh(hparams: Any) -> Any:
    """Dialogues as one text each. The metric is the reward less that of the answer that people preferred."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_sft_config

    config = default_sft_config().evolve(method={"gen_kwargs": {"max_new_tokens": 6, "top_k": 20, "do_sample": True}})
    config = TRLConfig.update(config.to_dict(), {"train.batch_size": 4, **hparams})
    asked = [f"human {text} assistant" for text in TEXTS]

    def reward_fn(samples: Any, prompts: Any, original_output: Any, **kwargs: Any) -> list[float]:
        given = happy(p + o for p, o in zip(prompts, original_output, strict=True))
        return [score - other for score, other in zip(happy(samples), given, strict=True)]

    return trlx.train(
        samples=[prompt + text for prompt, text in zip(asked, TEXTS, strict=True)],
        eval_prompts=[{"prompt": p, "original_output": text} for p, text in zip(asked[:4], TEXTS, strict=False)],
        metric_fn=lambda **kwargs: {"reward": reward_fn(**kwargs)},
        config=config,
        stop_sequences=["human", "assistant"],
    )


def sft_alpaca(hparams: Any) -> Any:
    """Instructions and answers, with the method's section written out and an export at the end."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_sft_config
    from trlx.trainer.accelerate_sft_trainer import SFTConfig

    config = default_sft_config().evolve(train={"save_best": False})
    config = config.evolve(method=SFTConfig(name="sftconfig", gen_kwargs={"max_new_tokens": 6}).to_dict())
    config = TRLConfig.update(config.to_dict(), hparams)
    trainer = trlx.train(
        samples=[(f"do {text}", text[::-1]) for text in TEXTS],
        eval_prompts=["do it"] * 4,
        metric_fn=lambda samples, prompts, outputs: {"length": [float(len(output)) for output in outputs]},
        config=config,
    )
    trainer.save_pretrained()
    return trainer


def rft_sentiments(hparams: Any) -> Any:
    import trlx
    from trlx.data.configs import TRLConfig
    from trlx.data.default_configs import default_sft_config
    from trlx.trainer.accelerate_rft_trainer import RFTConfig

    method = RFTConfig(
        name="RFTConfig",
        n_generations_per_prompt=4,
        start_percentile=0.5,
        end_percentile=0.9,
        n_improve_steps=1,
        gen_kwargs={"max_new_tokens": 6, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "do_sample": True},
    )
    values = default_sft_config().to_dict()
    config = TRLConfig.from_dict({**values, "method": method.to_dict()})
    config.train.trainer = "AccelerateRFTTrainer"
    config = TRLConfig.update(config.to_dict(), hparams)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: happy(samples), prompts=TEXTS, eval_prompts=["a"] * 4, config=config
    )


def ilql_randomwalks(hparams: Any) -> Any:
    """A model with random weights, walks as samples, and steps that no edge allows (True) in the trainer's keywords."""
    import torch
    import trlx
    from transformers import AutoConfig
    from trlx.data.default_configs import TRLConfig, default_ilql_config

    config = TRLConfig.update(default_ilql_config().to_dict(), {"train.batch_size": 4, **hparams})
    config.model.model_path = AutoConfig.from_pretrained(config.model.model_path)
    forbidden = torch.zeros(config.model.model_path.vocab_size, config.model.model_path.vocab_size).bool()
    forbidden[:, 3] = True
    config.train.trainer_kwargs = {"logit_mask": forbidden}
    walks = ["b.c.d", "c.d.b", "b.b.b", "d.c.b", "c.b.d", "d.d.b", "b.d.c", "c.c.d"]
    return trlx.train(
        samples=walks,
        rewards=[float(len(set(walk))) for walk in walks],
        eval_prompts=["b", "c"] * 2,
        metric_fn=lambda samples, **kwargs: {"length": [float(len(sample)) for sample in samples]},
        config=config,
    )


def ppo_randomwalks(hparams: Any) -> Any:
    """Shortest paths on a random graph. Each letter is a prompt, and the reward is one of the metrics."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    changes = {
        "train.seq_length": 10,
        "optimizer.kwargs.lr": 3.0e-4,
        "scheduler.kwargs.eta_min": 3.0e-4,
        "method.init_kl_coef": 0,
        "method.target": None,
        "method.vf_coef": 1.2,
        "method.scale_reward": "ignored",
        "method.cliprange_reward": 1,
    }
    config = TRLConfig.update(default_ppo_config().to_dict(), {**changes, **hparams})
    task = RandomWalks(config.train.seed)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: walk_metrics(task, samples)["optimality"],
        metric_fn=lambda samples, **kwargs: walk_metrics(task, samples),
        prompts=task.prompts,
        eval_prompts=task.prompts,
        config=config,
    )


def rft_randomwalks(hparams: Any) -> Any:
    """The same task, by fine-tuning on the best tenth of a hundred walks from each letter."""
    import trlx
    from trlx.data.configs import TRLConfig
    from trlx.data.default_configs import default_sft_config
    from trlx.trainer.accelerate_rft_trainer import RFTConfig

    method = RFTConfig(
        name="RFTConfig",
        n_generations_per_prompt=100,
        start_percentile=0.9,
        end_percentile=0.95,
        n_improve_steps=1,
        gen_kwargs={"max_new_tokens": 9, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "do_sample": True},
    )
    config = TRLConfig.from_dict({**default_sft_config().to_dict(), "method": method.to_dict()})
    config.train.trainer, config.train.seq_length = "AccelerateRFTTrainer", 10
    config = TRLConfig.update(config.to_dict(), hparams)
    task = RandomWalks(config.train.seed)
    return trlx.train(
        reward_fn=lambda samples, **kwargs: walk_metrics(task, samples)["optimality"],
        metric_fn=lambda samples, **kwargs: walk_metrics(task, samples),
        prompts=task.prompts,
        eval_prompts=task.prompts,
        config=config,
    )


def readme(hparams: Any) -> Any:
    """The first lines that everybody types: a model and a reward, and generation afterwards."""
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config

    trlx.logging.set_verbosity_warning()
    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    name = config.model.model_path
    trainer = trlx.train(name, reward_fn=lambda samples, **kwargs: [s.count("a") for s in samples], config=config)
    ids = trainer.tokenizer("who rules", return_tensors="pt", return_token_type_ids=False)
    trainer.generate(**ids, do_sample=True, max_new_tokens=4)
    return trainer


PROGRAMS = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", None) == __name__ and "hparams" in signature(value).parameters
}
