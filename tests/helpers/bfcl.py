"""Write a small package in the form of `bfcl_eval`: one API with state, an executor that evaluates calls, and a checker, all made up."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any


NUM_CONVERSATIONS = 4  # of each category

_CODE = {
    "constants/executable_backend_config.py": """
        MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Jar": "jar.json", "Other": "other.json"}
        CLASS_FILE_PATH_MAPPING = {"Jar": "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.jar"}
    """,
    "constants/default_prompts.py": """
        MAXIMUM_STEP_LIMIT = 3
        DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC = "There is more now."
    """,
    "eval_checker/multi_turn_eval/func_source_code/jar.py": """
        class Jar:
            def _load_scenario(self, scenario, long_context=False):
                self.coins = list(scenario["coins"]) + ["long"] * long_context

            def put(self, coin):
                if coin == "":
                    return {"error": "no coin"}
                self.coins.append(coin)
                return {"count": len(self.coins)}

            def list_all(self):
                return {"coins": self.coins}
    """,
    "eval_checker/multi_turn_eval/multi_turn_utils.py": """
        import copy
        import importlib
        import json
        import re
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING


        def execute_multi_turn_func_call(
            func_call_list, initial_config, involved_classes, model_name, test_entry_id, long_context=False
        ):
            results, instances = [], {}
            for kind in involved_classes:
                name = f"{model_name}_{test_entry_id}_{kind}"
                if name not in globals():
                    instance = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[kind]), kind)()
                    instance._load_scenario(copy.deepcopy(initial_config[kind]), long_context=long_context)
                    globals()[name] = instance
                instances[kind] = globals()[name]
            for call in func_call_list:
                try:
                    results.append(json.dumps(eval(f"{name}.{call}")))
                except Exception as error:
                    results.append(f"Error during execution: {error}")
            return results, instances
    """,
    "eval_checker/multi_turn_eval/multi_turn_checker.py": """
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call


        def multi_turn_checker(model_turns, right_turns, test_entry, test_category, model_name):
            said = []
            for steps, right in zip(model_turns, right_turns, strict=True):
                setting = test_entry["initial_config"], test_entry["involved_classes"]
                is_long = {"long_context": "long_context" in test_entry["id"]}
                for step in steps:
                    results, ours = execute_multi_turn_func_call(step, *setting, model_name, "x", **is_long)
                    said += results
                wanted, theirs = execute_multi_turn_func_call(right, *setting, "right", "x", **is_long)
                if right and (not steps or vars(ours["Jar"]) != vars(theirs["Jar"])):
                    return {"valid": False}
                if any(one not in said for one in wanted):
                    return {"valid": False}
            return {"valid": True}
    """,
}
_FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "put",
        "description": "Put a coin in.",
        "parameters": {"type": "dict", "properties": {"coin": {"type": "integer"}}, "required": ["coin"]},
    },
    {"name": "list_all", "description": "List.", "parameters": {"type": "dict", "properties": {}, "required": []}},
]


def write_bfcl(folder: Path) -> Path:
    """Write the package `bfcl_eval` into a folder, and return it."""
    root = folder / "bfcl_eval"
    for name, text in _CODE.items():
        for parent in [root / name, *(root / name).parents]:
            if parent.is_relative_to(root) and parent.suffix != ".py":
                parent.mkdir(parents=True, exist_ok=True)
                (parent / "__init__.py").touch()
        (root / name).write_text(dedent(text).lstrip())
    _write(root / "data/multi_turn_func_doc/jar.json", _FUNCTIONS)
    for category in ("base", "miss_func", "miss_param", "long_context"):
        entries, answers = [], []
        for number in range(NUM_CONVERSATIONS):
            entry = {
                "id": f"multi_turn_{category}_{number}",
                "question": [[_user(f"Put {number} in.")], [_user("List all.")]],
                "initial_config": {"Jar": {"coins": [number]}},
                "involved_classes": ["Jar"],
            }
            # Arguments without a name, and of another type than the documented one.
            right = [[f"put({number})", "put(coin='one')"], ["list_all()"]]
            if category == "miss_func":
                entry |= {"missed_function": {"2": ["list_all", "put"]}}
                entry["question"].append([])
                right.insert(1, [])
            entries.append(entry)
            answers.append({"id": entry["id"], "ground_truth": right})
        _write(root / f"data/BFCL_v4_multi_turn_{category}.json", entries)
        _write(root / f"data/possible_answer/BFCL_v4_multi_turn_{category}.json", answers)
    return folder


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
