"""The project that trackers show a run in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


# Where trackers look for the name of a project; without it, all runs of all projects are in one.
VARIABLES = ("WANDB_PROJECT", "COMET_PROJECT_NAME", "CLEARML_PROJECT", "SWANLAB_PROJECT", "MLFLOW_EXPERIMENT_NAME")


@contextmanager
def project_of_trackers(name: str) -> Iterator[None]:
    """
    Name a run's project to trackers that are started meanwhile, unless the environment does.

    Args:
        name (`str`):
            Name of the project.
    """
    own = [variable for variable in VARIABLES if variable not in os.environ]
    os.environ.update(dict.fromkeys(own, name))
    try:
        yield
    finally:
        for variable in own:
            os.environ.pop(variable, None)
