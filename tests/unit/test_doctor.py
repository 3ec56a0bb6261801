"""`trlx-like doctor`: versions, missing packages, the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import trlx_like
from tests.unit.cli_support import said
from trlx_like.doctor import _kernels
from trlx_like.models import faster
from trlx_like.samplers import recorded


def test_what_the_doctor_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "packages" / f"trlx_like-{trlx_like.__version__}.dist-info"
    folder.mkdir(parents=True)
    needs = ["torch>=2.9", "pydantic<1", 'no-such-package>=3; extra == "hopes"', 'pytest; extra == "hopes"']
    needs += ['no-such-tool; extra == "dev"', 'old-package; python_version < "3"']
    lines = ["Metadata-Version: 2.4", "Name: trlx-like", "Version: 0.1.0"]
    lines += [f"Requires-Dist: {need}" for need in needs] + ["Provides-Extra: hopes", "Provides-Extra: dev", "", ""]
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder.parent))
    text = said(0, "doctor")
    assert re.search(r"^  torch +2\.[\w.+]+$", text, re.M)
    assert re.search(r'^  pydantic +[\d.]+, which is not <1: pip install "pydantic<1"$', text, re.M)
    assert re.search(r'^  no-such-package +missing: pip install "trlx-like\[hopes\]"$', text, re.M)
    assert re.search(r"^  pytest +[\d.]+$", text, re.M)
    assert "no-such-tool" not in text and "old-package" not in text
    assert re.search(r"^Python +3\.", text, re.M)
    assert re.search(r"^Threads +\d+ for torch, \d+ cores", text, re.M)
    assert re.search(r"^Decoding +on CPUs: (steps are recorded and replayed|each step by the modules)", text, re.M)
    assert re.search(r"^Products +float32 on CPUs: ", text, re.M)
    assert f"{here} (can be written to)" in text


@pytest.mark.parametrize(
    ("gpu", "tracer", "said"),
    [
        (False, True, "steps are recorded and replayed.*float32 on CPUs: MKL alone$"),
        (False, False, "each step by the modules .*MKL alone$"),
        (True, True, "cache_implementation: static by CUDA.*MKL alone$"),
    ],
)
def test_what_computes(gpu: bool, tracer: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(recorded, "TRACER", tracer)
    monkeypatch.setattr(faster, "choice", lambda: faster.Choice({}, 0, "MKL alone"))
    assert re.search(said, "\n".join(_kernels()), re.S)
