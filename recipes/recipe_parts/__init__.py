"""What the recipes have in common: the command line, the tasks, the pre-flight and the folder of a run."""
