"""What is written when a policy is saved, what a run goes on from, and what is shown to others."""

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model

from mcp_grpo.learning import load_value_head, save_value_head, without_value_head
from mcp_grpo.learning.value_head import VALUE_HEAD_FILE
from mcp_grpo.monitor import rewrite_card
from mcp_grpo.objective import ObjectiveTrainer
from mcp_grpo.rollout import Renderer, RolloutEngine


STATE_FILE = "objective-{rank}.pt"  # in a checkpoint, beside those of the optimizer and the random state


class PublishingTrainer(ObjectiveTrainer):
    """Checkpoints that hold all that a run goes on from, and a model card that names the tools."""

    _tag_names = ["trl", "grpo", "mcp-grpo"]  # noqa: RUF012 (TRL's own attribute)
    _name = "MCP-GRPO"

    _engine: RolloutEngine | None
    _renderer: Renderer
    _tokenizer: Any
    _num_rollouts: int
    _is_pushing = False

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(model_name, *args, **kwargs)
        if self._engine is not None and self.is_world_process_zero():
            folder = Path(cast("str", self.args.output_dir))
            rewrite_card(
                folder / "README.md",
                self._engine.catalog,
                model_name=model_name or folder.name,
                model_id=self.hub_model_id or folder.name,
                is_adapter=bool(is_peft_model(self.model)),
            )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        self._is_pushing = not self.args.push_value_head
        try:
            return super().push_to_hub(*args, **kwargs)
        finally:
            if self._is_pushing and self._critic is not None and self.args.should_save:
                # It has had to go for a while.
                save_value_head(self._critic.head, cast("str", self.args.output_dir))
            self._is_pushing = False

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(cast("str", output_dir or self.args.output_dir))
        policy, own = self.accelerator.unwrap_model(self.model), None
        if self._critic is not None and (state_dict is not None or not is_peft_model(policy)):
            # In a file of its own: what serves the policy does not know it.
            state_dict, own = without_value_head(self.model.state_dict() if state_dict is None else state_dict)
        stock = self._tokenizer.chat_template
        if self._engine is not None:
            # The template the policy was trained on goes with it: with the stock one it would see other histories.
            self._tokenizer.chat_template = self._renderer.chat_template or stock
        try:
            super()._save(output_dir, state_dict)
        finally:
            self._tokenizer.chat_template = stock
        if not self.args.should_save:
            return
        if self._critic is not None and self._is_pushing:
            (folder / VALUE_HEAD_FILE).unlink(missing_ok=True)
        elif self._critic is not None:
            save_value_head(self._critic.head, folder, own)
        if "ref" in getattr(policy, "peft_config", {}):
            # In a folder beside the adapter, it is all that a resumed run would load: the policy would silently start
            # from zero. The reference is made anew from the adapter one starts with, and moved by its own file.
            shutil.rmtree(folder / "ref", ignore_errors=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._critic is not None:
            load_value_head(self._critic.head, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._critic is not None and self.state.best_model_checkpoint:
            load_value_head(self._critic.head, self.state.best_model_checkpoint)
        self._last_loaded_step = -1  # the sampler has the last one's weights

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._reference is not None:
            self._reference.save(output_dir)
        state = {
            "num_processes": self.accelerator.num_processes,
            "step": self._step,
            "num_rollouts": self._num_rollouts,
            "turns": self._engine and self._engine.turns.state_dict(),
            "health": self._health.state_dict(),
            "kl_control": self._kl_control and self._kl_control.state_dict(),
            "critic": self._critic and self._critic.state_dict(),
            # A batch that is still to be learnt from: rolled out again, it would be another one.
            "batch": self._buffered_inputs if self._step % self._generate_every else None,
        }
        torch.save(state, Path(output_dir) / STATE_FILE.format(rank=self.accelerator.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference is not None:
            self._reference.load(checkpoint)
        # What all ranks have in common is read by all from the first one's file, also if there are more or fewer now.
        file, own_file = (
            Path(checkpoint) / STATE_FILE.format(rank=rank) for rank in (0, self.accelerator.process_index)
        )
        if not file.is_file():
            return
        state = torch.load(file, map_location=self.accelerator.device, weights_only=True)
        self._step, self._num_rollouts, self._buffered_inputs = state["step"], state["num_rollouts"], None
        if state["batch"] is not None and state["num_processes"] == self.accelerator.num_processes:
            own = torch.load(own_file, map_location=self.accelerator.device, weights_only=True)
            self._buffered_inputs = own["batch"]
        elif state["batch"] is not None:  # their parts of a batch do not fit: a new one is rolled out
            self._step -= self._step % self._generate_every
        if self._engine is not None and state["turns"]:
            self._engine.turns.load_state_dict(state["turns"])
        self._health.load_state_dict(state["health"])
        if self._kl_control is not None and state["kl_control"]:
            self._kl_control.load_state_dict(state["kl_control"])
            self.beta = self._kl_control.beta
        if self._critic is not None and state["critic"]:
            self._critic.load_state_dict(state["critic"])
