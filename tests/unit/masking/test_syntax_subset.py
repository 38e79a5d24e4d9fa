"""Syntax never forces what a grammar of the same tools leaves open."""

from functools import cache

import pytest
from data.golden_calls import GOLDENS, Golden
from helpers.families import end_of_turn_ids, family_tokenizer
from transformers import PreTrainedTokenizerFast

from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.masking.roles import GrammarRoles, SyntaxRoles
from mcp_grpo.types import TokenRole


pytest.importorskip("llguidance", reason="needs llguidance, of the extra `grammar`")

FAMILIES = ("qwen3", "qwen3_6", "llama3_1", "gptoss", "glm4moe")


@cache
def both(family: str) -> tuple[PreTrainedTokenizerFast, SyntaxRoles, GrammarRoles]:
    tokenizer = family_tokenizer(family)
    ends = end_of_turn_ids(family, tokenizer)
    grammars = TurnGrammars(tokenizer, end_of_turn_ids=ends)
    return tokenizer, SyntaxRoles(tokenizer, end_of_turn_ids=ends), GrammarRoles(grammars)


# A schema that is not one has no grammar, and a turn without tools needs none.
WITH_GRAMMAR = [g for g in GOLDENS if g.family in FAMILIES and g.tools and "schema is not one" not in g.shows]


@pytest.mark.parametrize("golden", WITH_GRAMMAR, ids=lambda golden: golden.id)
def test_what_syntax_forces_the_grammar_forces_too_if_it_takes_the_turn(golden: Golden) -> None:
    tokenizer, syntax, grammar = both(golden.family)
    ids = tokenizer(golden.text, add_special_tokens=False)["input_ids"]
    by_grammar = grammar.roles(ids, golden.tools)
    if TokenRole.FORCED not in by_grammar:
        return  # it takes arguments in the order of the schema only, and no text after a call
    by_syntax = syntax.roles(ids, golden.tools)
    forced = [i for i, role in enumerate(by_syntax) if role is TokenRole.FORCED]
    assert {by_grammar[i] for i in forced} <= {TokenRole.FORCED}
