"""Write a small benchmark in the form of WorkBench: a shelf, a stock list, and state in global variables, all made up."""

from pathlib import Path
from textwrap import dedent


TEMPLATES = ["Put {item} on the shelf", "Take {item} off", "Is {item} there?", "Rename {item}", "Shelve {item} twice"]
ITEMS = ["a lamp", "two cups"]
NUM_TASKS = len(TEMPLATES) * len(ITEMS)
NUM_IDLE = 2 * len(ITEMS)  # those of the third template, and of the fourth, whose actions change nothing

_FILES = {
    "src/tools/shelf.py": '''
        import pandas as pd
        from langchain.tools import tool
        from src.data_generation.dates import HARDCODED_CURRENT_TIME

        ITEMS = pd.read_csv("data/processed/items.csv", dtype=str)


        def reset_state():
            global ITEMS
            ITEMS = pd.read_csv("data/processed/items.csv", dtype=str)


        @tool("shelf.put", return_direct=False)
        def put(item=None, place=None):
            """
            Puts an item on the shelf.

            Parameters
            ----------
            item : str, optional
                Name of the item.
            place: str, optional
                Where it goes, such as {{"left"}}.

            Returns
            -------
            message : str
                What happened.
            """
            ITEMS.loc[len(ITEMS)] = [item, place, HARDCODED_CURRENT_TIME]
            return f"There are {len(ITEMS)} items."


        @tool("shelf.remove", return_direct=False)
        def remove(item=None):
            """Removes an item."""
            global ITEMS
            ITEMS = ITEMS[ITEMS["item"] != item]
            return "Removed."


        @tool("shelf.find", return_direct=False)
        def find(item=""):
            """Finds items."""
            return ITEMS[ITEMS["item"].str.contains(item)]["item"].to_list()
    ''',
    "src/tools/company_directory.py": '''
        import pandas as pd
        from langchain.tools import tool

        EMAILS = pd.read_csv("data/raw/email_addresses.csv", header=None, names=["email_address"])


        @tool("company_directory.find_email_address", return_direct=False)
        def find_email_address(name=""):
            """Finds an address."""
            return EMAILS[EMAILS["email_address"].str.contains(name)]["email_address"].values
    ''',
    "src/tools/toolkits.py": """
        from src.tools import shelf, company_directory

        tools_with_side_effects = [shelf.put, shelf.remove]
        tools_without_side_effects = [shelf.find, company_directory.find_email_address]
        all_tools = tools_with_side_effects + tools_without_side_effects
        homes = [tool.__module__ for tool in all_tools]
    """,
    "src/data_generation/dates.py": """
        import random
        import numpy as np
        import pandas as pd

        np.random.seed(42)
        random.seed(42)
        HARDCODED_CURRENT_TIME = pd.to_datetime("2031-05-04T00:00:00")
    """,
    "src/evals/utils.py": """
        from langchain_openai import ChatOpenAI
        from langchain.agents import AgentType, initialize_agent
        from src.tools import shelf
        from src.tools.toolkits import all_tools
        from src.data_generation.dates import HARDCODED_CURRENT_TIME

        DOMAINS = [shelf]


        def execute_actions_and_reset_state(actions):
            for domain in DOMAINS:
                domain.reset_state()
            for action in actions:
                try:
                    eval(action)
                except:
                    continue
            state = shelf.ITEMS.copy()
            for domain in DOMAINS:
                domain.reset_state()
            return True, state


        def is_correct(predicted, right, error):
            _, ours = execute_actions_and_reset_state(predicted)
            _, theirs = execute_actions_and_reset_state(right)
            for state in (ours, theirs):
                for column in state.columns:
                    state[column] = state[column].str.lower()
            return ours.equals(theirs)


        def has_side_effects(predicted, right):
            for domain in DOMAINS:
                domain.reset_state()
            before = shelf.ITEMS.copy()
            _, state = execute_actions_and_reset_state(predicted)
            return not state.equals(before) and not is_correct(predicted, right, "")


        def get_toolkits(toolkits):
            names = [*toolkits, "company_directory"]
            return [tool for tool in all_tools if tool.name.split(".")[0] in names]


        def generate_results(agent):
            agent.template = f"It is {HARDCODED_CURRENT_TIME.date()}." + agent.template
    """,
    "data/processed/items.csv": """
        item,place,since
        a book,left,2030-01-01
        ann@our.example,left,2030-01-01
        bob@our.example,left,2030-01-01
        eve@their.example,left,2030-01-01
    """,
}


def write_workbench(folder: Path) -> Path:
    """Write the benchmark, and return its folder."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text).lstrip())
    rows = ["query,answer,base_template,chosen_template,domains"]
    for template in TEMPLATES:
        for item in ITEMS:
            put = f'shelf.put.func(item=""{item}"", place=""left"")'
            actions = {
                TEMPLATES[0]: [put],
                TEMPLATES[1]: ['shelf.remove.func(item=""a book"")'],
                TEMPLATES[2]: [],
                TEMPLATES[3]: ['shelf.remove.func(item=""nothing"")'],
                TEMPLATES[4]: [put, put],
            }[template]
            answer = "[" + ", ".join(f"'{action}'" for action in actions) + "]"
            rows.append(f'"{template.format(item=item)}","{answer}","{template}","{template}","[\'shelf\']"')
    path = folder / "data/processed/queries_and_answers/shelf_queries_and_answers.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return folder
