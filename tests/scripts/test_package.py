"""Which programs of a page the type checkers read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

PAGE = """
```python
import trlx_like

pairs = [1]
```

```yaml
a: 1
```

```python
def double(x):
    return 2 * x


print(double(3))
```

```python
trlx_like.train(preferences=pairs)
```
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("package")


def test_a_program_stands_after_the_one_whose_names_it_uses(package: Any) -> None:
    first, alone, later = package.programs(PAGE)
    assert first == "import trlx_like\n\npairs = [1]\n"
    assert alone.startswith("def double(x):") and "pairs" not in alone
    assert later == f"{first}\ntrlx_like.train(preferences=pairs)\n"
