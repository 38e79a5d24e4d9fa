"""Talk to a policy that has the tools of MCP servers, in the terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import transformers
from anyio.from_thread import start_blocking_portal
from rich.console import Console
from rich.text import Text

from mcp_grpo.evaluation import Endpoint
from mcp_grpo.evaluation.endpoint import EndpointConversation
from mcp_grpo.policy_evaluation import local_policy
from mcp_grpo.publishing import read_policy_file
from mcp_grpo.publishing.load import local_folder
from mcp_grpo.tools import ToolPool, load_servers
from mcp_grpo.types import Exchange, Message, StopReason, Task


PROMPT = "you> "
MAX_SHOWN = 2000  # characters of a tool result; the policy reads all of it
_WHY = {
    StopReason.MAX_TURNS: "It was stopped after as many turns as it may take. Say something to let it go on.",
    StopReason.MAX_TOKENS: "It was cut off: the turn was too long.",
    StopReason.CONTEXT_FULL: "That does not fit into the model's context any more. Your message is forgotten.",
    StopReason.SERVER_FAILED: "A server failed. Your message is forgotten, so that you can go on.",
    StopReason.DEADLINE: "It took too long. Your message is forgotten, so that you can go on.",
}

Say = Callable[[str], tuple[StopReason, str | None]]


def chat(
    policy: str | Endpoint,
    servers: Any,
    *,
    console: Console,
    system: str | None = None,
    base: str | None = None,
    temperature: float | None = None,
    **settings: Any,
) -> None:
    """Let a person talk to a policy until the input ends. Servers are closed in any case."""
    load_servers(servers)  # what is wrong with them is known before a model is loaded
    prompt = _system(policy, system)
    opening = Task(task_id="chat", prompt=() if prompt is None else ({"role": "system", "content": prompt},))
    watch = partial(_show, console=console)
    with _opened(policy, servers, opening, watch, base, temperature, settings) as (tools, say):
        console.print(Text(f"Tools: {', '.join(tools) or 'none'}", "dim"), soft_wrap=True)
        console.print(Text("Ctrl-C ends a reply, Ctrl-D the chat.", "dim"))
        while (text := _read(console)) is not None:
            if text.strip():
                _reply(say, text, console)


def _system(policy: str | Endpoint, given: str | None) -> str | None:
    """Return the system message: the one that is given, else that of training."""
    if given is not None or isinstance(policy, Endpoint):
        return given
    return read_policy_file(local_folder(policy)).system


@contextmanager
def _opened(
    policy: str | Endpoint,
    servers: Any,
    opening: Task,
    watch: Callable[[Message | Exchange], None],
    base: str | None,
    temperature: float | None,
    settings: Mapping[str, Any],
) -> Iterator[tuple[list[str], Say]]:
    """Give the names of the tools, and what says something to the policy."""
    if isinstance(policy, Endpoint):
        with start_blocking_portal(name="mcp-grpo-chat") as portal:
            portal.call(policy.check)
            opened = portal.wrap_async_context_manager
            with (
                opened(ToolPool(servers)) as pool,
                opened(policy.client()) as client,
                opened(pool.lease(opening)) as lease,
            ):
                conversation = EndpointConversation(policy, opening, client, watch)

                def ask(text: str) -> tuple[StopReason, str | None]:
                    future = portal.start_task_soon(conversation.say, text, lease)
                    try:
                        return future.result(), conversation.error
                    finally:
                        future.cancel()  # after Ctrl-C

                yield [tool.name for tool in lease.tools], ask
        return
    transformers.utils.logging.disable_progress_bar()  # of loading a file
    with (
        local_policy(policy, servers, None, settings, base=base) as trainer,
        trainer.converse(opening, watch, temperature=temperature) as say,
    ):
        yield [tool.name for tool in trainer.catalog.tools], say


def _read(console: Console) -> str | None:
    """Return what the person says; `None` when there is no more."""
    while True:
        try:
            text = input(PROMPT)
        except KeyboardInterrupt:
            console.print(Text("\nCtrl-D ends the chat.", "dim"))
        except EOFError:
            console.print()
            return None
        else:
            if not sys.stdin.isatty():
                console.print(text, soft_wrap=True)  # nobody typed it here
            return text.encode("utf-8", "replace").decode()


def _reply(say: Say, text: str, console: Console) -> None:
    try:
        with console.status("..."):
            stop_reason, error = say(text)
    except KeyboardInterrupt:
        console.print(Text("The reply was ended. Your message is forgotten; what tools have done stays done.", "dim"))
        return
    if stop_reason in _WHY:
        console.print(Text(" ".join(filter(None, [_WHY[stop_reason], error])), "bold red"), soft_wrap=True)


def _show(seen: Message | Exchange, console: Console) -> None:
    """Print a turn of the policy, or a call with its result."""
    if isinstance(seen, Exchange):
        result = seen.result
        text = result.text if len(result.text) <= MAX_SHOWN else f"{result.text[:MAX_SHOWN]} ..."
        head = "" if not result.is_error else f"{result.kind}: "
        style = "bold red" if result.is_error else "green"
        console.print(
            Text.assemble(("  <- ", style), head, text, (f"  ({result.seconds:.2f} s)", "dim")), soft_wrap=True
        )
        return
    if reasoning := seen.get("reasoning_content") or seen.get("thinking"):
        console.print(Text(str(reasoning).strip(), "dim italic"), soft_wrap=True)
    if content := str(seen.get("content") or "").strip():
        console.print(Text.assemble(("policy> ", "bold cyan"), content), soft_wrap=True)
    for call in seen.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = json.dumps(function.get("arguments"), ensure_ascii=False, default=str)
        console.print(Text.assemble(("  -> ", "yellow"), f"{function.get('name')}({arguments})"), soft_wrap=True)
