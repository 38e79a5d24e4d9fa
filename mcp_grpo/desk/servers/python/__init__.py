"""The Python server: runs code in a sandbox, with a state for each trajectory."""
