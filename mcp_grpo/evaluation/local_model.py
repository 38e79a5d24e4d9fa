"""A model of this process that replies to chat messages."""

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from mcp_grpo.evaluation.endpoint import Reply
from mcp_grpo.precision import suited_to_cpu
from mcp_grpo.rollout.loop import derived_seed
from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.sampling.generator import Sampling
from mcp_grpo.sampling.transformers_generator import TransformersGenerator
from mcp_grpo.types import Message


logger = logging.getLogger(__name__)


class LocalModel:
    """
    A model of this process that a [`SimulatedUser`] may be played by, in place of an [`Endpoint`].

    Requests that come at the same time are sampled together, on a thread of its own. Nothing that others write to it can become a
    control token.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            Folder or Hub id of a model, or the model.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Its tokenizer; the one that is beside it if not given.
        temperature (`float`, *optional*, defaults to `0.7`):
            Temperature of sampling.
        max_turn_tokens (`int`, *optional*, defaults to `512`):
            Tokens of a reply.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds for a reply.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Arguments of the chat template, such as `{"enable_thinking": False}`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all replies.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        temperature: float = 0.7,
        max_turn_tokens: int = 512,
        timeout: float = 600.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(model, str | Path):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = suited_to_cpu(AutoModelForCausalLM.from_pretrained(model, dtype="auto"))
        elif tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
        ends = model.generation_config.eos_token_id or tokenizer.eos_token_id
        end_ids = list(ends) if isinstance(ends, list | tuple) else [ends]
        self.timeout = timeout
        self._renderer = Renderer(tokenizer, end_of_turn_ids=end_ids, chat_template_kwargs=chat_template_kwargs)
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_ids[0]
        self._generator = TransformersGenerator(model.eval(), end_of_turn_ids=end_ids, pad_token_id=padding)
        self._temperature = temperature
        self._max_turn_tokens = max_turn_tokens
        self._seeds = (derived_seed(seed, number) for number in count())
        self._serving: threading.Thread | None = None
        self._until: Future[None] = Future()

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[None]:
        """Stand for the client of an endpoint: there is nothing to connect to."""
        yield None

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        client: Any = None,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> Reply:
        """See [`Endpoint.reply`]."""
        self._serve()
        safe = [{**message, "content": self._renderer.without_control(message["content"])} for message in messages]
        prompt_ids = self._renderer.prompt_ids(safe, tools)
        sampling = Sampling(max_tokens=self._max_turn_tokens, temperature=self._temperature, seed=next(self._seeds))
        generation = await self._generator.generate(prompt_ids, sampling)
        parsed = self._renderer.parse(prompt_ids, generation.token_ids, tools)
        message: Message = {"role": "assistant", "content": parsed.message.get("content") or ""}
        if parsed.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in parsed.calls
            ]
        return Reply(
            message=message,
            is_whole=generation.finish_reason == "stop",
            tokens_read=len(prompt_ids),
            tokens_written=len(generation.token_ids),
        )

    def close(self) -> None:
        """End its thread. Safe to call more than once."""
        if not self._until.done():
            self._until.set_result(None)
        if self._serving is not None:
            self._serving.join(timeout=60)

    def _serve(self) -> None:
        if self._serving is None:
            self._serving = threading.Thread(target=self._run, name="mcp-grpo-user", daemon=True)
            self._serving.start()

    def _run(self) -> None:
        while not self._until.done():
            try:
                self._generator.serve(self._until)
            except Exception as error:  # those who asked are told, and the next may fare better
                logger.warning("A model that plays a user failed: %s: %s", type(error).__name__, error)
