"""Write environments for the library `verifiers`, each a module with a function `load_environment`, all made up."""

from pathlib import Path
from textwrap import dedent


_MODULES = {
    # Tools with a state of each rollout's own, which the rubric reads; one call ends the rollout.
    "vf_jar": """
        import verifiers as vf
        from datasets import Dataset


        def put(coin: int, jar: list) -> str:
            \"\"\"Put a coin in.

            Args:
                coin: Worth of the coin.
            \"\"\"
            if coin < 0:
                raise ValueError("There is no such coin.")
            if coin == 13:
                raise ConnectionError("The jar is out of reach.")
            jar.append(coin)
            return f"{len(jar)} in the jar"


        def seal(jar: list) -> str:
            \"\"\"Close the jar for good.\"\"\"
            return "sealed"


        class Jar(vf.StatefulToolEnv):
            async def setup_state(self, state):
                state["jar"] = []
                return state

            def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
                return {**tool_args, "jar": state["jar"]}

            async def env_response(self, messages, state, **kwargs):
                said = await super().env_response(messages, state, **kwargs)
                if messages[-1].tool_calls[0].name == "seal":
                    state["final_env_response"] = said
                return said

            @vf.stop
            async def is_full(self, state):
                return len(state["jar"]) >= 3


        async def is_right(state, answer):
            return float(sum(state["jar"]) == int(answer))


        def says_done(completion, **kwargs):
            return float("done" in str(completion[-1].content))


        def load_environment(size: int = 4, **settings):
            rows = [{"question": f"Put {number} in.", "answer": str(number)} for number in range(1, size + 1)]
            rubric = vf.Rubric(funcs=[is_right, says_done], weights=[1.0, 0.25])
            env = Jar(
                dataset=Dataset.from_list(rows),
                eval_dataset=lambda: Dataset.from_list(rows[:2]),
                rubric=rubric,
                system_prompt="Be brief.",
                stop_errors=[ConnectionError],
                max_turns=5,
                **settings,
            )
            env.add_tool(put, args_to_skip=["jar"])
            env.add_tool(seal, args_to_skip=["jar"])
            return env
    """,
    # A game without tools, whose answers are the user's.
    "vf_guess": """
        import verifiers as vf
        from datasets import Dataset


        class Guess(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                if not messages[-1].content.isdecimal():
                    return [{"role": "user", "content": "That is no number."}]
                guess, wanted = int(messages[-1].content), int(state["answer"])
                if guess == wanted:
                    state["final_env_response"] = [{"role": "user", "content": "Right."}]
                    return state["final_env_response"]
                return [{"role": "user", "content": "Higher." if guess < wanted else "Lower."}]


        def is_found(completion, answer):
            return float(any(m.role == "assistant" and m.content == answer for m in completion))


        def is_quick(state):
            return 1 / len(state["trajectory"])


        def load_environment():
            rows = [{"question": "Guess a number from 1 to 9.", "answer": str(number)} for number in (3, 7)]
            return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric([is_found, is_quick], [1.0, 0.5]), max_turns=4)
    """,
    "vf_single": """
        import verifiers as vf
        from datasets import Dataset


        def load_environment():
            rows = [{"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2", "solution": "1 + 1 = 2"}]
            parser = vf.XMLParser(["answer"])

            def is_right(parser, completion, answer):
                return float(parser.parse_answer(completion) == answer)

            rubric = vf.Rubric([is_right, parser.get_format_reward_func()], [1.0, 0.2], parser=parser)
            return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)
    """,
    "vf_refused": """
        import verifiers as vf
        from datasets import Dataset

        ROWS = [{"question": "?", "answer": "!"}]


        class Reworded(vf.SingleTurnEnv):
            async def setup_state(self, state):
                state["prompt"] = [*state["prompt"], vf.UserMessage(content="And another one.")]
                return state


        class Nonlinear(vf.SingleTurnEnv):
            async def get_prompt_messages(self, state):
                return state["prompt"]


        class SandboxEnv(vf.SingleTurnEnv):
            pass


        class JudgeRubric(vf.Rubric):
            pass


        def compare(completions, **kwargs):
            return [0.0] * len(completions)


        def load_environment(kind):
            rubric, rows = vf.Rubric([lambda completion: 0.0]), ROWS
            if kind == "judged":
                rubric = vf.RubricGroup([rubric, JudgeRubric()])
            if kind == "compared":
                rubric = vf.Rubric([compare])
            if kind == "own tools":
                rows = [{**ROWS[0], "info": {"tool_defs": [{"name": "a", "description": "", "parameters": {}}]}}]
            if kind == "broken":
                raise ValueError("It is broken.")
            kinds = {"reworded": Reworded, "nonlinear": Nonlinear, "sandbox": SandboxEnv}
            return kinds.get(kind, vf.SingleTurnEnv)(dataset=Dataset.from_list(rows), rubric=rubric)
    """,
}


def write_environments(folder: Path) -> Path:
    """Write the modules into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _MODULES.items():
        (folder / f"{name}.py").write_text(dedent(text).lstrip())
    return folder
