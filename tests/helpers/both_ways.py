"""A trainer that holds passes with prompts shared against passes on rows."""

from typing import Any

import torch

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import PromptSharing


class Twice(MCPGRPOTrainer):
    """Runs each pass on rows and with prompts shared, and compares."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_compared = {"loss": 0, "scoring": 0, "reference": 0}
        self.num_shared = 0
        self.depth = 0  # how many shared parts are before what is a row's own, in the last tree
        self.is_in_loss = False
        for model in filter(None, (self.model, self.ref_model)):
            model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _: Any, args: Any, kwargs: Any) -> None:
        if "prompt_tree" in kwargs:
            self.num_shared += 1
            self.depth = max(len(segment.path) for segment in kwargs["prompt_tree"].segments)

    def both_ways(self, run: Any) -> Any:
        found = []
        for is_wanted in (False, True):
            self._sharing = PromptSharing(is_wanted)
            assert self._shares_prompts(self.model) == is_wanted
            before = self.num_shared
            found.append(run())
            assert (self.num_shared > before) == is_wanted
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-3)
        return found[1]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        def run() -> Any:
            self.model.zero_grad()
            loss = super(Twice, self)._compute_loss(model, inputs)
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
            self.sizes = {name: gradient.abs().sum().item() for name, gradient in gradients.items()}
            return loss.detach(), gradients

        self.is_in_loss = True
        self.both_ways(run)
        self.num_compared["loss"] += sum(self.sizes.values()) > 0
        loss = super()._compute_loss(model, inputs)
        self.is_in_loss = False
        self.model.zero_grad()
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            self._records_values = records
            return super(Twice, self)._get_per_token_logps_and_entropies(model, *args, **kwargs)

        records = self._records_values
        if self.is_in_loss:
            return run()
        self.num_compared["scoring" if model is self.model else "reference"] += 1
        return self.both_ways(run)


def rewards_by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(place % 3) for place in range(len(completions))]
