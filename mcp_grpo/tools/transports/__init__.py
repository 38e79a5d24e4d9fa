"""Transports: how messages reach a server, and how its process ends."""
