"""Training with vLLM in process on pictures that tools return: it sees what the policy sees, also after an update."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
from datasets import Dataset
from helpers.runs import settings
from helpers.vision import LOOKING, ROWS, save_looking_policy, vision_processor
from peft import LoraConfig

from mcp_grpo import MCPGRPOTrainer, ToolPool, Trajectory


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM needs torchvision for models that see"),
]

ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy that asks for a picture, with a processor that vLLM can load."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool(LOOKING) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    folder = tmp_path_factory.mktemp("looking")
    tokenizer: Any = vision_processor().tokenizer
    images = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 32 * 32})
    videos = Qwen3VLVideoProcessor(patch_size=4)
    processor = Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    processor.save_pretrained(folder)
    return save_looking_policy(folder, anyio.run(schemas), head_dim=32)  # as wide as vLLM needs it on a CPU


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["weights", "adapter"])
def test_vllm_and_the_trainer_see_the_same_pictures(tmp_path: Path, policy: str, lora: Any) -> None:
    def reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [float(len(each.completion_ids) % 7) for each in trajectory]

    args = settings(
        tmp_path,
        use_vllm=True,
        vllm_max_model_length=2048,
        vllm_engine_kwargs=ENGINE,
        num_generations=4,
        per_device_train_batch_size=4,
        max_turn_tokens=60,
        max_turns=2,
        max_steps=3,
        beta=0.1,
        chat_template_kwargs=None,
    )
    num_seen: list[int] = []
    with MCPGRPOTrainer(policy, reward, args, Dataset.from_list(ROWS), servers=LOOKING, peft_config=lora) as trainer:
        assert trainer.vllm_generation.weight_sync == "merge"
        trainer.watch_batches(lambda batch: num_seen.append(sum(len(each.images) for each in batch.trajectories)))
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "align/logp_mae" in entry]
    assert all(num_seen)
    assert max(entry["align/logp_mae"] for entry in logs) < 1e-4
