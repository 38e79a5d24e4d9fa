"""Training with vLLM, in process and on a real server: it samples from the policy that is trained, and nothing is left."""

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from helpers.runs import make_trainer, settings
from helpers.sums import ROWS, SERVERS
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import SamplerError, SettingsError
from mcp_grpo.sampling.vllm_backend import VLLMBackend, VLLMSettings, chosen_weight_sync
from mcp_grpo.sampling.vllm_server_backend import VLLMServerBackend
from mcp_grpo.trl_compat import VLLMGeneration


DATASET = Dataset.from_list(ROWS)
LORA = LoraConfig(r=8, target_modules="all-linear", rank_pattern={"q_proj": 2}, use_rslora=True)
ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
IN_PROCESS = {"use_vllm": True, "vllm_max_model_length": 2048, "vllm_engine_kwargs": ENGINE, "max_steps": 3}
SHARED_MEMORY = Path("/dev/shm")


def on_server(url: str) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "max_steps": 3}


@dataclass
class Run:
    """What is left of a run."""

    sampled: list[tuple[int, ...]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    moved: float = 0.0
    evaluated: dict[str, float] = field(default_factory=dict)
    attempts: list[Trajectory] = field(default_factory=list)
    weight_sync: str = ""
    adapters: set[Any] = field(default_factory=set)
    leftovers: list[Any] = field(default_factory=list)


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def leftovers(folder: Path, server: int, before: set[int]) -> list[Any]:
    """Processes that were not there before and are not of the vLLM server, and this process's files for vLLM."""
    started = [pid for pid in processes() - before if os.getsid(pid) != server]
    return [*started, *SHARED_MEMORY.glob(f"mcp-grpo-{os.getpid()}-*"), *folder.glob("sampler/*")]


def held_memory(trainer: Any) -> list[weakref.ref[Any]]:
    """What an engine in process keeps in memory: its weights and its cache."""
    if trainer.vllm_generation.mode != "colocate":
        return []
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    return [weakref.ref(runner.model), *map(weakref.ref, runner.kv_caches)]


def server_adapters(url: str) -> set[str]:
    with urlopen(f"{url}/v1/models", timeout=10) as response:
        return {model["id"] for model in json.load(response)["data"]} - {"sums"}


def run(
    folder: Path, model: str, peft_config: Any, adapters: Callable[[Any], set[Any]], server: Any, **changes: Any
) -> Run:
    """Train three steps, then evaluate."""
    run, before = Run(), processes()

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> Any:
        run.sampled += [attempt.completion_ids for attempt in trajectory]
        return exact_answer(trajectory)

    torch.manual_seed(0)  # the adapter's
    with make_trainer(folder, model, reward=reward, peft_config=peft_config, **changes) as trainer:
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        run.moved = max(
            (p - weights[n]).abs().max().item() for n, p in trainer.model.named_parameters() if n in weights
        )
        run.logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        run.evaluated = trainer.evaluate(DATASET)
        run.attempts = trainer.roll_out(DATASET, num_generations=2, temperature=0.0)
        run.weight_sync, run.adapters = trainer.vllm_generation.weight_sync, adapters(trainer)
        memory = held_memory(trainer)
    run.leftovers = [
        *leftovers(folder, server.process.pid, before),
        *(each() for each in memory if each() is not None),
    ]
    return run


@pytest.fixture(scope="module")
def in_process(
    tmp_path_factory: pytest.TempPathFactory, wide_adding_model: str, vllm_server_process: Any
) -> Callable[[str], Run]:
    """Runs with the engine in process, each made once."""
    kinds = {
        "full": (None, {}),
        "merged": (LORA, {"vllm_enable_sleep_mode": True}),  # of no meaning on a CPU
        "adapter": (LORA, {"weight_sync": "adapter", "vllm_enable_sleep_mode": True}),
    }
    made: dict[str, Run] = {}

    def adapters(trainer: Any) -> set[int]:
        return trainer.vllm_generation.llm.llm_engine.list_loras() if trainer.vllm_generation.sends_adapters else set()

    def make(kind: str) -> Run:
        if kind not in made:
            peft_config, changes = kinds[kind]
            folder = tmp_path_factory.mktemp(kind)
            changes = {**IN_PROCESS, **changes}
            made[kind] = run(folder, wide_adding_model, peft_config, adapters, vllm_server_process, **changes)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def on_a_server(
    tmp_path_factory: pytest.TempPathFactory, wide_adding_model: str, vllm_server: str, vllm_server_process: Any
) -> Run:
    def adapters(trainer: Any) -> set[str]:
        return server_adapters(vllm_server)

    folder, changes = tmp_path_factory.mktemp("server"), on_server(vllm_server)
    return run(folder, wide_adding_model, LORA, adapters, vllm_server_process, **changes)


def check(run: Run) -> None:
    assert len(run.logs) == 3
    for entry in run.logs:
        assert entry["sampler/weight_mismatch"] < 1e-4
        assert entry["align/logp_mae"] < 1e-4
        assert entry["sampler/sync_seconds"] > 0
        assert entry["sampler/sync_megabytes"] > 0
        assert entry["tools/call_frequency"] > 0.5
    assert run.moved > 1e-4
    assert len(run.sampled) >= 24
    assert run.evaluated["eval_reward"] >= 0
    assert len(run.attempts) == 8
    first = run.attempts[0]
    assert first.exchanges[0].result.text == "5"
    assert {attempt.completion_ids for attempt in run.attempts} == {first.completion_ids}
    assert first.messages[-1]["role"] == "assistant"
    assert not run.leftovers


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
def test_it_trains_in_process_on_what_the_policy_says_now(in_process: Callable[[str], Run], kind: str) -> None:
    run = in_process(kind)  # that of all weights at another temperature in its first step
    check(run)
    assert run.weight_sync == ("adapter" if kind == "adapter" else "merge")
    # Prompts have their tools in common, and a later turn begins with the one before.
    assert all(0.5 < entry["rollout/cached_fraction"] < 1 for entry in run.logs)
    # Only the adapter of the last step is left in the engine; evaluation after it sends another one.
    assert len(run.adapters) == (kind == "adapter")


@pytest.mark.vllm
def test_an_adapter_is_much_less_to_send_and_samples_the_same(in_process: Callable[[str], Run]) -> None:
    merged, adapter = in_process("merged"), in_process("adapter")
    assert adapter.logs[0]["sampler/sync_megabytes"] < 0.5 * merged.logs[0]["sampler/sync_megabytes"]
    assert adapter.sampled[:8] == merged.sampled[:8]


@pytest.mark.vllm
def test_it_trains_on_a_server_as_in_process(
    in_process: Callable[[str], Run], on_a_server: Run, vllm_server: str
) -> None:
    check(on_a_server)
    assert on_a_server.weight_sync == "adapter"
    assert len(on_a_server.adapters) == 1
    assert not server_adapters(vllm_server)
    same = in_process("adapter")
    assert [entry["reward"] for entry in on_a_server.logs] == [entry["reward"] for entry in same.logs]
    assert on_a_server.sampled == same.sampled


def only_once(backend: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not arrive any more after the first time, and nobody says so."""
    sync, done = backend.sync_weights, []

    def sync_weights(self: Any) -> None:
        if not done:
            done.append(sync(self))

    monkeypatch.setattr(backend, "sync_weights", sync_weights)


@pytest.mark.vllm
def test_a_run_in_process_stops_when_weights_do_not_arrive(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_once(VLLMBackend, monkeypatch)
    with make_trainer(tmp_path, wide_adding_model, **IN_PROCESS) as trainer:
        with pytest.raises(SamplerError, match=r"sampler's log-probabilities differ|still has old weights"):
            trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.vllm
def test_a_run_on_a_server_stops_when_weights_do_not_arrive(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch, vllm_server: str
) -> None:
    only_once(VLLMServerBackend, monkeypatch)
    with make_trainer(tmp_path, wide_adding_model, peft_config=LORA, **on_server(vllm_server)) as trainer:
        with pytest.raises(SamplerError, match=r"sampler's log-probabilities differ|still has old weights"):
            trainer.train()
        assert 1 <= trainer.state.global_step <= 2  # B is zero at first, so that the first step changes little
    assert not server_adapters(vllm_server)


@pytest.mark.vllm
def test_constrained_turns_know_what_the_policy_gave_them(tmp_path: Path, wide_adding_model: str) -> None:
    changes = {**IN_PROCESS, "max_steps": 1, "constrained_decoding": True}
    with make_trainer(tmp_path, wide_adding_model, **changes) as trainer:
        (attempt,) = trainer.roll_out(DATASET.select([0]))
        ids = torch.tensor([[*attempt.prompt_ids, *attempt.completion_ids]])
        with torch.no_grad():
            logps = trainer.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        trainer.train()
    start, num_sampled = len(attempt.prompt_ids) - 1, 0
    for segment in attempt.segments:
        if segment.logprobs is not None:
            num_sampled += 1
            assert segment.allowed_logprobs is not None
            free = torch.tensor(segment.logprobs) + torch.tensor(segment.allowed_logprobs)
            assert torch.allclose(free, logps[start : start + len(segment.token_ids)], atol=1e-4)
        start += len(segment.token_ids)
    assert num_sampled == attempt.num_turns >= 1
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["tools/call_frequency"] > 0.5
    assert entry["mask/forced_fraction"] > 0


@pytest.mark.vllm
@pytest.mark.full
def test_an_adapter_that_trains_rows_of_tokens_is_sampled_with_them(tmp_path: Path, wide_adding_model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(wide_adding_model)
    rows = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "5"])
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], trainable_token_indices=rows)

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(trajectory))]  # so that every update moves the policy

    changes = {**IN_PROCESS, "max_steps": 2, "learning_rate": 5e-2}
    with make_trainer(tmp_path, wide_adding_model, reward=reward, peft_config=adapter, **changes) as trainer:
        deltas = [p for name, p in trainer.model.named_parameters() if "trainable_tokens_delta" in name]
        untrained = [delta.detach().clone() for delta in deltas]
        trainer.train()
        moved = [(delta - old).abs().max() for delta, old in zip(deltas, untrained, strict=True)]
        attempts = trainer.roll_out(DATASET.select([0]), num_generations=4)
        policy, sampled_with = trainer.model, trainer.vllm_generation.weight_sync
        logps = [logps_of(policy, attempt) for attempt in attempts]
        with policy.disable_adapter():
            before = [logps_of(policy, attempt) for attempt in attempts]
    assert sampled_with == "merge"  # vLLM's adapters have no rows of tokens
    assert moved
    assert min(moved) > 1e-3
    for attempt, own, old in zip(attempts, logps, before, strict=True):
        sampled = torch.tensor([*attempt.sampled_mask], dtype=torch.bool)
        given = torch.tensor(attempt.logprobs)[sampled]
        assert torch.allclose(given, own[sampled], atol=1e-4)
        assert not torch.allclose(given, old[sampled], atol=1e-2)
    with pytest.raises(SettingsError, match="rows of an embedding"):
        make_trainer(tmp_path, wide_adding_model, peft_config=adapter, **IN_PROCESS, weight_sync="adapter")


@torch.no_grad()
def logps_of(policy: Any, attempt: Trajectory) -> torch.Tensor:
    """The log-probabilities of an attempt's completion by the trainer's own weights."""
    ids = torch.tensor([[*attempt.prompt_ids, *attempt.completion_ids]])
    logps = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return logps[len(attempt.prompt_ids) - 1 :]


@pytest.mark.vllm
def test_an_engine_that_sleeps_does_so_once_per_batch_also_if_groups_are_replaced(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        events.append("reward")
        return [1.0] * len(trajectory)  # no spread, so that every group is replaced

    # vLLM cannot sleep on a CPU: it is only written down when it would.
    monkeypatch.setattr(VLLMBackend, "sleep", lambda self: events.append("sleep"))
    monkeypatch.setattr(VLLMBackend, "wake_up", lambda self: events.append("wake up"))
    with make_trainer(
        tmp_path, wide_adding_model, reward=reward, dynamic_sampling=1, **{**IN_PROCESS, "max_steps": 2}
    ) as trainer:
        trainer._collector.sampler.sleeps = True
        trainer.train()
    # Once to find groups without spread, and once more after they were replaced; what was scored is not scored again.
    assert events == ["wake up", "reward", "reward", "sleep"] * 2


@pytest.mark.vllm
def test_an_engine_without_room_for_a_trajectory_says_which_setting_to_change(
    tmp_path: Path, wide_adding_model: str
) -> None:
    no_room = IN_PROCESS | {"vllm_engine_kwargs": ENGINE | {"kv_cache_memory_bytes": 64 << 10}}
    with pytest.raises(SettingsError, match=r"lower `vllm_max_model_length` \(2048\)"):
        make_trainer(tmp_path, wide_adding_model, **no_room)


@pytest.mark.vllm
def test_a_trainer_that_trains_again_samples_from_the_weights_it_has_by_then(
    tmp_path: Path, wide_adding_model: str
) -> None:
    def reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(trajectory))]  # so that every update moves the policy

    changes = {**IN_PROCESS, "max_steps": 1, "learning_rate": 1e-2}
    with make_trainer(tmp_path, wide_adding_model, reward=reward, **changes) as trainer:
        for _ in range(2):  # both begin at step 0
            trainer.train()
            (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
            assert entry["align/logp_mae"] < 1e-5
            assert entry["grad_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_vllm": True, "vllm_tensor_parallel_size": 2},
            '`vllm_tensor_parallel_size` above 1.*vllm_mode="server"',
        ),
        (
            {"use_vllm": True, "constrained_decoding": True, "temperature": 0.7},
            "`constrained_decoding` with vLLM needs `temperature=1.0`, got 0.7",
        ),
        ({"vllm_structured_outputs_regex": "a+"}, "`vllm_structured_outputs_regex` constrains"),
        (
            {"use_vllm": True, "vllm_server_urls": ["http://a"]},
            '`vllm_server_urls` are of no use.*Set `vllm_mode="server"`',
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        MCPGRPOTrainer("no/model", exact_answer, settings(tmp_path, **changes), DATASET, servers=SERVERS)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_quantised_model_is_not_merged(mode: str) -> None:
    tokenizer = family_tokenizer("qwen3")
    policy = get_peft_model(tiny_model(tokenizer), LoraConfig(target_modules=["q_proj"]))
    policy.config.quantization_config = {"quant_method": "bitsandbytes"}

    def make(policy: Any, weight_sync: Any) -> Any:
        VLLMBackend(settings=VLLMSettings(weight_sync=weight_sync), model=policy, mode=mode)

    with pytest.raises(SettingsError, match=r'quantised.*Set `weight_sync` to "adapter" or "auto"'):
        make(policy, "merge")
    policy.peft_config["default"].use_dora = True
    with pytest.raises(SettingsError, match=r"quantised.*but `use_dora` is on"):
        make(policy, "auto")


@pytest.mark.parametrize(("kind", "is_double"), [("fp4", True), ("nf4", False)])
def test_a_model_that_is_quantised_in_another_way_than_vllm_s_is_refused(kind: str, is_double: bool) -> None:
    policy = get_peft_model(tiny_model(family_tokenizer("qwen3")), LoraConfig(target_modules=["q_proj"]))
    policy.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_double
    )
    with pytest.raises(SettingsError, match=f"but the policy has {kind}.*bnb_4bit_use_double_quant=True"):
        VLLMBackend(settings=VLLMSettings(), model=policy, mode="colocate")


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["as it was", "wider", "rounded"],
)
def test_a_model_that_was_rounded_before_it_was_quantised_is_refused(
    tmp_path: Path, stored: torch.dtype, loaded: torch.dtype
) -> None:
    tiny_model(family_tokenizer("qwen3")).to(stored).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=loaded)
    base.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    policy = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    if loaded == torch.float32:
        assert chosen_weight_sync("auto", policy, "colocate") == "adapter"
    else:
        with pytest.raises(SettingsError, match=r'is in float32.*rounded to bfloat16.*Load it with `dtype="float32"`'):
            VLLMBackend(settings=VLLMSettings(), model=policy, mode="colocate")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "given", "is_own"),
    [
        (DistributedType.NO, None, True),
        (DistributedType.NO, "23001", False),
        (DistributedType.MULTI_GPU, None, False),
    ],
    ids=["alone", "alone, told where", "one of several"],
)
def test_a_run_meets_its_vllm_at_a_port_of_its_own_unless_it_was_told_where(
    monkeypatch: pytest.MonkeyPatch, kind: DistributedType, given: str | None, is_own: bool
) -> None:
    monkeypatch.setenv("MASTER_PORT", given or "")
    seen = []

    def init_vllm(_: Any) -> None:
        seen.append(os.environ["MASTER_PORT"])
        monkeypatch.setenv("RANK", "0")  # as TRL does

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", init_vllm)
    backend = object.__new__(VLLMBackend)
    backend.accelerator = SimpleNamespace(distributed_type=kind, device=torch.device("cuda"))
    backend._settings, backend.weight_sync, backend.enable_sleep_mode = VLLMSettings(), "merge", False
    backend.max_num_seqs = 8
    backend._init_vllm()
    # TRL's first choice, if it is free: runs that start at the same time would all make it.
    assert (int(seen[0] or 29500) not in (29500, 23001)) == is_own
    assert seen[0] == (given or "") or is_own
    # A later run in this process must not take itself for one of several.
    assert os.environ["MASTER_PORT"] == (given or "")
    assert ("RANK" in os.environ) == (kind != DistributedType.NO)


def test_an_adapter_that_vllm_cannot_apply_is_refused_where_it_is_asked_for() -> None:
    policy = get_peft_model(
        tiny_model(family_tokenizer("qwen3")), LoraConfig(target_modules=["q_proj"], use_dora=True)
    )
    with pytest.raises(SettingsError, match="not possible: `use_dora` is on"):
        VLLMBackend(settings=VLLMSettings(weight_sync="adapter"), model=policy, mode="server")
