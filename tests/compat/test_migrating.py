"""MIGRATING.md, row by row: each left side works, or ends with the sentence that the right side promises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import trlx_like
from trlx_like import TRLConfig, default_dpo_config, default_sft_config
from trlx_like.config import METHODS
from trlx_like.config.elsewhere import answers
from trlx_like.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS, ELSEWHERE = answers("arguments"), answers("options")


class Row(NamedTuple):
    table: str
    theirs: str
    ours: str


def rows() -> list[Row]:
    """The rows of all tables of the page."""
    found, heading, header = [], "", ""
    lines = (ROOT / "MIGRATING.md").read_text(encoding="utf-8").splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        theirs, ours = (cell.strip() for cell in line.strip().strip("|").split(" | ", 1))
        if after.startswith("|") and set(after) <= set("|- "):
            header = theirs
        else:
            found.append(Row(f"{heading}: {header}", theirs, ours))
    return found


ROWS = rows()
SECTIONS = TRLConfig.sections()
SHARED = {name for kind in SECTIONS.values() for name in kind.model_fields}
METHOD = {
    "The old": "PPOConfig",
    "The later": "PPOConfig",
    "`Reward": "RewardConfig",
    "`SFT": "SFTConfig",
    "`DPO": "DPOConfig",
    "`OnlineDPO": "OnlineDPOConfig",
    "`GRPO": "GRPOConfig",
    "`DDPO": "DDPOConfig",
}
"""Beginning of a heading -> the method of its tables."""

OPTION = r"`([a-z_0-9]+)(?:=[^`]*|: [^`]*)?`"
KEYS = {"prompt", "chosen", "rejected", "margin", "text", "completion", "messages", "tools", "input_ids"}
KEYS |= {f"{part}_{side}" for part in ("input_ids", "attention_mask") for side in ("chosen", "rejected")}
KEYS |= {"prompt_ids", "chosen_ids", "rejected_ids"}
"""Keys of data, which `tests/unit/pipelines` reads."""
METRICS = {
    "accuracy",
    "min_reward",
    "mean_reward",
    "max_reward",
    "loss",
    "num_tokens",
    "entropy",
    "mean_token_accuracy",
}
CALLS = {"step", "judge", "push_to_hub"}


def is_options(row: Row) -> bool:
    """Whether a row of TRL lists options."""
    return row.table.endswith((": TRL", "Config` of TRL", "Config` of TRL 1.12", "(its last version, 0.23)"))


def options() -> dict[tuple[str, str], str]:
    """The options of TRL that the page names: (heading, name) -> what stands on the right, in all rows together."""
    found: dict[tuple[str, str], str] = {}
    for row in filter(is_options, ROWS):
        for name in re.findall(OPTION, row.theirs):
            if name not in KEYS | METRICS | CALLS:
                key = (row.table.rpartition(":")[0], name)
                found[key] = f"{found.get(key, '')} {row.ours} "
    return found


OPTIONS = options()
ARGUMENTS_HERE = set(inspect.signature(trlx_like.train).parameters)


@pytest.mark.parametrize(("heading", "name"), OPTIONS)
def test_options_of_trl(heading: str, name: str) -> None:
    """An option is one here too, or its error has the words of the right side."""
    ours = OPTIONS[heading, name]
    method = METHODS.get(next(kind for start, kind in METHOD.items() if heading.startswith(start)))
    fields = SHARED | set(method.model_fields)
    if name in fields:
        assert re.search(rf"same|\b{name}\b", ours), f"{name} is an option here, and the page does not say so"
        return
    words = ARGUMENTS.get(name)
    if words is None:
        with pytest.raises(ConfigError, match=rf"method.{name}: unknown key.") as error:
            method(**{name: None})
        words = str(error.value).partition("Here this is ")[2] or "not available"
    if words.startswith("not "):
        assert re.search(r" (no|not)\b", ours), f"{name}: {words!r}, and on the page: {ours!r}"
        return
    named = set(re.findall(r"[a-z_]+", words)) & (fields | ARGUMENTS_HERE)
    said = [word for word in named if re.search(rf"\b{word}\b", ours)]
    assert said or "the loss" in ours, f"{name}: {words!r}, and on the page: {ours!r}"


def test_every_value_of_an_option_that_the_page_denies_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_type"):
        default_sft_config().evolve(method={"loss_type": "dft"})
    for losses in (["sigmoid"], ["ipo"]):
        assert default_dpo_config().evolve(method={"loss_type": losses}).method.to_dict()["loss_type"] == losses


TRIED = {
    "file": "compat/test_migrate.py",
    "positional order": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "`model_path`, `reward_fn`": "compat/test_trlx.py::test_programs_of_trlx",
    "`config=` a": "unit/test_presets.py",
    "no `config`": "unit/test_presets.py",
    "`rewards`": "unit/pipelines/test_returns.py",
    "`dataset`": "unit/config/test_elsewhere.py::test_arguments_of_other_libraries",
    "no `prompts`": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "no `eval_prompts`": "compat/test_trlx.py::test_samples_without_evaluation_prompts",
    '`trainer_kwargs={"logit_mask"': "compat/test_trlx.py::test_true_in_the_mask_of_trlx_forbids",
    "returns the trainer": "compat/test_trlx.py::test_programs_of_trlx",
    "`reward_fn(samples, prompts": "unit/rewards/test_call.py::test_a_function_gets_what_it_names",
    "called on the main process": "distributed/test_two_processes.py",
    "`samples` and `outputs` end": "unit/trainers/test_online.py::test_what_a_reward_function_is_given",
    "outputs are cut at stop": "unit/trainers/test_online.py::test_what_a_reward_function_is_given",
    "rewards of tokens": "unit/rewards/test_call.py::test_lengths_are_checked_where_they_are_known",
    "NaN is trained on": "faults/test_reward_faults.py",
    "a reward function that hangs": "unit/rewards/test_limits.py",
    "`metric_fn(samples": "unit/rewards/test_call.py::test_what_a_metric_function_may_return",
    "prompts for causal models": "unit/pipelines/test_tokens.py",
    "sections `model`": "compat/test_trlx_yaml.py::test_a_complete_ppo_file",
    "an unknown key": "unit/config/test_trl.py::test_errors_of_sections",
    "`update`: ignores": "unit/config/test_trl.py::test_update_refuses_unknown_keys_at_any_depth",
    "`to_dict` returns": "unit/config/test_trl.py::test_changes_touch_only_the_copy_and_survive_the_file",
    "YAML 1.1": "compat/test_migrate.py::test_a_run_of_trlx",
    "`train.batch_size`: each": "distributed/test_two_processes.py::test_the_weights_are_those_of_one_process",
    "`train.minibatch_size`": "contract/test_gradients.py",
    "`train.tracker` defaults": "compat/test_migrate.py::test_a_run_of_trlx",
    "`train.project_name`": "compat/test_migrate.py::test_what_a_run_of_trlx_cannot_take_along",
    "`train.resume_from_checkpoint`": "compat/test_migrate.py::test_what_a_run_of_trlx_cannot_take_along",
    "`train.rollout_logging_dir`": "unit/trainers/test_ppo_experience.py::test_rollouts_are_written_once_a_round",
    "an engine of your own": "unit/samplers/test_engines.py",
    "`train.save_best` watches": "unit/trainers/test_best.py",
    "`method.num_rollouts`": "distributed/test_any_ranks.py",
    '`method.scale_reward: "ignored"`': "compat/test_trlx_yaml.py::test_a_complete_ppo_file",
    "`method.horizon`": "unit/trainers/test_ppo_experience.py::test_the_coefficient_follows_its_target",
    "`gen_kwargs` with": "compat/test_trlx.py::test_programs_of_trlx",
    "one list-valued key": "unit/trainers/test_evaluation.py::test_every_combination_of_the_swept_options",
    "the model's own `generation_config`": "unit/samplers/test_generation.py",
    "`model.model_arch_type: seq2seq`": "unit/models/test_seq2seq.py",
    "`model.peft_config`": "compat/test_trlx.py::test_programs_of_trlx",
    "`hf_model` of a run": "unit/models/test_adapters.py",
    "`optimizer.name`": "unit/test_optim.py",
    "`default_ppo_config`": "compat/test_trlx.py::test_every_name_stands_for_something",
    "`RFTConfig`": "compat/test_trlx.py::test_programs_of_trlx",
    "`ILQLConfig`": "compat/test_trlx.py::test_programs_of_trlx",
    "`default_nemo": "compat/test_trlx.py::test_what_is_missing_says_what_to_use",
    "`AccelerateILQLTrainer`": "compat/test_trlx.py::test_every_name_stands_for_something",
    "`AutoModelForCausalLMWithILQLHeads`": "unit/samplers/test_guided.py",
    "`NeMo...Trainer`": "compat/test_trlx_yaml.py::test_nemo_is_refused_by_name",
    "`DPOConfig`, `AccelerateDPO": "compat/test_trlx.py::test_what_is_missing_says_what_to_use",
    "`ILQLSeq2SeqElement`": "compat/test_trlx.py::test_every_name_stands_for_something",
    **dict.fromkeys(
        (
            *("`ILQLRolloutStorage`", "`make_experience` of", "`PromptElement`", "`AdaptiveKLController`"),
            *("`ModelBranch`", "`hf_get_decoder_blocks`", "`get_optimizer_class`", "`gather_dict`", "`Clock`"),
        ),
        "compat/test_trlx.py::test_names_of_the_page_are_known",
    ),
    "`trlx.model`": "compat/test_trlx.py::test_what_is_missing_says_what_to_use",
    "`trlx.trainer.register_trainer`": "compat/test_trlx.py::test_hooks_that_nothing_calls_are_told",
    "`trainer.learn()`, `.evaluate()`": "compat/test_trlx.py::test_programs_of_trlx",
    "`trainer.learn(log_fn=": "unit/trainers/test_base.py"
    "::test_functions_of_trlx_for_learn_are_refused_with_the_callback",
    "`trainer.save()`": "contract/test_resume.py",
    "`trainer.save_pretrained(": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "`trainer.generate(input_ids": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "`trainer.decode(": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "`get_arch(config)`": "unit/trainers/test_base.py::test_hooks_of_trlx_and_trl_are_refused",
    "`loss(batch)`": "compat/test_trlx.py::test_a_loss_in_the_form_of_trlx_is_told",
    "`make_experience(num_rollouts": "unit/trainers/test_ilql.py::test_trlx_fills_the_store_by_hand",
    "`trainer.generate_eval(": "compat/test_trlx.py::test_a_model_and_a_reward_generate_from_nothing",
    "`train_mode=`": "unit/trainers/test_base.py::test_keyword_arguments_that_nobody_takes_are_refused",
    "overriding `generate`": "unit/trainers/test_base.py::test_what_only_a_loop_by_hand_calls_is_warned_of",
    "`post_backward_callback`": "unit/trainers/test_base.py::test_hooks_of_trlx_and_trl_are_refused",
    "`post_epoch_callback`": "compat/test_trlx.py::test_hooks_that_nothing_calls_are_told",
    "`prepare_learning`": "unit/trainers/test_base.py::test_hooks_of_trlx_and_trl_are_refused",
    "`setup_optimizer`": "unit/trainers/test_base.py::test_hooks_of_trlx_and_trl_are_refused",
    "`BaseRLTrainer`": "compat/test_trlx.py::test_every_name_stands_for_something",
    "`PPORLElement`": "compat/test_trlx.py::test_every_name_stands_for_something",
    "`AutoModelForCausalLMWithValueHead` |": "compat/test_trlx.py::test_every_name_stands_for_something",
    "`PromptPipeline`": "compat/test_trlx.py::test_what_is_missing_says_what_to_use",
    "`trlx.logging`": "compat/test_trlx.py::test_a_script_runs_as_it_is",
    "`python -m trlx.sweep`": "compat/test_migrate.py::test_a_sweep",
    "`python -m trlx.reference`": "compat/test_trlx.py::test_what_is_missing_says_what_to_use",
    "`accelerate launch script.py`": "distributed/test_launched.py",
    "`trainer.generate(queries": "unit/trainers/test_by_hand.py::test_one_query_alone_has_one_response",
    **dict.fromkeys(
        (
            *("`trainer.train()`", "`trainer.save_model(folder)`, `save_state", "`trainer.predict(", "`trainer.log("),
            *("`trainer.push_to_hub()`", "`get_train_dataloader`", "`create_optimizer`", "`remove_callback`"),
            "`trainer.args`",
        ),
        "unit/config/test_elsewhere.py::test_methods_of_other_trainers",
    ),
    "`trainer.generate(queries, temperature": "unit/trainers/test_by_hand.py"
    "::test_a_step_on_text_of_another_distribution_warns",
    "`trainer.step(": "unit/trainers/test_by_hand.py"
    "::test_responses_of_single_queries_are_stepped_on_and_total_steps_ends_the_loop",
    "`trainer.log_stats(": "unit/trainers/test_rounds.py",
    "`trainer.dataloader`": "unit/trainers/test_rounds.py",
    "`IterativeSFTTrainer.step(": "compat/test_trl_sft.py::test_steps_are_those_of_sft",
    "`AutoModelForCausalLMWithValueHead`, ": "unit/models/test_value_head.py",
    "`from_pretrained(name": "unit/models/test_saved_heads.py",
    "`v_head_init_strategy`": "unit/models/test_wrapper.py::test_adapters",
    "`score_module`": "unit/models/test_wrapper.py::test_options_of_the_constructor_that_are_not_taken",
    "`from_config`": "unit/models/test_wrapper.py::test_of_a_configuration",
    "`forward(input_ids": "unit/models/test_value_head.py::test_forward_takes_what_the_model_takes",
    "`state_dict()`": "unit/models/test_wrapper.py::test_names_in_the_state_dict",
    "`save_pretrained(folder": "unit/models/test_wrapper.py::test_what_save_pretrained_takes",
    "`gradient_checkpointing_enable`": "unit/models/test_wrapper.py::test_gradient_checkpointing",
    "`is_peft_model`, `current_device`": "unit/models/test_wrapper.py::test_names_in_the_state_dict",
    "`create_reference_model(": "unit/models/test_reference.py::test_create_reference_model_shares_and_freezes",
    "`add_and_load_reward": "unit/models/test_reward_adapter.py::test_scores_are_those_of_the_whole_reward_model",
    "`compute_reward_score(": "unit/models/test_reward_adapter.py::test_of_an_encoder_decoder",
    "`set_seed(seed)`": "compat/test_trl_ppo.py::test_set_seed",
    '`stats["objective/kl"]`': "docs/test_docs.py",
    "`reward_function(images": "unit/trainers/test_ddpo.py::test_what_a_reward_function_sees",
    "`prompt_function()`": "unit/trainers/test_ddpo.py::test_prompts_from_a_function",
    "`image_samples_hook`": "unit/trainers/test_ddpo_images.py",
    "`BasePairwiseJudge`": "compat/test_trl.py::test_the_answers_of_trl_become_scores",
    "`PairRMJudge`": "compat/test_trl.py::test_what_it_does_not_have_says_what_to_use",
    "`HfPairwiseJudge`": "compat/test_trl.py::test_what_it_does_not_have_says_what_to_use",
    "a reward function `(prompts": "compat/test_trl.py::test_a_reward_function_of_trl",
    "`WinRateCallback`": "unit/trainers/test_online_dpo.py::test_the_win_rate_is_the_judges",
    "`LogCompletionsCallback`": "compat/test_trl.py::test_what_it_does_not_have_says_what_to_use",
    "`trainer.add_callback": "unit/trainers/test_base.py::test_what_is_no_callback_is_refused",
    "`examples/scripts/dpo_online": "compat/test_trl.py::test_the_script_of_the_page",
    "`examples/scripts/evals": "unit/rewards/test_llm_judge.py",
    "`transformers chat`": "unit/test_cli_runs.py",
    "`input_ids_chosen`": "unit/pipelines/test_preferences.py::test_token_ids_of_trl_are_taken_as_they_are",
    '`eval_dataset={"a"': "unit/trainers/test_reward.py::test_several_sets_have_metrics_of_their_own",
    "two completions a prompt": "unit/trainers/test_online_dpo.py::test_the_best_and_the_worst_of_a_prompt_are_a_pair",
    "no resumption": "contract/test_resume.py",
    "`get_soft_overlong": "unit/trainers/test_groups.py",
    "DeepSpeed": "compat/test_migrate.py::test_a_configuration_of_accelerate",
    "metrics": "docs/test_docs.py",
    "`DefaultDDPOStable": "unit/models/test_diffusion.py",
    "`trainer.save_pretrained(folder)`": "contract/test_diffusers_export.py",
}
"""Beginning of the left side of a row -> the test that does what the row says."""


def test_each_other_row_has_a_test_that_tries_it() -> None:
    for row in ROWS:
        if row.theirs == "-" or (is_options(row) and re.search(OPTION, row.theirs)):
            continue
        place = "file" if row.table.endswith(": file") else f"{row.theirs} |"
        tests = [test for start, test in TRIED.items() if place.startswith(start)]
        assert tests, f"no test tries {row.theirs} ({row.table})"
        file, _, name = tests[-1].partition("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), tests[-1]
    unused = [s for s in TRIED if not any(f"{r.theirs} |".startswith(s) for r in ROWS) and s != "file"]
    assert unused == []


def test_the_tables_of_the_page_are_read() -> None:
    assert len(ROWS) > 200 and len(OPTIONS) > 180
    assert set(ELSEWHERE) >= {"task_name", "kl_coef", "use_vllm"}


COVERAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")


def covered_options() -> Iterator[tuple[str, str]]:
    """The options in the tables of configurations, with the method of each."""
    for kind, page in (("PPOConfig", "PPOConfig (fields of the page)"), ("DDPOConfig", "DDPOConfig")):
        table = COVERAGE.partition(f"## {page}\n")[2].partition("\n## ")[0]
        for item in re.findall(r"^\| (.+?) \| [WNR] \|", table, re.MULTILINE):
            written = item.partition(" (")[0]
            names = [n for n in ELSEWHERE if "*" in written and n.startswith(written.partition("*")[0])]
            names += [n for n in re.findall(r"[a-z_0-9]{3,}", written) if n in {*ELSEWHERE, *SHARED, *fields_of(kind)}]
            assert names, item
            yield from ((kind, name) for name in names)


def fields_of(kind: str) -> set[str]:
    return set(METHODS.get(kind).model_fields)


@pytest.mark.parametrize(("kind", "name"), [*covered_options()])
def test_options_of_the_coverage(kind: str, name: str) -> None:
    """An option is one of the method, or its error says where it is."""
    if name not in fields_of(kind):
        with pytest.raises(
            ConfigError, match=rf"^method.{name}: unknown key. (Here this is|Did you mean [a-z]+\.{name})"
        ):
            METHODS.get(kind)(**{name: None})


def test_the_coverage_of_the_documented_pages() -> None:
    """Each documented item has a state and a test that exists, and the counts in the head are those of the rows."""
    text = COVERAGE
    found = re.findall(r"^\| .+ \| ([WNRM]) \| .*\| (?:`([^`]+)`|-) \|$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| item |")]
    assert len(found) == len(lines) > 290
    for state in "WNRM":
        assert f"{sum(row[0] == state for row in found)} rows are {state}" in text
    for state, test in found:
        file, _, name = test.partition("::")
        assert not test or f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
        assert name or (not test and state in "MR")
