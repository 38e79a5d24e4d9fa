"""A reward for a run with the stand-in for weights (`mcp_grpo.doctor.stand_in`)."""

from typing import Any

from mcp_grpo.types import Trajectory


def plain_text(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """Reward the share of lower-case letters in what was written: something that even a random model can get better at."""
    texts = ["".join(str(message.get("content") or "") for message in each.messages) for each in trajectory]
    return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in texts]
