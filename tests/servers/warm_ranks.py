"""A warm start on several processes that share the weights. Arguments: those of the recipe."""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "recipes"))

import sft_warmup
from helpers.ranks import share_weights_on_cpu
from torch.distributed.tensor import DTensor

from mcp_grpo.train import imitation


asked = []
original = imitation.conversations


def conversations(*args):
    """Servers that answer one process with more than the other."""
    asked.append(os.environ["RANK"])
    return original(*args)[int(os.environ["RANK"]) :]


if __name__ == "__main__":  # another process may be started from here
    imitation.conversations = conversations
    with share_weights_on_cpu():
        trainer = sft_warmup.main(sys.argv[1:])
    facts = {
        "asked": asked,
        "num_rows": len(trainer.train_dataset),
        "is_sharded": any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
    }
    Path(trainer.args.output_dir, f"rank{os.environ['RANK']}.json").write_text(json.dumps(facts))
