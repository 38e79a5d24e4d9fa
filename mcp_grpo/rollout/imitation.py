"""Tokenise given conversations as a rollout would."""

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
    Return the token ids that a rollout would have if the policy had written the turns of a conversation, and 1 for those
    that the policy is to write. Results after the last turn are dropped.

    The renderer of the rollout writes prompt and tool results, so that a policy that imitates the turns sees what it will
    see later.

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
            new_ids, is_written = renderer.suffix_ids(list(group)), 0
        else:
            new_ids, is_written = [i for message in group for i in renderer.turn_ids(message)], 1
        token_ids += new_ids
        mask += [is_written] * len(new_ids)
    return token_ids, mask
