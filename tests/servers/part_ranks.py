"""Runs programs of this folder on several processes, one after the other. Arguments: the output folder, and their names."""

import os
import sys
from importlib import import_module
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch


torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
try:
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1], name)
        folder.mkdir(exist_ok=True)
        import_module(f"servers.{name}").run(folder)
finally:
    torch.distributed.destroy_process_group()
