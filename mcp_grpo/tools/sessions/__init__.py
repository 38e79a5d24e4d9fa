"""Sessions with servers: opened, shared between trajectories, and reopened when they fail."""
