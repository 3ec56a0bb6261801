"""Search over options: `trlx-like sweep`. Optuna proposes points; each is trained with every seed in processes."""
