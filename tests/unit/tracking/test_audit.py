"""Signs of reward hacking: each signal by hand at its bound, in a run, on the command line and in the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from tests.contract.recipes import make
from tests.unit.cli_support import run, said
from trlx_like.config.registries import METHODS, method_class
from trlx_like.config.reward import RewardFnConfig
from trlx_like.config.yaml_source import packaged
from trlx_like.tracking.audit import Audit, audit_run
from trlx_like.tracking.causes import CAUSES
from trlx_like.tracking.report import write_report
from trlx_like.tracking.signals import SIGNALS

HEALTHY = {
    "rollout/score_mean": 0.5,
    "rollout/score_std": 0.4,
    "rollout/length_mean": 10.0,
    "rollout/finished_fraction": 1.0,
    "rollout/top_output_fraction": 0.1,
    "rollout/length_reward_correlation": 0.1,
    "rollout/reward/right/mean": 0.5,
    "rollout/reward/style/mean": 0.0,
    "policy/kl_per_token": 0.0,
    "policy/entropy": 1.0,
}


def run_of(last: Mapping[str, float], rounds: int = 6, first: Mapping[str, float] = HEALTHY) -> list[dict[str, Any]]:
    """A run that is as at the start for its first round, and then as `last`; two steps a round."""
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        row = {**first, **(last if number else {})}
        found += [{"step": 2 * number + 1, **row}, {"step": 2 * number + 2, "losses/total_loss": 0.0}]
    return found


def audit_rows(rows: list[dict[str, Any]], **config: Any) -> Audit:
    audit = Audit(config)
    for row in rows:
        audit.add({name: value for name, value in row.items() if name != "step"}, row["step"])
    return audit


def states(rows: list[dict[str, Any]], weights: list[float] | None = None) -> dict[str, str]:
    audit = audit_rows(rows, reward={"weights": weights})
    return {name: audit.verdicts[name].state for name in SIGNALS}


# What only just is no finding, and what only just is one. The first round is HEALTHY.
BOUNDS: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {
    "reward against KL": [
        # (kl + entropy) / entropy at the start: 2.49 and 2.51
        ({"policy/kl_per_token": 2.29, "policy/entropy": 0.2}, {"policy/kl_per_token": 2.31, "policy/entropy": 0.2}),
    ],
    "length drift": [
        ({"rollout/length_mean": 29.9}, {"rollout/length_mean": 30.1}),
        ({"rollout/length_mean": 3.4}, {"rollout/length_mean": 3.3}),
        # Longer where the reward pays for length; shorter where it pays for brevity; not the other way round.
        (
            {"rollout/length_mean": 11.9, "rollout/length_reward_correlation": 0.96},
            {"rollout/length_mean": 12.1, "rollout/length_reward_correlation": 0.96},
        ),
        (
            {"rollout/length_mean": 12.1, "rollout/length_reward_correlation": -0.96},
            {"rollout/length_mean": 8.3, "rollout/length_reward_correlation": -0.96},
        ),
        (
            {"rollout/length_mean": 20.0, "rollout/length_reward_correlation": 0.89},
            {"rollout/length_mean": 20.0, "rollout/length_reward_correlation": 0.91},
        ),
    ],
    "one component": [
        # style +1, right -.19: 1 / .81 = 1.23 of the whole; right -.21: 1 / .79 = 1.27
        (
            {"rollout/reward/style/mean": 1.0, "rollout/reward/right/mean": 0.31},
            {"rollout/reward/style/mean": 1.0, "rollout/reward/right/mean": 0.29},
        ),
        # A gain of less than half a deviation of the scores at the start, .2, is noise.
        (
            {"rollout/reward/style/mean": 0.19, "rollout/reward/right/mean": 0.4},
            {"rollout/reward/style/mean": 0.21, "rollout/reward/right/mean": 0.4},
        ),
    ],
    "duplicate outputs": [({"rollout/top_output_fraction": 0.69}, {"rollout/top_output_fraction": 0.71})],
    "entropy collapse": [
        ({"policy/entropy": 0.101}, {"policy/entropy": 0.099}),
        (
            {"policy/entropy": 0.01, "rollout/score_std": 0.29},
            {"policy/entropy": 0.01, "rollout/score_std": 0.31},
        ),
    ],
    "truncated outputs": [({"rollout/finished_fraction": 0.51}, {"rollout/finished_fraction": 0.49})],
}


@pytest.mark.parametrize("name", list(SIGNALS))
def test_the_bound_of_each_signal(name: str) -> None:
    """And nothing else is found with it."""
    for clean, found in BOUNDS[name]:
        assert states(run_of(clean))[name] == "clean", clean
        others = states(run_of(found))
        assert others.pop(name) == "found at step 9", found  # the fifth round
        assert set(others.values()) == {"clean"}, found


def test_a_run_that_stays_as_it_is_shows_nothing() -> None:
    assert set(states(run_of({})).values()) == {"clean"}


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"rollout/finished_fraction": 0.1}, {"rollout/finished_fraction": 0.0}),  # stories that never end
        ({"rollout/finished_fraction": 0.79}, {"rollout/finished_fraction": 0.0}),  # by chance
        ({"rollout/top_output_fraction": 0.6}, {"rollout/top_output_fraction": 0.9}),  # two classes to choose from
    ],
)
def test_what_a_run_begins_with_is_no_finding(first: dict[str, float], last: dict[str, float]) -> None:
    assert set(states(run_of(last, first={**HEALTHY, **first})).values()) == {"clean"}


def test_an_end_that_was_known_can_be_lost() -> None:
    """At most a fifth may be cut at the start."""
    first = {**HEALTHY, "rollout/finished_fraction": 0.81}
    assert states(run_of({"rollout/finished_fraction": 0.4}, first=first))["truncated outputs"] == "found at step 9"


@pytest.mark.parametrize(
    ("length", "score", "state"),
    [
        # Of 128 scores with a deviation of .4, now 3 x 128: the standard error is .4 sqrt(1/128 + 1/384) = .041.
        (3.3, 0.5 + 0.09, "clean"),
        (3.3, 0.5 + 0.07, "found at step 9"),
        (30.1, 0.5 + 0.09, "found at step 9"),
    ],
)
def test_a_third_of_the_length_is_found_while_the_reward_has_not_risen(length: float, score: float, state: str) -> None:
    """It may be what the reward asks for; three times the length is found in any case."""
    first = {**HEALTHY, "rollout/samples": 128.0}
    rows = run_of({"rollout/length_mean": length, "rollout/score_mean": score}, first=first)
    assert states(rows)["length drift"] == state


def test_one_odd_round_is_none_either() -> None:
    """The mean of three rounds is judged: (2 x .1 + 1.0) / 3 = .4."""
    rows = run_of({}, rounds=12)
    rows[10]["rollout/top_output_fraction"] = 1.0
    assert set(states(rows).values()) == {"clean"}


def test_it_does_not_judge_before_the_fifth_round() -> None:
    worst = {"rollout/finished_fraction": 0.0}
    assert not audit_rows(run_of(worst, rounds=4)).found
    assert [verdict.name for verdict in audit_rows(run_of(worst, rounds=5)).found] == ["truncated outputs"]


def test_it_remembers_what_was_found_and_shows_the_last_rounds() -> None:
    rows = run_of({"rollout/finished_fraction": 0.0}, rounds=8)
    rows += [{**row, "step": row["step"] + 16} for row in run_of({}, rounds=5)]
    verdict = audit_rows(rows).verdicts["truncated outputs"]
    assert verdict.state == "found at step 9"
    assert verdict.reading is not None and verdict.reading.value == 0.0


def test_truncation_shows_where_the_reward_abstains_on_it() -> None:
    """Statistics are of all samples, so that outputs without a reward count; those that are learned from all end."""
    kept = {"rollout/kept/finished_fraction": 1.0, "rollout/kept/fraction": 0.667}
    third = audit_rows(run_of({**kept, "rollout/finished_fraction": 0.667})).verdicts["truncated outputs"]
    assert third.reading is not None and third.state == "clean"
    assert third.reading.words.startswith("33% of the outputs are cut off at max_new_tokens (0% at the start)")
    most = run_of({**kept, "rollout/finished_fraction": 0.4, "rollout/kept/fraction": 0.4})
    assert states(most)["truncated outputs"] == "found at step 9"


def test_a_round_without_a_single_reward_is_one() -> None:
    """No score has a mean where the reward abstains on all, but all outputs are cut off."""
    last = {"rollout/samples": 8.0, "rollout/abstained_fraction": 1.0, "rollout/finished_fraction": 0.0}
    rows = run_of({}, rounds=3) + [{"step": step, **last} for step in (7, 9, 11)]
    assert states(rows)["truncated outputs"] == "found at step 9"  # two of the last three rounds


@pytest.mark.parametrize(
    ("method", "signal", "expected"),
    [
        (
            "PPOConfig",
            "entropy collapse",
            "an entropy bonus (method.ent_coef); a KL penalty (method.init_kl_coef); a lower learning rate; "
            "a higher temperature.",
        ),
        ("RFTConfig", "entropy collapse", "a lower learning rate; a higher temperature."),
        ("DDPOConfig", "entropy collapse", "a KL penalty (method.beta); a lower learning rate; a higher temperature."),
        (
            "RLOOConfig",
            "truncated outputs",
            "leaving these responses out of the loss (method.mask_truncated_completions); a larger max_new_tokens; "
            "a reward that wants an end.",
        ),
        (
            "OnlineDPOConfig",
            "truncated outputs",
            "a penalty of responses that do not end (method.missing_eos_penalty); a larger max_new_tokens; "
            "a reward that wants an end.",
        ),
    ],
)
def test_advice_names_only_options_of_the_method(method: str, signal: str, expected: str) -> None:
    config = method_class(method)().to_dict()
    assert Audit({"method": config}).verdicts[signal].advice == expected


def test_every_option_of_a_remedy_belongs_to_a_method() -> None:
    remedies = packaged("tracking/remedies.yml")
    assert remedies.keys() == {*CAUSES, *SIGNALS}
    named = {option for name in SIGNALS for options in remedies[name].values() for option in (options or "").split()}
    of_methods = {f"method.{option}" for name in METHODS.names() for option in method_class(name)().to_dict()}
    assert named - of_methods == {"reward.weights"} and RewardFnConfig().weights is None


def test_without_a_configuration_advice_names_no_options() -> None:
    assert Audit().verdicts["entropy collapse"].advice == (
        "an entropy bonus; a KL penalty; a lower learning rate; a higher temperature."
    )


def test_weights_of_components() -> None:
    """style +1 and right -.4: of plain sums style is 1 / .6; at a tenth of the weight it is no gain at all."""
    rows = run_of({"rollout/reward/style/mean": 1.0, "rollout/reward/right/mean": 0.1})
    assert states(rows)["one component"] == "found at step 9"
    assert states(rows, [1.0, 1.0])["one component"] == "found at step 9"
    assert states(rows, [1.0, 0.1])["one component"] == "clean"
    # A penalty, of negative weight, that falls is a gain like any other.
    both = run_of({"rollout/reward/style/mean": -1.0, "rollout/reward/right/mean": 0.9})
    assert states(both, [1.0, -1.0])["one component"] == "clean"


def test_online_dpo_has_kl_and_entropy_of_whole_responses() -> None:
    """-log p of the reference: 5 nats for 5 tokens at the start, 12.4 or 12.6 at the end: 2.48 and 2.52 a token."""
    first = {"rollout/score_mean": 0.0, "rollout/length_mean": 5.0, "objective/kl": 0.0, "objective/entropy": 5.0}
    first |= {"policy/kl_per_token": 0.0, "policy/entropy": 1.0}
    assert (
        states(run_of({"objective/kl": 7.4, "policy/kl_per_token": 100.0}, first=first))["reward against KL"] == "clean"
    )
    assert states(run_of({"objective/kl": 7.6}, first=first))["reward against KL"] == "found at step 9"
    longer = {"objective/kl": 7.6, "rollout/length_mean": 6.0}  # over more tokens it is less
    assert states(run_of(longer, first=first))["reward against KL"] == "clean"
    in_pairs = {"objective/kl": 7.6, "rollout/kept/length_mean": 6.0, "rollout/length_mean": 2.0}
    assert states(run_of(in_pairs, first=first))["reward against KL"] == "clean"


def test_what_is_not_logged_is_not_measured() -> None:
    rows = run_of({}, first={"rollout/score_mean": 0.0, "rollout/length_mean": 5.0})
    assert states(rows) == {**dict.fromkeys(SIGNALS, "not measured"), "length drift": "clean"}


def test_numbers_that_are_none_break_nothing(tmp_path: Path) -> None:
    rows = run_of({name: float("nan") for name in HEALTHY if name != "rollout/score_mean"})
    assert set(states(rows).values()) == {"not measured"}
    odd = run_of({"policy/entropy": float("inf")}) + [{"step": 99, "rollout/score_mean": "NaN", "x": None, "y": "text"}]
    found = audit_run(folder_of(odd, tmp_path))
    assert found.history.count == 7 and found.verdicts["truncated outputs"].state == "clean"
    assert not Audit().add({}, 1)


NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")]) | st.floats()
NAMES = [*HEALTHY, "objective/kl", "objective/entropy"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS), min_size=5, max_size=7))
def test_no_numbers_break_it(rounds: list[dict[str, float]]) -> None:
    rows = [{"step": step, "rollout/score_mean": 0.0, **row} for step, row in enumerate(rounds)]
    for verdict in audit_rows(rows).verdicts.values():
        assert verdict.since is None or verdict.reading is not None


# In a run.


def longest(outputs: list[str], **_: Any) -> list[float]:
    return [float(len(output)) for output in outputs]


HACKED = {
    "train.epochs": 10,
    "train.total_steps": 60,
    "method.num_rollouts": 32,
    "method.chunk_size": 32,
    "train.batch_size": 32,
    "optimizer.kwargs": {"lr": 0.03},
    "method.init_kl_coef": 0.0,
}


def test_a_run_that_pays_for_length_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the round in which it shows; a resumed run says nothing twice, and the report has it."""
    make("PPOTrainer", tmp_path, reward_fn=longest, **HACKED).learn()
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Audit, step")]
    assert all("\n" not in line for line in told)
    names = [line.split(", ")[2].split(":")[0] for line in told]
    assert len(set(names)) == len(names)
    assert {"length drift", "truncated outputs"} <= set(names)
    assert any("has a correlation of 0.9" in line and ". Try: " in line for line in told)
    audit = audit_run(tmp_path)
    assert [f"Audit, step {verdict.since}, {verdict.name}" for verdict in audit.found] != []
    assert {verdict.name for verdict in audit.found} == set(names)
    caplog.clear()
    again = {**HACKED, "train.epochs": 12, "train.resume_from_checkpoint": "auto"}
    make("PPOTrainer", tmp_path, reward_fn=longest, **again).learn()
    assert audit_run(tmp_path).history.count == 12
    repeated = [
        line for line in caplog.messages if line.startswith("Audit, ") and line.split(", ")[2].split(":")[0] in names
    ]
    assert repeated == []
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"state":"found at step 9"' in page


# On the command line, and in the report.


def folder_of(rows: list[dict[str, Any]], folder: Path, config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "torn')
    if config is not None:
        (folder / "config.yml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return folder


def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    clean = said(0, "audit", folder_of(run_of({}), tmp_path / "clean"))
    assert clean.rstrip().endswith("Nothing found in 6 rounds.")
    assert all(name in clean for name in SIGNALS)
    blind = said(0, "audit", folder_of(run_of({"policy/kl_per_token": float("nan")}), tmp_path / "blind"))
    assert blind.endswith("Nothing found in 6 rounds.\nNot measured, so that nothing is known of: reward against KL.\n")


def test_findings_have_an_exit_code_of_their_own(tmp_path: Path) -> None:
    result = run("audit", folder_of(run_of({"rollout/finished_fraction": 0.0}), tmp_path / "found"))
    assert result.exit_code == 4
    assert result.stdout.rstrip().endswith("Found: truncated outputs.")
    assert "found at step 9" in result.stdout and "a penalty of responses that do not end" in result.stdout


def test_the_weights_are_those_of_the_run(tmp_path: Path) -> None:
    rows = run_of({"rollout/reward/style/mean": 1.0, "rollout/reward/right/mean": 0.1})
    light = folder_of(rows, tmp_path / "light", {"reward": {"weights": [1.0, 0.1]}})
    assert run("audit", light).exit_code == 0
    for place, config in enumerate([None, {"reward": {"weights": None}}, {"reward": 3}, "- [", "text"]):
        assert run("audit", folder_of(rows, tmp_path / str(place), config)).exit_code == 4


def test_mistakes_of_the_user_are_told_apart(tmp_path: Path) -> None:
    assert said(2, "audit", tmp_path / "none") == f"{tmp_path}/none is not a run folder: it has no metrics.jsonl.\n"
    short = folder_of(run_of({}, rounds=4), tmp_path / "short")
    assert said(2, "audit", short) == (
        f"{short} has 4 rounds of sampling; the audit needs 5. Offline trainers have none.\n"
    )


def test_a_run_that_logs_nothing_to_judge_by_is_not_called_clean(tmp_path: Path) -> None:
    folder = folder_of(run_of({}, first={"rollout/score_mean": 0.5}), tmp_path)
    assert said(2, "audit", folder).startswith(f"{folder} has rounds, but none of the metrics that the audit needs")
    assert '"audit":null' in write_report(folder).read_text()


def test_a_report_of_a_short_run_has_no_audit(tmp_path: Path) -> None:
    assert '"audit":null' in write_report(folder_of(run_of({}, rounds=4), tmp_path)).read_text()
    assert '"audit":{"rounds":6,"found":0' in write_report(folder_of(run_of({}), tmp_path)).read_text()
