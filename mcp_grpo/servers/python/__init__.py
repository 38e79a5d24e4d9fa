"""Runs Python code in a sandbox, with a state for each trajectory."""
