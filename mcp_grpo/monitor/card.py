"""The model card of a policy that was trained on tools."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from mcp_grpo.tools import Catalog


_TEMPLATE = """---
{{ card_data }}
---

# {{ model_name }}

{% if is_adapter %}An adapter{% else %}A model{% endif %} that uses the tools of MCP servers, trained with `mcp_grpo`\
{% if base_model %} from [{{ base_model }}](https://huggingface.co/{{ base_model }}){% endif %}.

It was trained on the chat template that comes with it (`chat_template.jinja`). With another template it sees other
histories than it was trained on.

## Tools

It was trained on these tools, named as the prompt names them (catalog `{{ catalog_hash[:16] }}`):

| Tool | Server | What it does |
|---|---|---|
{% for tool in tools -%}
| `{{ tool.name }}` | {{ tool.server }} | {{ tool.description.strip().split("\n")[0] | replace("|", "\\\\|") }} |
{% endfor %}
## Load it

```python
{% if is_adapter -%}
from peft import AutoPeftModelForCausalLM as AutoModelForCausalLM
from transformers import AutoTokenizer
{%- else -%}
from transformers import AutoModelForCausalLM, AutoTokenizer
{%- endif %}

model = AutoModelForCausalLM.from_pretrained("{{ model_id }}")
tokenizer = AutoTokenizer.from_pretrained("{{ model_id }}")
```

## Training

Group Relative Policy Optimization ([DeepSeekMath](https://huggingface.co/papers/2402.03300)) with TRL's `GRPOTrainer`,
rolled out over the servers.

{% for name, number in versions.items() -%}
- {{ name }}: {{ number }}
{% endfor %}"""


def rewrite_card(path: Path, catalog: Catalog, *, model_name: str, model_id: str, is_adapter: bool) -> None:
    """
    Write a model card that names the tools, keeping the metadata of the one that is there.

    Args:
        path (`Path`):
            The card that TRL wrote.
        catalog (`Catalog`):
            The tools that were trained on.
        model_name (`str`):
            Heading.
        model_id (`str`):
            What to load the policy by.
        is_adapter (`bool`):
            Whether it is an adapter, not a whole model.
    """
    data: Any = ModelCard.load(path, ignore_metadata_errors=True).data
    packages = ("mcp-grpo", "trl", "transformers", "peft", "torch", "mcp")
    ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        model_name=model_name,
        model_id=model_id,
        is_adapter=is_adapter,
        base_model=data.base_model,
        catalog_hash=catalog.hash,
        tools=catalog.tools,
        versions={name: version(name) for name in packages},
    ).save(path)
