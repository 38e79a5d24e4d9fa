"""The policy's adapter as vLLM reads it: the same policy there, and what cannot be one."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from helpers.families import family_tokenizer
from helpers.policies import save_tiny_model, tiny_model
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mcp_grpo.sampling import Sampling
from mcp_grpo.sampling.adapter_export import adapter_problem, max_lora_rank, save_adapter
from mcp_grpo.sampling.vllm_generator import VLLMGenerator


TOKENIZER = family_tokenizer("qwen3")
IDS = list(range(20, 120))
ADAPTERS = {
    "plain": {"r": 4, "lora_alpha": 12},
    "rslora": {"r": 4, "lora_alpha": 12, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 12,
        "rank_pattern": {"q_proj": 16, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"q_proj": 3, "o_proj": 40},
    },
    "patterns and rslora": {"r": 8, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"v_proj": 1}, "use_rslora": True},
    "some layers": {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "embedding": {"r": 4, "lora_alpha": 12, "target_modules": ["embed_tokens", "q_proj"]},
}


def adapted(folder: str, seed: int = 0, **settings: Any) -> PeftModel:
    """A policy whose adapter changes much."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    policy = get_peft_model(
        base, LoraConfig(**{"target_modules": "all-linear", "init_lora_weights": False, **settings})
    )
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy.eval()  # type: ignore[return-value]


@torch.no_grad()
def logits(policy: Any) -> torch.Tensor:
    return policy(torch.tensor([IDS])).logits[0]


def logps(policy: Any) -> torch.Tensor:
    return logits(policy)[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:]).unsqueeze(1)).squeeze(1)


def whole(parameters: Any) -> Any:
    return nullcontext()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("base"), head_dim=32, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def engine(base: str) -> Any:
    from vllm import LLM  # noqa: TID251

    return LLM(
        model=base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        logprobs_mode="processed_logprobs",
        enable_lora=True,
        max_lora_rank=16,
        max_loras=1,
    ).llm_engine


class Loaded:
    """An adapter in an engine."""

    def __init__(self, engine: Any, folder: Path, number: int) -> None:
        from vllm.lora.request import LoRARequest  # noqa: TID251

        self.request = LoRARequest(f"version-{number}", number, str(folder))
        assert engine.add_lora(self.request)
        self._generator = VLLMGenerator(engine, end_of_turn_ids=[], adapter=lambda: self.request)

    def ask(self, question: Any) -> Any:
        with start_blocking_portal() as portal:
            future = portal.start_task_soon(question)
            self._generator.serve(until=future)
            return future.result()

    def score(self) -> torch.Tensor:
        return torch.tensor(self.ask(lambda: self._generator.score(IDS))[0])

    def sample(self) -> Any:
        return self.ask(lambda: self._generator.generate(IDS, Sampling(max_tokens=20)))


@pytest.mark.vllm
@pytest.mark.parametrize("number", range(len(ADAPTERS)), ids=list(ADAPTERS))
def test_vllm_applies_the_adapter_as_the_policy_does(tmp_path: Path, base: str, engine: Any, number: int) -> None:
    policy = adapted(base, **list(ADAPTERS.values())[number])
    assert adapter_problem(policy) is None
    assert max_lora_rank(policy.peft_config["default"]) <= 16
    save_adapter(policy, tmp_path / "adapter", whole)
    loaded = Loaded(engine, tmp_path / "adapter", 100 + number)
    expected = logps(policy)
    assert torch.allclose(loaded.score(), expected, atol=1e-4)
    with policy.disable_adapter():
        assert (logps(policy) - expected).abs().mean() > 0.1  # it is the adapter that was compared
    generation = loaded.sample()
    ids = torch.tensor([[*IDS, *generation.token_ids]])
    with torch.no_grad():
        sampled = policy(ids).logits[0, len(IDS) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(IDS) :, None])
    assert torch.allclose(torch.tensor(generation.logprobs), sampled.squeeze(1), atol=1e-4)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_peft_reads_what_was_written_as_the_same_policy(tmp_path: Path, base: str, name: str) -> None:
    policy = adapted(base, **ADAPTERS[name])
    num_bytes = save_adapter(policy, tmp_path / "adapter", whole)
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(tmp_path / "adapter")
    )
    assert torch.allclose(logits(read.eval()), logits(policy), atol=1e-4)
    assert set(read.peft_config) == {"default"}
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert num_bytes == sum(value.numel() * value.element_size() for value in state.values())


def test_writing_changes_nothing_in_the_policy(tmp_path: Path, base: str) -> None:
    policy = adapted(base, **ADAPTERS["patterns"])
    before, config = {n: p.clone() for n, p in policy.named_parameters()}, policy.peft_config["default"].to_dict()
    save_adapter(policy, tmp_path / "adapter", whole)
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    assert policy.peft_config["default"].to_dict() == config


def test_a_process_that_does_not_write_takes_part_and_writes_nothing(tmp_path: Path, base: str) -> None:
    gathered: list[int] = []

    def counted(parameters: Any) -> Any:
        gathered.append(len(parameters))
        return nullcontext()

    policy = adapted(base)
    num_bytes = save_adapter(policy, tmp_path / "not", counted, is_writer=False)
    assert not (tmp_path / "not").exists()
    assert gathered == [28]  # A and B of seven layers in two blocks
    assert num_bytes == save_adapter(policy, tmp_path / "written", whole)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_is_asked_for_a_rank_that_it_knows(base: str, rank: int, room: int) -> None:
    assert max_lora_rank(adapted(base, r=1, rank_pattern={"q_proj": rank}).peft_config["default"]) == room


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bias": "all"}, "`bias` is not 'none'"),
        ({"lora_bias": True}, "`bias` is not 'none'"),
        ({"use_dora": True}, "`use_dora` is on"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save` are whole layers"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": []}, "`target_parameters` are no layers"),
        ({"trainable_token_indices": [1, 2]}, "`trainable_token_indices` are rows of an embedding"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "`layer_replication` repeats layers"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights='pissa'` changes the base model"),
        ({"init_lora_weights": "olora"}, "`init_lora_weights='olora'` changes the base model"),
        ({"target_modules": ["q_proj", "lm_head"]}, "its adapter reaches the output layer"),
        ({"r": 513}, "its rank of 513 is above 512"),
        ({"rank_pattern": {"q_proj": 600}}, "its rank of 600 is above 512"),
    ],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_an_adapter_that_vllm_would_not_apply_is_told(settings: dict[str, Any], problem: str) -> None:
    model = tiny_model(TOKENIZER, tie_word_embeddings=False)
    policy = get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **settings}))
    assert adapter_problem(policy) == problem


def test_what_has_no_lora_adapter_is_told() -> None:
    assert adapter_problem(tiny_model(TOKENIZER)) == "the policy has no adapter"
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    problem = adapter_problem(get_peft_model(tiny_model(TOKENIZER), config))
    assert problem is not None
    assert "IA3, not LoRA" in problem


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_an_adapter_that_starts_beside_the_base_model_is_no_problem(init: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=init)
    assert adapter_problem(get_peft_model(tiny_model(TOKENIZER), config)) is None
