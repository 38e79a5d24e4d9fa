"""Training on real servers: what is trained on, what is left out, and what is refused before it starts."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.marks import full
from helpers.policies import save_tiny_model
from helpers.processes import left_behind
from helpers.runs import BRIEF, Attempting, make_trainer, settings
from helpers.sums import ROWS, SERVER, SERVERS
from peft import LoraConfig, PeftModel, get_peft_model
from servers.sums import server
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.build import make_sampler
from mcp_grpo.errors import (
    CatalogError,
    RolloutError,
    ServerConfigError,
    SettingsError,
    TaskFormatError,
    ToolServerError,
)
from mcp_grpo.trl_compat import ROW_MEAN_LOSSES
from mcp_grpo.types import Segment, StopReason, Task


config = partial(settings, **BRIEF)
DATASET = Dataset.from_list(ROWS)
HERE = {"sums": server}  # in this process, where it starts at once
OTHER_LOSSES = [name for name in ROW_MEAN_LOSSES if name != "grpo"]


class Watch(TrainerCallback):
    """Keeps the gradients of every step, and what was logged."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def test_it_trains_an_adapter_on_a_real_server(tmp_path: Path, adding_model: str) -> None:
    seen: list[Trajectory] = []

    def reward(
        prompts: list, completions: list, trajectory: list[Trajectory], colour: list[str], **kwargs: Any
    ) -> Any:
        seen.extend(trajectory)
        assert set(colour) == {"red"}
        assert prompts[0] == [{"role": "user", "content": "2+3?"}]
        assert [list(attempt.messages) for attempt in trajectory] == completions
        return exact_answer(trajectory)

    with MCPGRPOTrainer(
        adding_model,
        reward,
        config(tmp_path, log_completions=True),
        DATASET,
        servers=SERVERS,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ) as trainer:
        before = {n: p.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        trainer.save_model()
        trainer.create_model_card(model_name="sums")
    assert len(seen) == 16
    called = [attempt for attempt in seen if attempt.exchanges and attempt.exchanges[0].result.text == "5"]
    assert len(called) > 8
    assert {message["role"] for attempt in called for message in attempt.messages} == {"assistant", "tool"}
    assert any(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    first = trainer.state.log_history[0]
    assert first["tools/call_frequency"] > 0.5
    assert first["stop/server_failed"] == 0
    card = (tmp_path / "README.md").read_text()
    assert "| `add` | sums | Add. |" in card
    assert str(tmp_path) not in card
    assert list((tmp_path / "completions").glob("*.parquet"))
    assert sum(value for key, value in first.items() if key.startswith("stop/")) == pytest.approx(1)

    base = AutoModelForCausalLM.from_pretrained(adding_model)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    ids = torch.tensor([seen[0].prompt_ids])
    with torch.no_grad():
        trained = trainer.model.eval()(ids).logits
        assert torch.allclose(loaded(ids).logits, trained, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.chat_template == trainer._collector.renderer.chat_template
    assert trainer.processing_class.chat_template != tokenizer.chat_template  # the user's own is left as it was
    assert not left_behind()


class Ratios(Attempting):
    """Keeps the batches that reach the loss, and the ratios of their tokens."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.inputs = [*getattr(self, "inputs", []), inputs]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        is_given = self._pass is not None
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled() and not is_given:  # in the loss, not before it
            inputs = self.inputs[-1]
            mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            ratios = (output[0].detach() - inputs["old_per_token_logps"])[mask].exp()
            self.ratios = [*getattr(self, "ratios", []), ratios]
        return output


def test_the_sampled_tokens_are_trained_on_with_the_sampler_s_log_probabilities(
    tmp_path: Path, adding_model: str
) -> None:
    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    settings = config(tmp_path, num_iterations=2, max_steps=2, learning_rate=1e-2)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
    with Ratios(adding_model, reward, settings, DATASET, servers=HERE, peft_config=lora) as trainer:
        trainer.train()
        trajectories = {t.completion_ids: t for t in trainer._batch.trajectories}
    batch = trainer.inputs[0]
    for row, length in enumerate(batch["completion_mask"].sum(dim=1).tolist()):
        trajectory = trajectories[tuple(batch["completion_ids"][row, :length].tolist())]
        assert tuple(batch["tool_mask"][row, :length].tolist()) == trajectory.sampled_mask
        assert torch.allclose(batch["old_per_token_logps"][row, :length], torch.tensor(trajectory.logprobs), atol=1e-3)
    first, second = trainer.ratios
    assert (first - 1).abs().max() < 1e-3  # before the first step it is the policy that sampled
    assert (second - 1).abs().max() > 1e-2  # after it, it is not


def made_up(task: Task, rng: torch.Generator, stop_reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 200, (count,), generator=rng).tolist())

    segments = (
        Segment(token_ids=tokens(5), logprobs=(-1.0,) * 5),
        Segment(token_ids=tokens(7)),
        Segment(token_ids=tokens(3), logprobs=(-2.0,) * 3),
    )
    answer = ({"role": "assistant", "content": "x" * int(torch.randint(0, 9, (1,), generator=rng))},)
    return Trajectory(
        task=task,
        prompt_ids=(1, 2, 3),
        segments=segments,
        messages=answer,
        exchanges=(),
        stop_reason=stop_reason,
        error="the server broke" if stop_reason.is_failure else None,
    )


def test_old_log_probabilities_are_those_recorded_whatever_the_policy_would_say_now(
    tmp_path: Path, adding_model: str
) -> None:
    class Replay(Ratios):
        def attempt(self, tasks: Any, **kwargs: Any) -> list[Trajectory]:
            rng = torch.Generator().manual_seed(0)
            return [made_up(task, rng) for task in tasks]

    settings = config(tmp_path, max_steps=1, num_iterations=2)  # with which TRL computes its own
    with Replay(adding_model, _length, settings, DATASET, servers=HERE) as trainer:
        trainer.train()
    (inputs,) = trainer.inputs
    recorded = torch.tensor([-1.0] * 5 + [0.0] * 7 + [-2.0] * 3)
    assert torch.equal(inputs["old_per_token_logps"], recorded.expand(8, -1))
    assert torch.equal(inputs["tool_mask"], (recorded != 0).long().expand(8, -1))


def test_it_works_inside_a_running_event_loop_as_notebooks_have_one(tmp_path: Path, adding_model: str) -> None:
    async def cell() -> list[Trajectory]:
        with MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), DATASET, servers=SERVERS) as trainer:
            return trainer.roll_out(DATASET.select([0]))

    (trajectory,) = asyncio.run(cell())
    assert trajectory.num_turns > 0


def _length(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    return [float(len(attempt.messages[-1]["content"])) for attempt in trajectory]


def _gradients(folder: Path, stops: list[StopReason], seed: int = 0, **settings: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step on made-up trajectories that stopped as given; only failed ones differ between calls."""

    class Replay(Attempting):
        def attempt(self, tasks: Any, **kwargs: Any) -> list[Trajectory]:
            rng, failed_rng = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
            return [made_up(t, failed_rng if s.is_failure else rng, s) for t, s in zip(tasks, stops, strict=True)]

    tokenizer, watch = family_tokenizer("qwen3"), Watch()
    # Their log-probabilities are made up, too, and far from the policy's.
    sizes = {"per_device_train_batch_size": len(stops), "num_generations": len(stops), "max_steps": 1}
    sizes |= {"ratio_gate": 1e9}
    args = config(folder, max_failed_fraction=0.5, **{**sizes, **settings})
    save_tiny_model(folder / "model")  # by path, because the reference is loaded by it
    with Replay(
        str(folder / "model"),
        _length,
        args,
        DATASET,
        servers=HERE,
        processing_class=tokenizer,
        callbacks=[watch],
    ) as trainer:
        trainer.train()
    return watch.gradients[0]


@pytest.mark.parametrize("loss_type", ["dapo", *map(full, ["grpo", "bnpo", *OTHER_LOSSES])])
def test_a_trajectory_that_failed_changes_neither_loss_nor_baseline(tmp_path: Path, loss_type: str) -> None:
    good, failed = StopReason.ANSWERED, StopReason.SERVER_FAILED
    without = _gradients(tmp_path, [good] * 4, loss_type=loss_type)
    with_failed = _gradients(tmp_path, [good, good, failed, good, good], loss_type=loss_type)
    _assert_close(with_failed, without)


@pytest.mark.parametrize("loss_type", ["dapo", *map(full, ["grpo", *OTHER_LOSSES])])
def test_a_failed_trajectory_changes_nothing_when_gradients_are_accumulated(tmp_path: Path, loss_type: str) -> None:
    good, failed = StopReason.ANSWERED, StopReason.SERVER_FAILED
    settings = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.0}
    without = _gradients(tmp_path, [good] * 5, **settings)
    stops = [good, failed, good, good, good, good]
    with_failed = _gradients(tmp_path, stops, per_device_train_batch_size=3, gradient_accumulation_steps=2, **settings)
    _assert_close(with_failed, without)


def _assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        assert torch.allclose(ours[name], gradient, rtol=0, atol=1e-5 * scale), name


@pytest.mark.full
def test_what_a_failed_trajectory_wrote_does_not_matter_at_all(tmp_path: Path) -> None:
    stops = [StopReason.ANSWERED, StopReason.DEADLINE, StopReason.ANSWERED]
    first, second = (_gradients(tmp_path, stops, seed=seed) for seed in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
def test_a_trajectory_that_failed_before_its_first_token_is_taken(tmp_path: Path, adding_model: str) -> None:
    class Broken(Attempting):
        def attempt(self, tasks: Any, **kwargs: Any) -> list[Trajectory]:
            first, *others = super().attempt(tasks, **kwargs)
            empty = Trajectory(
                task=first.task,
                prompt_ids=first.prompt_ids,
                segments=(),
                messages=(),
                exchanges=(),
                stop_reason=StopReason.SERVER_FAILED,
            )
            return [empty, *others]

    with Broken(adding_model, exact_answer, config(tmp_path, max_steps=1), DATASET, servers=HERE) as trainer:
        trainer.train()
    assert trainer.state.log_history[0]["rollout/failed_fraction"] == pytest.approx(1 / 8)


def test_a_run_whose_servers_break_stops_and_says_what_broke(tmp_path: Path, adding_model: str) -> None:
    servers = {"sums": {**SERVERS["sums"], "args": [str(SERVER), "--die"]}}
    with (
        MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), DATASET, servers=servers) as trainer,
        pytest.raises(RolloutError) as caught,
    ):
        trainer.train()
    message = str(caught.value)
    assert re.search(r"\d+% of the trajectories failed", message)
    assert "server_failed: `add`" in message
    assert "max_failed_fraction" in message


@pytest.mark.full
def test_what_was_learnt_is_saved_when_servers_break_later(tmp_path: Path, adding_model: str) -> None:
    class Breaking(Attempting):
        def attempt(self, tasks: Any, **kwargs: Any) -> list[Trajectory]:
            stop_reason = StopReason.SERVER_FAILED if self.state.global_step else StopReason.ANSWERED
            rng = torch.Generator().manual_seed(0)
            return [made_up(task, rng, stop_reason) for task in tasks]

    settings = config(tmp_path, save_strategy="steps", save_steps=100)
    with (
        Breaking(adding_model, _length, settings, DATASET, servers=HERE) as trainer,
        pytest.raises(RolloutError, match="the server broke"),
    ):
        trainer.train()
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()


def test_it_evaluates_on_held_out_tasks_while_it_trains(tmp_path: Path, adding_model: str) -> None:
    settings = config(
        tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=2
    )
    with MCPGRPOTrainer(
        adding_model, exact_answer, settings, DATASET, servers=HERE, eval_dataset=DATASET.select(range(2))
    ) as trainer:
        trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert evaluations[0]["eval_tools/call_frequency"] > 0


@pytest.mark.parametrize("has_end", [True, full(False)], ids=["at once", "batch by batch"])
def test_the_batches_of_an_evaluation_do_not_wait_for_each_other(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch, has_end: bool
) -> None:
    changes = {} if has_end else {"accelerator_config": {"dispatch_batches": False}}
    settings = config(tmp_path, per_device_eval_batch_size=4, num_generations_eval=2, **changes)
    judged: list[Trajectory] = []
    attempted: list[list[str]] = []

    def reward(completions: list, trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        judged.extend(trajectory)
        return exact_answer(trajectory)

    rows = [{**row, "task_id": f"sum-{number}"} for number, row in enumerate([*ROWS, *ROWS][:5])]
    with MCPGRPOTrainer(adding_model, reward, settings, servers=HERE) as trainer:
        collector: Any = trainer._collector
        attempt = collector.attempt

        def watched(tasks: Any, **kwargs: Any) -> list[Trajectory]:
            attempted.append([task.task_id for task in tasks])
            return attempt(tasks, **kwargs)

        monkeypatch.setattr(collector, "attempt", watched)
        dataset = Dataset.from_list(rows)
        metrics = trainer.evaluate(dataset if has_end else dataset.to_iterable_dataset())
    names = [trajectory.task.task_id for trajectory in judged]
    assert [name for names in attempted for name in names] == names
    assert sorted(names) == sorted(2 * [row["task_id"] for row in rows])
    assert list(map(len, attempted)) == ([10] if has_end else [4, 4, 2])
    assert len({trajectory.completion_ids for trajectory in judged}) > 1
    assert metrics["eval_rollout/seconds"] > 0
    assert metrics["eval_reward"] == pytest.approx(sum(exact_answer(judged)) / len(judged))
    assert metrics["eval_turns/mean"] == pytest.approx(sum(each.num_turns for each in judged) / len(judged))


def test_an_evaluation_counts_the_attempts_that_were_cut(tmp_path: Path, adding_model: str) -> None:
    settings = config(
        tmp_path, max_completion_length=8, max_turn_tokens=None, per_device_eval_batch_size=4, num_generations_eval=2
    )
    rows = [{**row, "family": "sums"} for row in ROWS[:2]]
    with MCPGRPOTrainer(adding_model, exact_answer, settings, servers=HERE) as trainer:
        metrics = trainer.evaluate(Dataset.from_list(rows))
        (judged,) = trainer._evaluations.all
    assert metrics["eval_stop/max_tokens"] == 1
    assert judged.cut == {row["task_id"]: 2 for row in rows}
    assert set(judged.kinds.values()) == {"sums"}


class Start(TrainerCallback):
    """Keeps the weights a run starts with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("wrapped", "beta"), [(False, 0.0), full(True, 0.1)], ids=["peft_config", "peft model with KL"]
)
@pytest.mark.full
def test_a_run_continues_from_its_checkpoint(tmp_path: Path, adding_model: str, wrapped: bool, beta: float) -> None:
    def run(folder: Path, steps: int, resume: bool, callback: Any = None) -> MCPGRPOTrainer:
        settings = config(folder, max_steps=steps, save_strategy="steps", save_steps=1, learning_rate=1e-2, beta=beta)
        lora, model = LoraConfig(r=4, target_modules="all-linear"), adding_model
        if wrapped:
            model, lora = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora), None
        with MCPGRPOTrainer(
            model,
            exact_answer,
            settings,
            DATASET,
            servers=SERVERS,
            peft_config=lora,
            processing_class=AutoTokenizer.from_pretrained(adding_model),
            callbacks=[callback] if callback else None,
        ) as trainer:
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    first, start = run(tmp_path, 1, resume=False), Start()
    continued = run(tmp_path, 2, resume=True, callback=start)
    assert continued.state.global_step == 2
    assert [entry["step"] for entry in continued.state.log_history if "reward" in entry] == [1, 2]
    trained = {n: p for n, p in first.model.named_parameters() if "lora_B" in n}
    assert any(parameter.abs().max() > 0 for parameter in trained.values())
    for name, parameter in trained.items():
        assert torch.equal(start.weights[name], parameter)


def test_rolling_out_alone_does_not_train(tmp_path: Path, adding_model: str) -> None:
    with MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), DATASET, servers=HERE) as trainer:
        trajectories = trainer.roll_out(DATASET.select(range(2)), num_generations=3, temperature=0)
    assert [t.task.task_id for t in trajectories] == ["sum-0"] * 3 + ["sum-1"] * 3
    assert len({t.completion_ids for t in trajectories}) == 1  # the same question at temperature 0


@pytest.mark.parametrize(
    "act",
    [
        MCPGRPOTrainer.train,
        lambda trainer: trainer.evaluate(DATASET),
        lambda trainer: trainer.roll_out(DATASET),
    ],
    ids=["train", "evaluate", "roll_out"],
)
@pytest.mark.full
def test_a_trainer_that_was_closed_says_so_and_still_saves(
    tmp_path: Path, adding_model: str, act: Callable[[MCPGRPOTrainer], Any]
) -> None:
    with MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), DATASET, servers=SERVERS) as trainer:
        pass
    with pytest.raises(RolloutError, match=r"the trainer was closed.*make a new trainer"):
        act(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "README.md").exists()


@pytest.mark.full
def test_a_bad_row_of_a_stream_is_refused_when_it_comes(tmp_path: Path, adding_model: str) -> None:
    rows = Dataset.from_list([{**ROWS[0], "tools": None}, {**ROWS[1], "tools": ["ad"]}]).to_iterable_dataset()
    settings = config(tmp_path, shuffle_dataset=False, accelerator_config={"dispatch_batches": False})
    with MCPGRPOTrainer(adding_model, exact_answer, settings, rows, servers=HERE) as trainer:
        with pytest.raises(CatalogError, match="'ad'"):
            trainer.train()
        assert trainer.state.global_step == 1


def test_a_reward_for_answers_needs_answers_from_a_stream_too(tmp_path: Path, adding_model: str) -> None:
    rows = Dataset.from_list([{k: v for k, v in row.items() if k != "answer"} for row in ROWS])
    settings = config(tmp_path, accelerator_config={"dispatch_batches": False})
    with (
        MCPGRPOTrainer(adding_model, exact_answer, settings, rows.to_iterable_dataset(), servers=HERE) as trainer,
        pytest.raises(TaskFormatError, match="no `answer`"),
    ):
        trainer.train()


def test_without_tasks_to_train_on_it_rolls_out_and_evaluates(tmp_path: Path, adding_model: str) -> None:
    with MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), servers=HERE) as trainer:
        assert [t.task.task_id for t in trainer.roll_out(DATASET.select([0]), num_generations=2)] == ["sum-0"] * 2
        assert 0 <= trainer.evaluate(DATASET.select([0]))["eval_reward"] <= 1
        with pytest.raises(SettingsError, match=r"no tasks to train on.*`train_dataset`"):
            trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "README.md").exists()


def test_a_batch_that_mixes_tasks_in_a_group_is_refused(tmp_path: Path, adding_model: str) -> None:
    with MCPGRPOTrainer(adding_model, exact_answer, config(tmp_path), DATASET, servers=HERE) as trainer:
        trainer.model.train()
        with pytest.raises(RolloutError, match="attempts at one task"):
            trainer._generate_and_score_completions([dict(ROWS[i % 2]) for i in range(8)])


def refuse(
    error: type[Exception],
    *words: str,
    rows: list | None = None,
    servers: Any = SERVERS,
    args: Any = None,
    **kwargs: Any,
) -> None:
    """Build a trainer whose model does not exist: what is refused must be refused before the model is loaded."""
    with pytest.raises(error) as caught:
        MCPGRPOTrainer("no-such-model", exact_answer, args, Dataset.from_list(rows or ROWS), servers=servers, **kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not left_behind()


def test_a_row_without_the_needed_columns_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refuse(TaskFormatError, "row 0", "`task_id`", "['question']", rows=[{"question": "?"}], args=config(tmp_path))


def test_a_task_that_names_a_server_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "servers": ["sum"]}]
    refuse(CatalogError, "'sum'", "'sum-0'", "sums", rows=rows, servers=HERE, args=config(tmp_path))


def test_tasks_that_cannot_be_rewarded_are_refused_with_their_number_and_all_that_is_wrong(tmp_path: Path) -> None:
    rows = [{**row, "answer": None, "tools": None} for row in ROWS]
    here: dict[str, Any] = {"servers": HERE, "args": config(tmp_path)}
    refuse(TaskFormatError, "`exact_answer`, 4 tasks ('sum-0'", "and 1 more", rows=rows, **here)
    rows[3]["tools"] = ["ad"]
    refuse(CatalogError, "tool 'ad' (1 task: 'sum-3')", "`add`", "4 tasks ('sum-0'", rows=rows, **here)


def test_a_reward_that_cannot_be_called_is_refused_and_one_of_somebody_s_own_is_not_tried(tmp_path: Path) -> None:
    def colourful(completions: list, hue: list, **kwargs: Any) -> list[float]:
        raise AssertionError

    with pytest.raises(SettingsError, match=r"`colourful` cannot be called: missing a required.*'hue'"):
        MCPGRPOTrainer("no-such-model", colourful, config(tmp_path), DATASET, servers=HERE)
    hued = DATASET.map(lambda row: {"hue": row["colour"], "answer": None})
    with pytest.raises(OSError, match="load the files"):  # it got as far as the model
        MCPGRPOTrainer("no-such-model", colourful, config(tmp_path), hued, servers=HERE)


def test_settings_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    refuse(SettingsError, "`top_p=0.5`", "`tools` and `servers`", tools=[print], args=config(tmp_path, top_p=0.5))


def test_a_task_that_names_a_tool_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    refuse(CatalogError, "'ad'", "'sum-0'", "add", rows=[{**ROWS[0], "tools": ["ad"]}], args=config(tmp_path))


def test_a_held_out_task_is_checked_too(tmp_path: Path) -> None:
    held_out = Dataset.from_list([{**ROWS[0], "tools": ["ad"]}])
    refuse(CatalogError, "'ad'", servers=HERE, args=config(tmp_path), eval_dataset=held_out)


def test_a_server_that_cannot_start_is_shown_with_its_words(tmp_path: Path) -> None:
    servers = {
        "sums": {**SERVERS["sums"], "args": ["-c", "import sys; print('no licence', file=sys.stderr); sys.exit(7)"]}
    }
    refuse(ToolServerError, "'sums'", "no licence", "7", "-c", servers=servers, args=config(tmp_path))


def test_tools_that_fill_the_model_s_context_are_refused_with_their_number_of_tokens(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=256)
    with pytest.raises(CatalogError, match=r"has \d+ tokens, \d+ of them for its 1 tools \(.*\), .* holds 256"):
        MCPGRPOTrainer(model, exact_answer, config(tmp_path), DATASET, servers=HERE)
    assert not left_behind()


def test_a_server_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    refuse(ServerConfigError, "nowhere.json", servers=tmp_path / "nowhere.json", args=config(tmp_path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.9}, ["`top_p=0.9`", "ratios"]),
        ({"top_k": 20}, ["`top_k=20`"]),
        ({"min_p": 0.1}, ["`min_p=0.1`"]),
        ({"repetition_penalty": 1.1}, ["`repetition_penalty=1.1`"]),
        ({"generation_kwargs": {"top_p": 0.5}}, ["`generation_kwargs"]),
        ({"temperature": 0.0}, ["`temperature`"]),
        ({"remove_unused_columns": True}, ["`remove_unused_columns=True`"]),
        ({"mask_truncated_completions": True}, ['`truncation="mask"`']),
        ({"use_transformers_continuous_batching": True}, ["use_vllm=True"]),
        ({"ds3_gather_for_generation": False}, ["`ds3_gather_for_generation`"]),
        ({"steps_per_generation": 3}, ["`steps_per_generation` (3)", "whole groups"]),
    ],
)
def test_settings_that_would_train_wrongly_are_refused(tmp_path: Path, settings: dict, words: list[str]) -> None:
    refuse(SettingsError, *words, args=config(tmp_path, **settings))


def test_a_dataset_too_small_for_one_batch_is_refused(tmp_path: Path) -> None:
    args = config(tmp_path, per_device_train_batch_size=40)
    refuse(SettingsError, "5 tasks", "only 4", "per_device_train_batch_size", args=args)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_a_second_source_of_tools_is_refused(tmp_path: Path, name: str) -> None:
    source: Callable = lambda *args: None  # noqa: E731
    refuse(SettingsError, f"`{name}`", args=config(tmp_path), **{name: [source]})


def test_a_configuration_of_trl_is_refused_together_with_servers(tmp_path: Path) -> None:
    refuse(SettingsError, "MCPGRPOConfig", args=GRPOConfig(str(tmp_path), use_cpu=True, report_to="none"))


def test_settings_that_would_do_nothing_without_servers_are_refused(tmp_path: Path) -> None:
    args = config(tmp_path, on_unhealthy="stop", schema_mask="syntax")
    with pytest.raises(SettingsError, match="`schema_mask='syntax'` is for training on MCP servers"):
        MCPGRPOTrainer("no-such-model", exact_answer, args, DATASET)


def test_rolling_out_needs_servers(tmp_path: Path, adding_model: str) -> None:
    args = config(tmp_path, on_unhealthy="stop")
    trainer = MCPGRPOTrainer(adding_model, lambda completions, **kwargs: [0.0] * len(completions), args, DATASET)
    with pytest.raises(SettingsError, match="servers"):
        trainer.roll_out(DATASET)


def test_what_samples_is_closed_where_the_rest_of_a_rollout_cannot_be_made(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def made(*args: Any, **kwargs: Any) -> Any:
        sampler = make_sampler(*args, **kwargs)
        monkeypatch.setattr(sampler, "close", lambda: closed.append(True))
        return sampler

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise SettingsError("no such mask")

    monkeypatch.setattr("mcp_grpo.trainer.make_sampler", made)
    monkeypatch.setattr("mcp_grpo.trainer.make_collector", refused)
    with pytest.raises(SettingsError, match="no such mask"):
        make_trainer(tmp_path, adding_model)
    assert closed == [True]


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"beta": 0.05, "ref_sync": "ema"}], ids=["alone", "with a reference"])
def test_an_adapter_may_train_rows_of_the_embedding(
    tmp_path: Path, adding_model: str, changes: dict[str, Any]
) -> None:
    rows = AutoTokenizer.from_pretrained(adding_model).convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    lora = LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=rows)
    with make_trainer(tmp_path, adding_model, peft_config=lora, **changes) as trainer:
        before = trainer.model.get_output_embeddings().weight.detach().clone()
        trainer.train()
        after = trainer.model.get_output_embeddings().weight.detach()
    moved = (after != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == sorted(rows)
    assert trainer.state.log_history[0]["align/score"] == 1
