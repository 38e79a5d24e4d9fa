"""
Environments written for the library `verifiers` (Prime Intellect): its tools, datasets, answers and rubrics, as they are.

They are those of the user's own installation: the library's `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` and `StatefulToolEnv`, and what
others have made of them. The policy takes its turns here, and everything else is asked of the environment.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import signal
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import anyio
from mcp.types import Tool

from mcp_grpo.environments.environment import Environment
from mcp_grpo.environments.functions import function_server
from mcp_grpo.errors import SettingsError, ToolServerError
from mcp_grpo.tools.users import UserTools
from mcp_grpo.types import Message, Task, Trajectory


logger = logging.getLogger(__name__)

SERVER = "verifiers"
STATE_TOOL, REPLY_TOOL = "verifiers_state", "verifiers_reply"  # hidden from the policy
VERSION = "0.3.1"
"""Version that is tested; the last that has these environments."""
OVER = "The task is over."
MAX_HELD = 16_384  # rollouts that have ended and are not judged yet, and scores of those that are

_PACKAGE = "verifiers"
_NEEDS = (  # what its environments import
    "aiofiles aiolimiter anthropic connect-python docstring-parser griffelib msgpack openai openai-agents prime-pydantic-config "
    "prime-sandboxes==0.2.21 pyqwest renderers setproctitle tenacity"
)
_INSTALL = f"`pip install --no-deps {_PACKAGE}=={VERSION} {_NEEDS}`"
_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
_REMOTE = ("SandboxEnv", "SandboxMixin", "CliAgentEnv", "BrowserEnv", "OpenEnvEnv", "RLMEnv")
_OVERRIDES = ("get_prompt_messages", "get_model_response", "add_model_response", "add_trajectory_step")

T = TypeVar("T")


def make_verifiers(env: str, data: str | Path | None = None, **arguments: Any) -> Environment:
    """
    Make the environment.

    Args:
        env (`str`):
            Name of an environment, as `verifiers.load_environment` takes it: that of a module with a function `load_environment`.
        data (`str` or `Path`, *optional*):
            Folder that the module is in, if it is not installed.
        arguments (`Any`):
            Arguments of that function. Text that is JSON is read as such.

    Returns:
        [`Environment`]: The tasks of its dataset in the split `"train"`, and those of its evaluation dataset in the split `"test"`,
        where it has them. Its rubric is the reward, and an attempt succeeds from its `pass_threshold` on.
    """
    vf = _library()
    if data is not None and str(data) not in sys.path:
        sys.path.insert(0, str(data))
    with _own_signals():
        try:
            loaded = vf.load_environment(env, **{name: _value(given) for name, given in arguments.items()})
        except Exception as error:
            raise SettingsError(f"The environment {env!r} of verifiers could not be loaded: {error}") from error
    _check(vf, env, loaded)
    bridge = _Bridge(vf, loaded, _datasets(loaded))
    _finished(bridge.try_out)
    return Environment(
        name=f"{env} (verifiers)",
        servers={
            SERVER: {
                "server": bridge.server,
                "x-mcp-grpo": {"state_tool": STATE_TOOL, "user_tools": [REPLY_TOOL]},
            }
        },
        splits=bridge.splits(),
        reward_funcs=(bridge.rubric_reward,),
        is_success=bridge.is_success,
        max_turns=loaded.max_turns if loaded.max_turns > 0 else Environment.max_turns,
        user=bridge.user,
    )


class _Bridge:
    """One environment of the library, and what has to be asked of it."""

    def __init__(self, vf: Any, env: Any, datasets: Mapping[str, Any]) -> None:
        self.vf, self.env = vf, env
        self._datasets = datasets
        self._client = _client(vf)
        self._held: OrderedDict[str, _Rollout] = OrderedDict()
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._holding = threading.Lock()
        self._tools = [
            Tool(name=one.name, description=one.description, input_schema=dict(one.parameters))
            for one in env.tool_defs or ()
        ]
        hidden = [Tool(name=name, description="", input_schema=_OBJECT) for name in (STATE_TOOL, REPLY_TOOL)]
        self._listed = [*self._tools, *hidden]

    def splits(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of all tasks."""
        return {
            split: [_row(split, index, row) for index, row in enumerate(dataset)]
            for split, dataset in self._datasets.items()
        }

    def server(self, task: Task | None) -> Any:
        """Make the server of one trajectory."""
        return function_server(SERVER, self._listed, _Rollout(self, task).call)

    async def state_of(self, task: Task) -> tuple[Any, set[str]]:
        """Return the library's state for a task, set up, and what it had before that."""
        row = self._datasets[task.metadata["split"]][task.metadata["row"]]
        state = await self.env.init_state(row, self._client, "policy", {})
        known, prompt, tools = set(state), _plain(state["prompt"]), _plain(state["tool_defs"])
        state = await self.env.setup_state(state) or state
        if _plain(state["prompt"]) != prompt or _plain(state["tool_defs"]) != tools:
            raise ToolServerError(
                f"The environment changes the prompt or the tools when task {task.task_id!r} begins, which cannot be carried over: they "
                "are written before."
            )
        return state, known

    async def try_out(self) -> None:
        """Begin the first task, and refuse what cannot begin."""
        rows = next((rows for rows in self.splits().values() if rows), None)
        if rows is None:
            raise SettingsError("The environment has no tasks.")
        task = Task(task_id=rows[0]["task_id"], prompt=tuple(rows[0]["prompt"]), metadata=rows[0])
        try:
            state, _ = await self.state_of(task)
        except ToolServerError as error:
            raise SettingsError(str(error)) from error
        await self.env.cleanup(state)

    async def user(self, trajectory: Trajectory, tools: UserTools) -> str | None:
        """Return the environment's answer to what the policy has said; `None` if the rollout is over."""
        result = await tools.call(REPLY_TOOL, {"messages": list(trajectory.messages)})
        if result.is_error:
            raise ToolServerError(result.text)
        return json.loads(result.text)["said"]

    def hold(self, rollout: "_Rollout") -> str:
        """Keep a rollout until it is judged, and return its name."""
        name = uuid.uuid4().hex
        with self._holding:
            _keep(self._held, name, rollout)
        return name

    def score(self, trajectory: Trajectory) -> float:
        """Return the reward of the environment's own rubric."""
        left = trajectory.states.get(SERVER) or {}
        key = json.dumps([left.get("rollout"), trajectory.messages], default=str)
        with self._holding:
            known = self._scores.get(key)
            rollout = self._held.pop(left.get("rollout", ""), None) if known is None else None
        if known is not None:
            return known
        rollout = rollout or _Rollout(self, trajectory.task, left)
        score = float(_finished(partial(rollout.score, trajectory)))
        with self._holding:
            _keep(self._scores, key, score)
        return score

    def rubric_reward(self, trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        """Pay what the environment's own rubric says."""
        return [self.score(attempt) for attempt in trajectory]

    def is_success(self, trajectory: Trajectory) -> bool:
        """Tell whether the rubric's reward reaches the environment's `pass_threshold`."""
        return self.score(trajectory) >= getattr(self.env, "pass_threshold", 0.5)


class _Rollout:
    """The library's state of one trajectory."""

    def __init__(self, bridge: _Bridge, task: Task | None, left: Mapping[str, Any] | None = None) -> None:
        self._bridge, self._task = bridge, task
        self._left = left or {}
        self._state: Any = None
        self._known: set[str] = set()  # keys that every environment's state has
        self._written: list[Message] = []  # as far as it is known here
        self._num_calls = 0
        self._calls_at_end: int | None = None  # when the environment said that it is over
        self._lock = anyio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        async with self._lock:
            try:
                await self._begin()
                if name == REPLY_TOOL:
                    return json.dumps({"said": await self._reply(arguments["messages"])})
                if name == STATE_TOOL:
                    return json.dumps({"rollout": self._bridge.hold(self), **self._shown()})
                return await self._run(name, arguments)
            except ToolServerError:
                raise
            except Exception as error:  # what the library does not turn into an answer ends its own rollouts
                raise ToolServerError(
                    f"The environment failed: {type(error).__name__}: {error.__cause__ or error}"
                ) from error

    async def score(self, trajectory: Trajectory) -> float:
        """Judge the trajectory, as the library judges a rollout that has ended."""
        await self._begin()
        env, state = self._bridge.env, self._state
        self._set_steps(_until_call(trajectory.messages, self._calls_at_end))
        state["is_truncated"] = state.get("is_truncated") or trajectory.is_cut
        await env.cleanup(state)
        await env.rubric.score_rollout(state)
        await env.rubric.cleanup(state)
        return state["reward"]

    async def _begin(self) -> None:
        if self._state is None:
            if self._task is None:
                raise ToolServerError("The environment has no rollout without a task.")
            self._state, self._known = await self._bridge.state_of(self._task)
            self._state |= self._left.get("state", {})
            self._calls_at_end = self._left.get("calls_at_end")

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, as the library does after a turn of the policy."""
        if self._calls_at_end is not None:
            return OVER
        self._num_calls += 1
        call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        self._written.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if await self._is_over(is_counted=False):
            self._calls_at_end = self._num_calls
            return OVER
        text = await self._respond()
        self._written.append({"role": "tool", "content": text})
        if self._has_last_words and await self._is_over():
            self._calls_at_end = self._num_calls
        return text

    async def _reply(self, messages: Sequence[Message]) -> str | None:
        self._written = list(messages)
        if self._calls_at_end is not None or await self._is_over():
            return None
        text = await self._respond()
        return None if self._has_last_words and await self._is_over() else text

    @property
    def _has_last_words(self) -> bool:
        return self._state.get("final_env_response") is not None

    async def _is_over(self, *, is_counted: bool = True) -> bool:
        """Ask the environment whether the rollout is over; not for its number of turns, where that is not known."""
        self._set_steps(self._written)
        is_over = await self._bridge.env.is_completed(self._state)
        if is_over and not is_counted and self._state["stop_condition"] == "max_turns_reached":
            # Calls of one turn come one by one, and look like turns. The number of turns is limited by the rollout.
            self._state["is_completed"], self._state["stop_condition"] = False, None
            return False
        return is_over

    async def _respond(self) -> str:
        messages = [*self._state["prompt"], *self._messages(self._written)]
        said = await self._bridge.env.env_response(messages, self._state)
        return said if isinstance(said, str) else "\n\n".join(filter(None, map(_text, said)))

    def _set_steps(self, messages: Sequence[Message]) -> None:
        """Write the turns of the policy into the state."""
        prompt, written = list(self._state["prompt"]), self._messages(messages)
        self._state["trajectory"] = [
            {
                "prompt": [*prompt, *written[:index]],
                "completion": [message],
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": self._state["trajectory_id"],
                "extras": {},
            }
            for index, message in enumerate(written)
            if message.role == "assistant"
        ]

    def _messages(self, messages: Sequence[Message]) -> list[Any]:
        """Return messages as the library has them."""
        vf, numbers, answered = self._bridge.vf, count(), count()
        found: list[Any] = []
        for message in messages:
            text = message.get("content") or ""
            if message["role"] == "assistant":
                functions = [call["function"] for call in message.get("tool_calls") or ()]
                calls = [
                    vf.ToolCall(id=f"call_{next(numbers)}", name=one["name"], arguments=json.dumps(one["arguments"]))
                    for one in functions
                ]
                found.append(vf.AssistantMessage(content=text, tool_calls=calls or None))
            elif message["role"] == "tool":
                found.append(vf.ToolMessage(tool_call_id=f"call_{next(answered)}", content=text))
            else:
                found.append(vf.UserMessage(content=text))
        return found

    def _shown(self) -> dict[str, Any]:
        """Return what a recording needs to be judged: what the environment has noted, as far as it is JSON."""
        noted: dict[str, Any] = {}
        for key in {*self._state} - self._known | {"final_env_response", "is_completed", "stop_condition"}:
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                noted[key] = json.loads(json.dumps(_plain(self._state.get(key))))
        return {"state": noted, "calls_at_end": self._calls_at_end}


def _keep(kept: OrderedDict[str, T], name: str, value: T) -> None:
    kept[name] = value
    if len(kept) > MAX_HELD:
        kept.popitem(last=False)


def _library() -> Any:
    """Return the library, or say how to get it."""
    if find_spec(_PACKAGE) is None:
        raise SettingsError(f"verifiers is not installed. Run {_INSTALL}.")
    vf: Any = importlib.import_module(_PACKAGE)
    try:
        importlib.import_module(f"{_PACKAGE}.envs.stateful_tool_env")
        _ = vf.load_environment
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"verifiers {getattr(vf, '__version__', '')} cannot be used: {error}. Its environments with `load_environment` and a rubric "
            f"are in versions 0.1.14 to {VERSION}. Run {_INSTALL}."
        ) from error
    return vf


def _check(vf: Any, name: str, env: Any) -> None:
    """Refuse an environment that cannot be carried over, and say why."""
    kinds = {kind.__name__ for kind in type(env).__mro__}
    remote = [kind for kind in _REMOTE if kind in kinds]
    judges = [
        type(one).__name__ for one in _rubrics(env.rubric) if "JudgeRubric" in {k.__name__ for k in type(one).__mro__}
    ]
    why = None
    if not isinstance(env, vf.MultiTurnEnv):
        why = f"it is a `{type(env).__name__}`, and only `MultiTurnEnv` and what is made of it take turns; name its parts one by one"
    elif remote:
        why = f"it runs in sandboxes or at services of others (`{remote[0]}`), which are not here"
    elif judges:
        why = f"its rubric asks a judge at an endpoint (`{judges[0]}`); give it a rubric that computes its rewards"
    elif env.rubric.has_group_rewards:
        why = "its rubric compares the rollouts of a group, and a reward here is for one trajectory"
    elif env.message_type != "chat":
        why = "it completes text, and a policy here writes messages"
    else:
        changed = [one for one in _OVERRIDES if getattr(type(env), one) is not getattr(vf.MultiTurnEnv, one)]
        if changed:
            why = f"its `{changed[0]}` decides what the policy sees or how its turns are kept, which is done here"
    if why is not None:
        raise SettingsError(f"The environment {name!r} of verifiers cannot be used: {why}.")


def _rubrics(rubric: Any) -> list[Any]:
    return [rubric, *(inner for one in getattr(rubric, "rubrics", ()) for inner in _rubrics(one))]


def _datasets(env: Any) -> dict[str, Any]:
    """Return the datasets of an environment by split, with prompts."""
    found = {"train": env.build_dataset(), "test": env.build_eval_dataset()}
    return {split: dataset for split, dataset in found.items() if dataset is not None}


def _row(split: str, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
    name, info = f"{split}-{index}", row.get("info")
    info = _value(info) if isinstance(info, str) else info
    if isinstance(info, Mapping) and info.get("tool_defs"):
        raise SettingsError(
            f"Task {name!r} of the environment has tools of its own in `info`, which cannot be carried over."
        )
    if not isinstance(row["prompt"], list):
        raise SettingsError(
            f"The prompt of task {name!r} must be a list of messages, got {str(row['prompt'])[:100]!r}."
        )
    prompt = [{key: given for key, given in message.items() if given is not None} for message in row["prompt"]]
    if pictures := [message for message in prompt if not isinstance(message.get("content"), str)]:
        raise SettingsError(f"The prompt of task {name!r} has a message that is not text: {str(pictures[0])[:200]}.")
    solution = _value(row.get("solution"))
    is_script = isinstance(solution, Mapping) and solution.keys() & {"steps", "rounds"}
    return {
        "task_id": name,
        "prompt": prompt,
        "split": split,
        "row": index,
        **({"solution": solution} if is_script else {}),
    }


def _until_call(messages: Sequence[Message], number: int | None) -> list[Message]:
    """Return messages up to the one of the policy that has a tool call of a number, from 1; all of them without one."""
    if number is not None:
        for index, message in enumerate(messages):
            number -= len(message.get("tool_calls") or ()) if message["role"] == "assistant" else 0
            if number <= 0:
                return list(messages[: index + 1])
    return list(messages)


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else message.content
    if isinstance(content, str):
        return content
    parts = _plain(content) or []
    return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in parts)


def _plain(value: Any) -> Any:
    """Return models of pydantic as plain objects."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given


def _client(vf: Any) -> Any:
    """Return a client of the library that has no model behind it: the policy does not speak through it."""

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise vf.Error("The environment asks a model by itself, which cannot be carried over.")

    methods: dict[str, Any] = dict.fromkeys([*vf.Client.__abstractmethods__, "get_response"], refuse)
    return type("NoClient", (vf.Client,), methods)(None)


def _finished(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end in a thread of its own, since there may be an event loop in this one."""

    async def run() -> T:
        return await work()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(run())).result()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what Ctrl-C does: an environment of the library takes it over when it is made."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    kept = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for kind, handler in kept.items():
                signal.signal(kind, handler)
