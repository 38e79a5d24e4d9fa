"""Public benchmarks and other environments as they are: their own tools, tasks and checkers, to train on and to evaluate with."""

from mcp_grpo.environments.environment import NAMES, Environment, load_environment
from mcp_grpo.environments.functions import function_server


__all__ = ["NAMES", "Environment", "function_server", "load_environment"]
