"""Conversations that somebody else had, as the tokens of a rollout."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.types import Message


def conversation_tokens(
    renderer: Renderer,
    prompt: Sequence[Message],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[int]]:
    """
    The tokens that a rollout would have, had the policy written the turns of a conversation.

    Prompt and tool results are rendered by what renders those of a rollout, so that a policy that imitates the turns sees
    just what it will see later.

    Args:
        renderer ([`Renderer`]):
            The renderer of the rollout.
        prompt (`Sequence[Message]`):
            Opening messages.
        messages (`Sequence[Message]`):
            What followed: turns of role `"assistant"`, and results of role `"tool"` with `name` and `content`.
        tools (`Sequence[Mapping[str, Any]]`):
            Schemas of the tools that were offered.

    Returns:
        `tuple[list[int], list[int]]`: Token ids, and 1 for those that the policy is to write. Results after the last turn are
        left out, as nobody reads them.

    Example:

    ```
    messages   assistant: call (3 tokens)   tool: result (2)   assistant: answer (1)
    mask       0 0 0 ... 1 1 1              0 0                1
    ```
    """
    token_ids = list(renderer.prompt_ids(prompt, tools))
    mask = [0] * len(token_ids)
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    for role, group in groupby(messages[: last + 1], key=lambda message: message["role"]):
        if role == "tool":
            new_ids = renderer.suffix_ids(list(group))
            token_ids += new_ids
            mask += [0] * len(new_ids)
            continue
        for message in group:
            new_ids = renderer.turn_ids(message)
            token_ids += new_ids
            mask += [1] * len(new_ids)
    return token_ids, mask
