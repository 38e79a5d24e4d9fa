"""The supervised warm start: its tokens are those of a rollout, and its loss is only on what the policy writes."""

import json
import random
from pathlib import Path
from typing import Any

import anyio
import pytest
import sft_warmup
import torch
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import ScriptedGenerator, save_tiny_model
from helpers.ranks import launch
from helpers.runs import make_trainer
from helpers.sums import CALL, ROWS, SERVERS, TEMPLATE_KWARGS
from peft import PeftModel
from servers.sums import server
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mcp_grpo import Task, ToolPool
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks
from mcp_grpo.doctor.stand_in import SPECIAL_TOKENS, STAND_IN, TAGS, save_stand_in, tokenizer_of
from mcp_grpo.errors import SettingsError, TemplateError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.rollout import Limits, Renderer, conversation_tokens, roll_out
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train import imitation
from mcp_grpo.types import Trajectory


pytestmark = pytest.mark.full

SOLUTION = {
    "steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}], "evidence": ["5"], "fails": False}],
    "final": "5",
}


def renderer_of(family: str, **kwargs: Any) -> Renderer:
    tokenizer = family_tokenizer(family)
    return Renderer(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer), chat_template_kwargs=kwargs)


def attempt(renderer: Renderer, turns: list[str], servers: Any, task: Task) -> tuple[Trajectory, list[dict[str, Any]]]:
    """A rollout in which the policy says given texts."""

    async def run() -> tuple[Trajectory, list[dict[str, Any]]]:
        async with ToolPool(servers) as pool:
            trajectory = await roll_out(
                task,
                pool=pool,
                renderer=renderer,
                generator=ScriptedGenerator(renderer.tokenizer, turns),
                limits=Limits(max_turns=9, max_completion_length=100_000),
            )
            return trajectory, [tool.schema for tool in pool.catalog.tools_for(task)]

    return anyio.run(run)


@pytest.mark.parametrize("thinking", [False, True])
def test_the_tokens_of_a_conversation_are_those_of_a_rollout(thinking: bool) -> None:
    renderer = renderer_of("qwen3", enable_thinking=thinking)
    opening = "<think>\n\n</think>\n\n" if thinking else ""
    both = CALL.replace("<|im_end|>", "\n" + CALL)  # two calls in one turn
    turns = [opening + CALL, opening + both, opening + "5<|im_end|>"]
    task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
    trajectory, tools = attempt(renderer, turns, {"sums": server}, task)
    assert len(trajectory.exchanges) == 3
    token_ids, mask = conversation_tokens(renderer, task.prompt, trajectory.messages, tools)
    assert tuple(token_ids) == trajectory.prompt_ids + trajectory.completion_ids
    assert tuple(mask) == (0,) * len(trajectory.prompt_ids) + trajectory.sampled_mask


def test_scripted_solutions_of_the_desk_are_written_as_a_policy_would_write_them() -> None:
    renderer = renderer_of("qwen3", **TEMPLATE_KWARGS)
    tasks = random.Random(0).sample(tasks_from_rows(build_tasks("train", 40)), 4)
    solutions = run_solutions(tasks, desk_servers())
    assert not any(one.problems for one in solutions)
    tools = anyio.run(imitation.tools_of, tasks, desk_servers())
    for one, schemas in zip(solutions, tools, strict=True):
        messages = one.trajectory.messages
        token_ids, mask = conversation_tokens(renderer, one.trajectory.task.prompt, messages, schemas)
        written = renderer.tokenizer.decode([t for t, is_written in zip(token_ids, mask, strict=True) if is_written])
        *calls, final, nothing = written.split("<|im_end|>")
        assert nothing == ""
        assert final == messages[-1]["content"]
        history = list(renderer.prompt_ids(one.trajectory.task.prompt, schemas))
        parsed = [
            renderer.parse(
                history, renderer.tokenizer(f"{call}<|im_end|>", add_special_tokens=False)["input_ids"], schemas
            )
            for call in calls
        ]
        assert [call for turn in parsed for call in turn.calls] == [e.call for e in one.trajectory.exchanges]
        assert not any(turn.malformed for turn in parsed)


def test_a_result_after_the_last_turn_is_read_by_nobody() -> None:
    renderer = renderer_of("qwen3", **TEMPLATE_KWARGS)
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "5"},
    ]
    prompt = [{"role": "user", "content": "2+3?"}]
    assert conversation_tokens(renderer, prompt, messages, []) == conversation_tokens(
        renderer, prompt, messages[:1], []
    )
    with pytest.raises(TemplateError, match="enable_thinking"):
        renderer_of("glm4moe").turn_ids({"role": "assistant", "content": "5"})


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[str]]:
    """A warm start of a tiny model, half on scripted solutions and half on recorded ones."""
    folder = tmp_path_factory.mktemp("warm")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    recorded = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    rows = [{**row, "solution": SOLUTION} for row in ROWS[:2]] + [{**row, "messages": recorded} for row in ROWS[2:]]
    rows.append({**ROWS[0], "task_id": "broken", "solution": {**SOLUTION, "final": "6"}})
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "servers.json").write_text(json.dumps({"mcpServers": SERVERS}))
    model = save_tiny_model(folder / "model", hidden_size=64, intermediate_size=128)
    arguments = ["--model_name_or_path", model, "--servers", str(folder / "servers.json")]
    arguments += ["--tasks", str(folder / "tasks.jsonl"), "--output_dir", str(folder / "out"), "--use_cpu", "true"]
    arguments += [
        "--max_steps",
        "120",
        "--learning_rate",
        "5e-3",
        "--gradient_accumulation_steps",
        "1",
    ]
    arguments += ["--logging_steps", "1", "--disable_tqdm", "true", "--report_to", "none", "--save_strategy", "no"]
    return folder / "out", sft_warmup.main(arguments), arguments


def test_the_loss_of_the_warm_start_is_only_on_what_the_policy_writes(warm: tuple[Path, Any, list[str]]) -> None:
    _, trainer, _ = warm
    assert len(trainer.train_dataset) == 4  # the solution that does not solve its task is left out
    batch = next(iter(trainer.get_train_dataloader()))
    tokenizer = trainer.processing_class
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        written = tokenizer.decode(labels[labels != -100])
        assert written == f"{CALL}5<|im_end|>"
        assert torch.equal(ids[labels != -100], labels[labels != -100])
        assert "<tool_response>" in tokenizer.decode(ids)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 4
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    logps = logits[:, :-1].float().log_softmax(-1)
    labels = batch["labels"][:, 1:]
    mean = -logps.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)[labels != -100].mean()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch))
    assert loss.item() == pytest.approx(mean.item(), rel=1e-3)


def test_reinforcement_learning_goes_on_from_a_warm_start(warm: tuple[Path, Any, list[str]], tmp_path: Path) -> None:
    folder, _, _ = warm
    with make_trainer(tmp_path, str(folder), max_steps=1) as trainer:
        task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
        trajectories = trainer.roll_out([task], num_generations=8)
    assert sum(t.answer == "5" and len(t.exchanges) == 1 for t in trajectories) >= 6


def test_an_adapter_is_merged_for_what_follows(warm: tuple[Path, Any, list[str]], tmp_path: Path) -> None:
    _, _, arguments = warm
    adapter = [
        "--use_peft",
        "true",
        "--lora_target_modules",
        "all-linear",
        "--max_steps",
        "2",
        "--output_dir",
        str(tmp_path),
    ]
    attention = ["--model_init_kwargs", json.dumps({"attn_implementation": "eager"})]
    trainer = sft_warmup.main([*arguments, *adapter, *attention, "--num_check_tasks", "0"])
    assert trainer.model.config._attn_implementation == "eager"
    check_merged(arguments[arguments.index("--model_name_or_path") + 1], tmp_path)


def test_a_warm_start_says_what_it_was_good_for_and_one_that_was_for_nothing_fails(
    warm: tuple[Path, Any, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, arguments = warm
    few = ["--output_dir", str(tmp_path), "--max_steps", "1"]
    with pytest.raises(SettingsError, match=r"0% of its calls can be made, less than `min_valid_calls` \(50%\)"):
        sft_warmup.main([*arguments, *few])
    said = capsys.readouterr().out
    assert "Of 5 attempts 0 called a tool; 0% of the calls could be made" in said
    assert "The tasks were imitated before." in said  # there are too few to hold some out
    assert (tmp_path / "model.safetensors").exists()  # nothing is lost


@pytest.mark.parametrize(
    ("number", "flags", "imitated", "attempted"),
    [
        (64, {}, range(48), range(48, 64)),
        (40, {"num_check_tasks": 10}, range(30), range(30, 40)),
        (39, {"num_check_tasks": 10}, range(39), []),
        (40, {"num_tasks": 20, "num_check_tasks": 10}, range(20), range(20, 30)),
        (22, {"num_tasks": 20, "num_check_tasks": 4}, range(16), range(16, 20)),
        (40, {"num_check_tasks": 0}, range(40), []),
    ],
)
def test_tasks_to_attempt_are_held_out_where_at_most_a_quarter_is_missed(
    tmp_path: Path, number: int, flags: dict[str, int], imitated: Any, attempted: Any
) -> None:
    rows = [{**ROWS[0], "task_id": str(i)} for i in range(number)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = sft_warmup.WarmupArguments(tasks=str(tmp_path / "tasks.jsonl"), **flags)
    found = tuple([int(task.task_id) for task in tasks] for tasks in sft_warmup.split_tasks(script))
    assert found == (list(imitated), list(attempted))


def test_tasks_of_the_desk_to_attempt_are_of_its_validation_split() -> None:
    tasks, others = sft_warmup.split_tasks(sft_warmup.WarmupArguments(num_tasks=20))
    assert [task.prompt for task in tasks] == [task.prompt for task in tasks_from_rows(build_tasks("train", 20))]
    assert [task.prompt for task in others] == [task.prompt for task in tasks_from_rows(build_tasks("validation", 16))]


def test_a_warm_start_in_fenced_json_is_found_by_what_follows(
    warm: tuple[Path, Any, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, arguments = warm
    sft_warmup.main(
        [*arguments, "--output_dir", str(tmp_path / "warm"), "--call_format", "json", "--num_check_tasks", "1"]
    )
    said = capsys.readouterr().out
    assert "Of 1 attempts 1 called a tool" in said
    assert "The tasks were not imitated before." in said
    with make_trainer(tmp_path / "run", str(tmp_path / "warm"), max_steps=1) as trainer:
        trainer.train()
        assert trainer.state.log_history[0]["tools/valid_rate"] > 0.5
        task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
        trajectories = trainer.roll_out([task], temperature=0.0)
    [turn, *_] = [segment for segment in trajectories[0].segments if segment.sampled]
    assert trainer.processing_class.decode(turn.token_ids).startswith('```json\n{"name": "add"')
    assert trajectories[0].exchanges[0].result.text == "5"


@pytest.mark.parametrize("trains_rows", [True, False])
def test_an_adapter_learns_tags_that_were_never_trained_if_it_trains_their_rows(
    warm: tuple[Path, Any, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains_rows: bool
) -> None:
    folder, _, arguments = warm
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tags = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    model.resize_token_embeddings(len(tokenizer) + 20, mean_resizing=False)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[[*tags, *range(len(tokenizer), len(rows))]] = 0.01 * torch.randn(rows.shape[1])
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    changed = ["--model_name_or_path", str(tmp_path / "base"), "--output_dir", str(tmp_path / "out")]
    changed += ["--use_peft", "true", "--lora_target_modules", "all-linear", "--call_format", "template"]
    if not trains_rows:
        monkeypatch.setattr(imitation, "train_rows", lambda *args: None)
        with pytest.raises(SettingsError, match="has not taught the policy to call tools"):
            sft_warmup.main([*arguments, *changed])
        return
    sft_warmup.main([*arguments, *changed])  # which measures whether it can call
    with make_trainer(tmp_path / "rl", str(tmp_path / "out" / "merged"), max_steps=1) as trainer:
        task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
        trajectories = trainer.roll_out([task], num_generations=8)
    assert sum(bool(t.exchanges) for t in trajectories) >= 6


def check_merged(base: str, folder: Path) -> None:
    """The merged model is the base with the saved adapter, and not the base alone."""
    ids = torch.arange(50).unsqueeze(0)
    with torch.no_grad():
        before, alone = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (base, folder / "merged"))
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)(ids).logits
    torch.testing.assert_close(alone, adapted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(alone, before, atol=1e-3)


def test_processes_that_share_the_weights_imitate_the_same_and_merge_all_of_it(
    warm: tuple[Path, Any, list[str]], tmp_path: Path
) -> None:
    _, _, arguments = warm
    sharing = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    (tmp_path / "fsdp.yaml").write_text(json.dumps({"fsdp": True, "fsdp_config": sharing}))
    adapter = ["--use_peft", "true", "--lora_target_modules", "all-linear", "--max_steps", "4"]
    adapter += ["--config", str(tmp_path / "fsdp.yaml"), "--output_dir", str(tmp_path), "--min_valid_calls", "0"]
    finished = launch("warm_ranks.py", *arguments, *adapter)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("Of 5 attempts ") == 1
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["is_sharded"]
    assert (first["asked"], second["asked"]) == (["0"], [])
    assert first["num_rows"] == second["num_rows"] == 4
    check_merged(arguments[arguments.index("--model_name_or_path") + 1], tmp_path)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_several_processes_fail_too_where_a_warm_start_was_for_nothing(
    warm: tuple[Path, Any, list[str]], tmp_path: Path, is_in_time: bool
) -> None:
    _, _, arguments = warm
    few = ["--output_dir", tmp_path, "--max_steps", "1", "--ddp_timeout", "600" if is_in_time else "10"]
    finished = launch(Path(sft_warmup.__file__), *arguments, *few)
    assert finished.returncode != 0
    assert (tmp_path / "model.safetensors").exists()
    if is_in_time:
        assert "Of 5 attempts 0 called a tool; 0% of the calls could be made" in finished.stdout
        assert "0% of its calls can be made, less than `min_valid_calls` (50%)" in finished.stderr
    else:
        assert "could not be measured: It took more than 9 seconds." in finished.stderr
        assert f"--model {tmp_path} --servers SERVERS" in finished.stderr


def test_solutions_that_are_too_long_are_left_out_and_none_at_all_is_refused(
    warm: tuple[Path, Any, list[str]],
) -> None:
    _, _, arguments = warm
    with pytest.raises(SettingsError, match="nothing to imitate"):
        sft_warmup.main([*arguments, "--max_length", "50"])


@pytest.fixture(scope="module")
def toolless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose chat template knows no tools, and whose tokenizer has no tokens for them."""
    folder = tmp_path_factory.mktemp("toolless")
    tokenizer, _ = tokenizer_of(STAND_IN)
    letters = {token: i for token, i in tokenizer.get_vocab().items() if i < 256}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = tokenizer.backend_tokenizer.pre_tokenizer, decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    )
    assert not set(TAGS) & set(plain.get_vocab())
    save_stand_in(str(folder), plain)
    return str(folder)


@pytest.mark.parametrize("source", ["a tokenizer", "a file"])
def test_a_model_that_knows_no_tools_gets_a_template_that_does(
    warm: tuple[Path, Any, list[str]], toolless: str, tmp_path: Path, source: str
) -> None:
    _, _, arguments = warm
    tokenizer, _ = tokenizer_of(STAND_IN)
    if source == "a tokenizer":
        tokenizer.save_pretrained(tmp_path / "source")
        path = tmp_path / "source"
    else:
        path = tmp_path / "qwen3.jinja"
        path.write_text(tokenizer.chat_template)
    changed = ["--model_name_or_path", toolless, "--chat_template_path", str(path), "--max_steps", "1"]
    changed += ["--num_check_tasks", "0"]
    out = tmp_path / "out"
    trainer = sft_warmup.main([*arguments, *changed, "--output_dir", str(out)])
    batch = next(iter(trainer.get_train_dataloader()))
    taught = trainer.processing_class.decode(batch["input_ids"][0])
    assert all(part in taught for part in ("# Tools", "<tool_call>", "<tool_response>"))
    saved = AutoTokenizer.from_pretrained(out)
    is_one_token = {tag: len(saved(tag, add_special_tokens=False)["input_ids"]) == 1 for tag in TAGS}
    assert set(is_one_token.values()) == {source == "a tokenizer"}
    assert AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().num_embeddings >= len(saved)
    with make_trainer(tmp_path / "rl", str(out), max_steps=1) as trained:
        task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
        [trajectory] = trained.roll_out([task], num_generations=1)
    assert saved.decode(trajectory.prompt_ids) in taught


def test_an_adapter_cannot_learn_new_tokens(warm: tuple[Path, Any, list[str]], toolless: str) -> None:
    _, _, arguments = warm
    with pytest.raises(SettingsError, match="Leave `use_peft` and quantisation out"):
        sft_warmup.main([*arguments, "--chat_template_path", toolless, "--use_peft", "true"])
    with pytest.raises(SettingsError, match=r"not there: no-such\.jinja"):
        sft_warmup.main([*arguments, "--chat_template_path", "no-such.jinja"])
