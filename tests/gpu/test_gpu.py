"""What only a GPU can show: 4-bit models, bf16, and vLLM that sleeps while the policy trains."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from helpers import sums
from helpers.policies import tiny_model
from helpers.runs import RELYING_AT_ONCE, make_trainer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from mcp_grpo import ToolPool


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of what is used there, and not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ADAPTER = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
ON_GPU: dict[str, Any] = {"use_cpu": False, "bf16": True, "max_steps": 3}
EVERYTHING: dict[str, Any] = {
    "advantage_mode": "hybrid",
    "constants": RELYING_AT_ONCE,
    "beta": 0.05,
    "ref_sync": "ema",
    "ref_sync_steps": 1,
    "schema_mask": "syntax",
    "bootstrap_steps": 2,
    "gradient_checkpointing": True,
}
ENGINE: dict[str, Any] = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 2048,
    "vllm_engine_kwargs": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The adding model, with heads as wide as a GPU's kernels want them."""

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool(sums.SERVERS) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "tiny_model", lambda tokenizer, **kwargs: tiny_model(tokenizer, head_dim=64, **kwargs))
        folder = sums.save_adding_model(tmp_path_factory.mktemp("wide"), anyio.run(schemas))
    # As models are published: of wider weights, transformers quantises what is left in bf16, and vLLM the whole.
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def in_four_bits(folder: str) -> Any:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # as vLLM quantises
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def adapter(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".default." in n}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_model_in_four_bits_trains_with_everything_on_and_goes_on_from_a_checkpoint(
    tmp_path: Path, wide_model: str
) -> None:
    settings = {**ON_GPU, **EVERYTHING, "save_strategy": "steps", "save_steps": 2}
    with make_trainer(tmp_path, in_four_bits(wide_model), peft_config=ADAPTER, **settings) as trainer:
        before = adapter(trainer)
        trainer.train()
        after = adapter(trainer)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert all(torch.isfinite(value).all() for value in after.values())
        assert logged(trainer, "ref/distance")[-1] > 0
        assert min(logged(trainer, "align/score")) > 0.9
    assert (tmp_path / "checkpoint-2" / "value_head.safetensors").exists()
    with make_trainer(tmp_path, in_four_bits(wide_model), peft_config=ADAPTER, **settings) as resumed:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 3
        moved = sum(float((after[n] - before[n]).norm()) for n in after)
        apart = sum(float((after[n] - value).norm()) for n, value in adapter(resumed).items())
        assert apart < 0.5 * moved  # kernels are not the same to the last bit, and trajectories may part


def figures_of_a_run(folder: Path, model: str, is_quantized: bool, settings: dict[str, Any]) -> dict[str, list[float]]:
    policy = in_four_bits(model) if is_quantized else model
    with make_trainer(folder, policy, peft_config=ADAPTER, **ON_GPU, **ENGINE, **settings) as trainer:
        before = adapter(trainer)
        trainer.train()
        moved = [float((before[name] - value).norm()) for name, value in adapter(trainer).items()]
        return {name: logged(trainer, name) for name in ("sampler/weight_mismatch", "ratio/mean")} | {"moved": moved}


def memory_after_each_of_two_runs(folder: Path, model: str) -> list[int]:
    used = []
    for number in range(2):
        with make_trainer(folder / str(number), model, peft_config=ADAPTER, **ON_GPU, **ENGINE) as trainer:
            trainer.train()
            free, total = torch.cuda.mem_get_info()
        used += [total - free, total - torch.cuda.mem_get_info()[0]]
    return used


@pytest.mark.vllm
def test_what_vllm_held_is_free_once_the_trainer_is_closed(tmp_path: Path, wide_model: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        used = pool.submit(memory_after_each_of_two_runs, tmp_path, wide_model).result(timeout=280)
    share = ENGINE["vllm_gpu_memory_utilization"] * torch.cuda.get_device_properties(0).total_memory
    for during, after in zip(used[::2], used[1::2], strict=True):
        assert during - after > 0.7 * share


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("is_quantized", "settings"),
    [
        (False, {"weight_sync": "merge", "vllm_enable_sleep_mode": True}),
        (False, {"weight_sync": "adapter", "vllm_enable_sleep_mode": True}),
        (False, {"weight_sync": "merge", "max_staleness": 1}),
        (True, {"weight_sync": "auto"}),
    ],
    ids=["merge, asleep", "adapter, asleep", "merge, ahead", "four bits"],
)
def test_the_policy_is_sampled_by_vllm_and_trained_in_bf16(
    tmp_path: Path, wide_model: str, is_quantized: bool, settings: dict[str, Any]
) -> None:
    # In a process of its own: an engine that has slept leaves memory that another one in the process stumbles over.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        figures = pool.submit(figures_of_a_run, tmp_path, wide_model, is_quantized, settings).result(timeout=280)
    assert max(figures["moved"]) > 0
    assert max(figures["sampler/weight_mismatch"]) < 0.1
    assert all(abs(mean - 1) < 0.1 for mean in figures["ratio/mean"])
