"""Where a module's tests are: in the file of its name, or where the table says."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Modules without a test file of their own, and the file that tests them.
ELSEWHERE = {
    "api": "tests/unit/trainers/test_base.py",
    "checkpoint/manifest": "tests/unit/checkpoint/test_store.py",
    "command_group": "tests/unit/test_cli.py",
    "compat/checkpoints": "tests/compat/test_migrate.py",
    "compat/command": "tests/compat/test_migrate.py",
    "config/methods/dpo": "tests/unit/trainers/test_dpo.py",
    "config/methods/distill": "tests/unit/trainers/test_distill.py",
    "config/methods/groups": "tests/unit/trainers/test_groups.py",
    "config/methods/grpo": "tests/unit/test_presets.py",
    "config/methods/ilql": "tests/unit/trainers/test_ilql.py",
    "config/methods/kto": "tests/unit/trainers/test_kto.py",
    "config/methods/online_dpo": "tests/unit/trainers/test_online_dpo.py",
    "config/methods/reward": "tests/unit/trainers/test_reward.py",
    "config/methods/rft": "tests/unit/trainers/test_rft.py",
    "config/methods/rloo": "tests/unit/test_presets.py",
    "config/methods/sft": "tests/unit/trainers/test_sft.py",
    "distributed/backend": "tests/distributed/test_lint.py",
    "distributed/replicated": "tests/contract/test_gradients.py",
    "distributed/divided": "tests/distributed/test_torch_fsdp.py",
    "distributed/divided_state": "tests/distributed/test_torch_fsdp.py",
    "distributed/footprint": "tests/unit/test_estimate.py",
    "errors": "tests/unit/test_cli.py",
    "imagined": "tests/unit/test_estimate.py",
    "meeting": "tests/distributed/test_heartbeat.py",
    "models/dropout": "tests/unit/models/test_loading.py",
    "models/export": "tests/contract/test_export.py",
    "models/sources": "tests/faults/test_hostile.py",
    "rendering": "tests/unit/sharing/test_card.py",
    "rewards/programs": "tests/unit/rewards/test_library.py",
    "records": "tests/unit/tracking/test_ledger.py",
    "pipelines/files": "tests/unit/pipelines/test_sources.py",
    "pipelines/rows": "tests/unit/pipelines/test_sources.py",
    "rewards/arguments": "tests/unit/rewards/test_call.py",
    "rewards/asked": "tests/unit/rewards/test_llm_judge.py",
    "rewards/awaiting": "tests/unit/rewards/test_runner.py",
    "rewards/checks": "tests/unit/rewards/test_call.py",
    "rewards/judging": "tests/unit/rewards/test_judges.py",
    "rewards/outcome": "tests/unit/rewards/test_runner.py",
    "rewards/transport": "tests/unit/rewards/test_llm_judge.py",
    "samplers/drawing": "tests/unit/samplers/test_engines.py",
    "samplers/agreement": "tests/faults/test_canary.py",
    "samplers/canary": "tests/faults/test_canary.py",
    "samplers/plain_copy": "tests/faults/test_canary.py",
    "tracking/folder": "tests/unit/tracking/test_report.py",
    "tracking/signals": "tests/unit/tracking/test_audit.py",
    "tracking/values": "tests/unit/tracking/test_base.py",
    "rehearsal": "tests/unit/test_estimate.py",
    "savings": "tests/unit/test_estimate.py",
    "sharing/commands": "tests/unit/sharing/test_export.py",
    "testing/attributes": "tests/contract/test_attributes.py",
    "testing/compare": "tests/contract/test_resume.py",
    "testing/exports": "tests/contract/test_export.py",
    "testing/ranks": "tests/distributed/test_two_processes.py",
    "testing/tiny": "tests/contract/recipes.py",
    "sweep/running": "tests/unit/sweep/test_command.py",
    "trainers/callbacks": "tests/contract/test_attributes.py",
    "trainers/checks": "tests/unit/trainers/test_base.py",
    "trainers/context": "tests/unit/trainers/test_base.py",
    "trainers/grpo": "tests/unit/trainers/test_groups.py",
    "trainers/guard": "tests/contract/test_nonfinite.py",
    "trainers/rloo": "tests/unit/trainers/test_groups.py",
    "trainers/scoring": "tests/unit/trainers/test_online.py",
    "trainers/text": "tests/unit/trainers/test_evaluation.py",
    "trainers/trunk": "tests/contract/test_trunk.py",
    "trainers/verbs": "tests/unit/trainers/test_base.py",
}


def modules() -> list[str]:
    files = (file for file in (ROOT / "trlx_like").rglob("*.py") if file.name[:2] != "__")
    return sorted(str(file.relative_to(ROOT / "trlx_like").with_suffix("")) for file in files)


def has_namesake(module: str) -> bool:
    part, _, name = module.rpartition("/")
    return any((ROOT / "tests" / folder / part / f"test_{name}.py").is_file() for folder in ("unit", ""))


def test_every_module_has_a_test_file_of_its_name_or_a_place_in_the_table() -> None:
    assert [module for module in modules() if not has_namesake(module) and module not in ELSEWHERE] == []


def test_the_table_names_what_is_there_and_nothing_that_has_a_namesake() -> None:
    assert set(ELSEWHERE) <= set(modules())
    assert [module for module in ELSEWHERE if has_namesake(module)] == []
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []
