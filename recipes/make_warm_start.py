"""
Make the model that the quickstart starts from, and write it to `mcp_grpo/quickstart/warm_start/`:

    make warm-start

It takes minutes on one core. On the same machine it gives the same weights again; on another they may differ by rounding.
To be run when tasks, tools, chat template or tokenizer have changed; `tests/process/recipes/test_recipes.py` says so. Whether the
quickstart still learns from it, `make test-all` says.
"""

import anyio
from quickstart import list_tools, make_base_model

from mcp_grpo.quickstart.tasks import build_tasks
from mcp_grpo.quickstart.warm_start import SEED, WARM_START, keep_fingerprint


def main() -> None:
    """Train the warm start from scratch and save it."""
    rows, _ = build_tasks()
    make_base_model(rows, WARM_START, seed=SEED)
    keep_fingerprint(rows, anyio.run(list_tools))


if __name__ == "__main__":
    main()
