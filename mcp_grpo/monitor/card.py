"""The model card of a policy that was trained on tools."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
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
{% if quantization %}
Its base model was quantised when it was loaded for training (the `quantization` of `mcp_grpo.json`). On a base model that is
not, it is another policy. `load_adapter`, `serve_command` and `export_for_serving` of `mcp_grpo` see to it.
{% endif %}{% if results %}
## Results

{{ results_title }}

| | before | after |
|---|---|---|
{% for name, before, after in results -%}
| {{ name }} | {{ "%.2f" | format(before) }} | {{ "%.2f" | format(after) }} |
{% endfor %}{% endif %}{% if has_curves %}
![Figures over the steps of the training](curves.png)
{% endif %}
## Servers and tools

It was trained on these tools, named as the prompt names them (catalog `{{ catalog_hash[:16] }}`):

| Tool | Server | What it does | Schema |
|---|---|---|---|
{% for tool in tools -%}
| `{{ tool.name }}` | {{ tool.server }} | {{ tool.description.strip().split("\n")[0] | replace("|", "\\\\|") }} | `{{ schema_hash(tool) }}` |
{% endfor %}
The schemas are in `mcp_grpo.json`.

## Tasks

{% if dataset_name %}From [{{ dataset_name }}](https://huggingface.co/datasets/{{ dataset_name }}). {% endif %}\
{% if num_tasks %}{{ num_tasks }} tasks.{% else %}A stream of tasks.{% endif %}
{% for column, counts in kinds.items() %}
By {{ column }}: {% for name, count in counts.items() %}{{ name }} ({{ count }}){{ ", " if not loop.last }}{% endfor %}.
{% endfor %}
## Load it

```python
from mcp_grpo import load_adapter

model, tokenizer = load_adapter("{{ model_id }}"{% if is_adapter and not base_model %}, base="<the base model>"{% endif %})
```

{% if is_adapter and not quantization %}Plain `peft` loads it, too. {% endif %}`mcp_grpo.serve_command("{{ model_id }}")` says how vLLM serves it.

## Training

Group Relative Policy Optimization ([DeepSeekMath](https://huggingface.co/papers/2402.03300)) with TRL's `GRPOTrainer`,
rolled out over the servers{% if num_steps %}, for {{ num_steps }} steps{% endif %}.
{% if command %}
```bash
{{ command }}
```
{% endif %}
{% for name, number in versions.items() -%}
- {{ name }}: {{ number }}
{% endfor %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """
    What a card says about a run.

    Args:
        num_tasks (`int`, *optional*):
            Tasks that were trained on; `None` for a stream.
        kinds (`Mapping[str, Mapping[str, int]]`, *optional*):
            How many tasks there are of each kind, for each column that names kinds.
        dataset_name (`str`, *optional*):
            The tasks' name on the Hub.
        results (`Sequence[tuple[str, float, float]]`, *optional*):
            What it is, before, after.
        results_title (`str`, *optional*):
            What they were measured on.
        has_curves (`bool`, *optional*, defaults to `False`):
            Whether there is a picture of the run beside the card.
        num_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps.
        command (`str`, *optional*):
            What the run was started with.
        quantization (`Mapping[str, Any]`, *optional*):
            What the base model was quantised by when it was loaded.
    """

    num_tasks: int | None = None
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dataset_name: str | None = None
    results: Sequence[tuple[str, float, float]] = ()
    results_title: str = ""
    has_curves: bool = False
    num_steps: int = 0
    command: str | None = None
    quantization: Mapping[str, Any] | None = None


def rewrite_card(
    path: Path,
    catalog: Catalog,
    *,
    model_name: str,
    model_id: str,
    is_adapter: bool,
    base_model: str | None = None,
    summary: RunSummary | None = None,
) -> None:
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
        base_model (`str`, *optional*):
            The base model's name on the Hub, if TRL's card does not say it.
        summary ([`RunSummary`], *optional*):
            What else there is to say about the run.
    """
    data: Any = ModelCard.load(path, ignore_metadata_errors=True).data
    data.base_model = data.base_model or base_model
    summary = summary or RunSummary()
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
        schema_hash=_schema_hash,
        versions=installed_versions(packages),
        num_tasks=summary.num_tasks,
        kinds=summary.kinds,
        dataset_name=summary.dataset_name,
        results=[(name.strip(), before, after) for name, before, after in summary.results],
        results_title=summary.results_title,
        has_curves=summary.has_curves,
        num_steps=summary.num_steps,
        command=summary.command,
        quantization=summary.quantization,
    ).save(path)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """
    Versions of packages.

    Args:
        packages (`Sequence[str]`):
            Their names, as `pip` knows them.

    Returns:
        `dict[str, str]`: Versions of those that are installed: a checkout on the path is not.
    """
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _schema_hash(tool: Any) -> str:
    return hashlib.sha256(json.dumps(tool.schema, sort_keys=True).encode()).hexdigest()[:12]
