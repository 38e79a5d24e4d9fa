"""Sampling from the policy: generators, vLLM engines and servers, and how weights reach them."""

from mcp_grpo.sampling.generator import Generation, Generator, Sampling
from mcp_grpo.sampling.transformers_generator import TransformersGenerator


__all__ = ["Generation", "Generator", "Sampling", "TransformersGenerator"]
