"""The model card of a policy that was trained on tools."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard

from mcp_grpo.inert import markdown, markdown_block, markdown_code
from mcp_grpo.monitor import Results
from mcp_grpo.tools import Catalog


PACKAGES = ("mcp-grpo", "trl", "transformers", "peft", "torch", "mcp")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?", re.ASCII)
_TEMPLATE = """---
{{ card_data }}
---

# {{ model_name | inert }}

{% if is_adapter %}An adapter{% else %}A model{% endif %} that uses the tools of MCP servers, trained with `mcp_grpo`\
{% if base_model %} from {{ base_model | linked }}{% endif %}.

It was trained with the chat template beside it (`chat_template.jinja`). Another template would show it other histories than
in training.
{% if quantization %}
Its base model was quantised for training (see `quantization` in `mcp_grpo.json`). On an unquantised base model it is another
policy. `load_adapter`, `serve_command` and `export_for_serving` of `mcp_grpo` take care of this.
{% endif %}{% if results %}
## Results

{{ results_title | inert }}

| | before | after |
|---|---|---|
{% for name, before, after in results -%}
| {{ name | inert }} | {{ before | inert }} | {{ after | inert }} |
{% endfor %}
{% for note in results_notes -%}
{{ note | inert(600) }}

{% endfor %}{% endif %}{% if has_curves %}
![Metrics over the training steps](curves.png)
{% endif %}
## Servers and tools

It was trained on these tools, named as the prompt names them (catalog `{{ catalog_hash[:16] }}`):

| Tool | Server | What it does | Schema |
|---|---|---|---|
{% for tool in tools -%}
| {{ tool.name | code }} | {{ tool.server | inert }} | {{ tool.description.strip().split("\n")[0] | inert }} | `{{ schema_hash(tool) }}` |
{% endfor %}
The schemas are in `mcp_grpo.json`.

## Tasks

{% if dataset_name %}From {{ dataset_name | linked("datasets/") }}. {% endif %}\
{% if num_tasks %}{{ num_tasks }} tasks.{% else %}A stream of tasks.{% endif %}
{% for column, counts in kinds.items() %}
By {{ column }}: {% for name, count in counts.items() %}{{ name | inert }} ({{ count }}){{ ", " if not loop.last }}{% endfor %}.
{% endfor %}
## Load it

```python
from mcp_grpo import load_adapter

model, tokenizer = load_adapter({{ model_id | quoted }}{% if is_adapter and not base_model %}, base="<the base model>"{% endif %})
```

{% if is_adapter and not quantization %}Plain `peft` loads it, too. {% endif %}{{ ("mcp_grpo.serve_command(" ~ (model_id | quoted) ~ ")") | code }} says how vLLM serves it.

## Training

Group Relative Policy Optimization ([DeepSeekMath](https://huggingface.co/papers/2402.03300)) with TRL's `GRPOTrainer`,
rolled out over the servers{% if num_steps %}, for {{ num_steps }} steps{% endif %}.
{% if command %}
{{ command | block }}
{% endif %}
{% for name, number in versions.items() -%}
- {{ name }}: {{ number }}
{% endfor %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Content of a card about a run."""

    num_tasks: int | None = None
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dataset_name: str | None = None
    results: Results = field(default_factory=Results)
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
    hide: Callable[[str], str] = str,
) -> None:
    """Write a model card that names the tools, keeping the metadata of the one that is there; `hide` takes secrets out."""
    data: Any = ModelCard.load(path, ignore_metadata_errors=True).data
    data.base_model = data.base_model or base_model
    summary = summary or RunSummary()
    filters = {"inert": markdown, "code": markdown_code, "block": _bash, "quoted": json.dumps, "linked": _linked}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    # Secrets first: with its marks escaped, one would not be found any more.
    environment.filters |= {name: partial(_clean_first, hide, shown) for name, shown in filters.items()}
    content = environment.from_string(_TEMPLATE).render(
        card_data=hide(data.to_yaml()),
        model_name=model_name,
        model_id=model_id,
        is_adapter=is_adapter,
        base_model=data.base_model,
        catalog_hash=catalog.hash,
        tools=catalog.tools,
        schema_hash=_schema_hash,
        versions=installed_versions(PACKAGES),
        num_tasks=summary.num_tasks,
        kinds=summary.kinds,
        dataset_name=summary.dataset_name,
        results=summary.results.rows,
        results_title=summary.results.title,
        results_notes=summary.results.notes,
        has_curves=summary.has_curves,
        num_steps=summary.num_steps,
        command=summary.command,
        quantization=summary.quantization,
    )
    ModelCard(content, ignore_metadata_errors=True).save(path)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed packages; a checkout on the path does not count."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _clean_first(hide: Callable[[str], str], shown: Callable[..., str], text: str, *args: Any) -> str:
    return shown(hide(text), *args)


def _bash(command: str) -> str:
    return markdown_block(command, "bash")


def _linked(name: str, kind: str = "") -> str:
    """Return the name of a model or dataset with a link to it, if it can be one on the Hub."""
    return f"[{name}](https://huggingface.co/{kind}{name})" if _HUB_NAME.fullmatch(name) else markdown(name)


def _schema_hash(tool: Any) -> str:
    return hashlib.sha256(json.dumps(tool.schema, sort_keys=True).encode()).hexdigest()[:12]
