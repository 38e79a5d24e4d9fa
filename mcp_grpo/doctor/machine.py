"""What a machine has."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers.utils.import_utils import is_torch_bf16_gpu_available


@dataclass(frozen=True, kw_only=True)
class Machine:
    """
    What a machine has.

    Args:
        gpu (`str`, *optional*):
            Name of the GPU; `None` if there is none.
        memory (`float`, *optional*, defaults to `0.0`):
            GiB of the smallest GPU.
        has_bf16 (`bool`, *optional*, defaults to `False`):
            Whether the GPU computes in bf16.
        packages (`frozenset[str]`, *optional*):
            Which of `vllm` and `bitsandbytes` are installed.
    """

    gpu: str | None = None
    memory: float = 0.0
    has_bf16: bool = False
    packages: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> "Machine":
        """Look at this machine."""
        packages = frozenset(name for name in ("vllm", "bitsandbytes") if find_spec(name) is not None)
        if not torch.cuda.is_available():
            return cls(packages=packages)
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        smallest = min(gpus, key=lambda gpu: gpu.total_memory)
        return cls(
            gpu=smallest.name,
            memory=smallest.total_memory / 2**30,
            has_bf16=is_torch_bf16_gpu_available(),
            packages=packages,
        )
