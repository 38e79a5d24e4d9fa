"""What is written when a policy is saved, and when it is shown to others."""

import shutil
from pathlib import Path
from typing import Any, cast

from accelerate.utils import is_peft_model
from trl.trainer.grpo_trainer import GRPOTrainer

from mcp_grpo.monitor import rewrite_card
from mcp_grpo.rollout import Renderer, RolloutEngine


class PublishingTrainer(GRPOTrainer):
    """TRL's GRPO, with a model card that names the tools, and checkpoints that hold the template that was trained on."""

    _tag_names = ["trl", "grpo", "mcp-grpo"]  # noqa: RUF012 (TRL's own attribute)
    _name = "MCP-GRPO"

    accelerator: Any
    model: Any
    _engine: RolloutEngine | None
    _renderer: Renderer
    _tokenizer: Any

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

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self._engine is None:
            return super()._save(output_dir, state_dict)
        # The template the policy was trained on goes with it: with the stock one it would see other histories.
        stock = self._tokenizer.chat_template
        self._tokenizer.chat_template = self._renderer.chat_template or stock
        try:
            super()._save(output_dir, state_dict)
        finally:
            self._tokenizer.chat_template = stock
        if "ref" in getattr(self.accelerator.unwrap_model(self.model), "peft_config", {}):
            # The reference is made anew from the adapter one starts with. Saved beside it, it is all that a resumed
            # run would load: the policy would silently start from zero.
            shutil.rmtree(Path(cast("str", output_dir or self.args.output_dir), "ref"), ignore_errors=True)
