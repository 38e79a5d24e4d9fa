import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are slower on more threads, and vLLM's spin

import gc
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fork_server import ForkServer
from hypothesis import settings


FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8000"))  # for each test marked `fuzz`, with `make fuzz`

settings.register_profile("quick", deadline=None, max_examples=12)  # other work may slow an example down
settings.register_profile("full", deadline=None, max_examples=50)
settings.register_profile("fuzz", deadline=None, max_examples=FUZZ_EXAMPLES, print_blob=True)
settings.load_profile("quick")  # unless `--hypothesis-profile` names another

LONG = (
    "test_vllm_training.py",
    "test_vllm_server.py",
    "test_vllm_ranks.py",
    "test_serving.py",
    "test_recipes.py",
    "test_notebooks.py",
    "test_trainer.py",
    "test_desk.py",
    "test_ranks.py",
    "test_sft_recipe.py",
    "test_grpo_recipe.py",
    "test_faults.py",
    "test_objective.py",
    "test_docs_snippets.py",
    "test_cli.py",
    "test_part_ranks.py",
    "test_interrupt.py",
    "test_old_bugs.py",
    "test_equality.py",
)
"""Files that take half a minute or more. They come first, so that no process is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Start one fork server for all test processes, where there are several, and leave what they import to them."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # nothing of what is imported and collected is garbage, and to look for it takes seconds
        config.pluginmanager.import_plugin("helpers.fixtures")
        return
    folder = tempfile.TemporaryDirectory()
    server = ForkServer(Path(folder.name)).serve()
    os.environ["FORK_SERVER"] = folder.name
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(server.communicate)  # which ends it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        reason = (
            "needs vLLM: `make test-all` installs it where it can, `python tests/install_vllm.py` says why it cannot"
        )
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Last, because a vLLM server may be up then, and others look whether processes are left.
    paths = {item.path for item in items if item.get_closest_marker("vllm")}
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: (item.path in paths, ranks.get(item.path.name, len(ranks)), "unit" in item.path.parts))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is garbage to no test, and every training collects garbage several times
    gc.enable()
