"""The program for a machine with a GPU runs on a CPU too, and its exit code says whether a promise is broken."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu", *arguments])
    return gpu.main()


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("resume", "| resume | yes | weights and moments are equal bit by bit |"),
        ("DPOTrainer / fsdp / fp16", "| DPOTrainer / fsdp / fp16 | yes | refused by name |"),
        pytest.param("", "0 broken", marks=pytest.mark.slow),
    ],
)
def test_every_promise_holds_on_a_cpu(
    only: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "--device", "cpu", "--only", only) == 0
    assert words in capsys.readouterr().out


def test_a_broken_promise_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that diverges, and the others are still checked."""
    run = gpu.on

    def too_fast(on_gpu: bool) -> dict[str, Any]:
        return {**run(on_gpu), "optimizer.kwargs": {"lr": 1e30}, "train.max_nonfinite_steps": 100}

    monkeypatch.setattr(gpu, "on", too_fast)
    assert ran(monkeypatch, "--device", "cpu", "--only", "ILQLTrainer / fsdp") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 broken" and "| ILQLTrainer / fsdp / bf16 | **no** | " in "\n".join(lines)
    assert "| ILQLTrainer / fsdp / fp16 | yes | refused by name |" in lines


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        ran(monkeypatch)
    assert error.value.code == 2
