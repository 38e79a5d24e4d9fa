"""Whether a text says that there is no such data, company or price."""

import re

from mcp_grpo.rewards.numbers import numbers_in


_THING = (
    r"(?:data|records?|results?|information|figures?|values?|prices?|quotes?|close|trad(?:es?|ing)|listings?|compan(?:y|ies)"
    r"|stocks?|shares?|securit(?:y|ies)|symbols?|tickers?|match(?:es)?|reports?|filings?|statements?|entr(?:y|ies)"
    r"|revenues?|income|profits?|earnings|eps|dividends?)"
)
_SUCH = (
    r"(?:such|any|a|closing|opening|closed|available|matching|corresponding|relevant|known|public|published|reported|recorded|listed"
    r"|valid|usable|official|historical|annual|quarterly|daily|adjusted|financial|fiscal|year|full-year|market|net|gross|operating"
    r"|(?:fy|q)?\d{1,4}|\d{4}-\d\d-\d\d|(?-i:[A-Z])[\w.&'’-]*|" + _THING + r")"
)
_FOUND = (
    r"(?:available|exist\w*|found|find|located?|identif(?:y|ied)|retrieved?|listed|trad(?:e|ed|ing)|reported|report|published|publish"
    r"|recorded|released|known|applicable|present|(?:gone\s+)?public|in\s+(?:(?:the|its|our|this|my)\s+)?(?:data|database|records|tools|market))"
)
_NOT = r"(?:\bnot|n['’]t|\bcannot)"
_REFUSAL = re.compile(
    rf"\bno\s+(?:{_SUCH}\s+){{0,5}}{_THING}\b(?!\s+(?:change|difference|problem|issue|doubt|fee|limit|need|gap|halt|suspension|missing|lacking)s?\b)"
    rf"|{_NOT}\s+(?:yet\s+|been\s+|be\s+|currently\s+|publicly\s+|able\s+to\s+|actually\s+|appear\s+to\s+|seem\s+to\s+)*{_FOUND}\b"
    rf"|{_NOT}\s+(?:have\s+|find\s+|return\s+|show\s+)?any\s+(?:{_SUCH}\s+){{0,4}}{_THING}\b"
    rf"|{_NOT}\s+(?:have|find|return|show)\s+(?:{_SUCH}\s+){{0,4}}{_THING}\b"
    r"|\bunable\s+to\s+(?:find|locate|identify|retrieve)\b"
    r"|\b(?:none|nothing)\s+(?:(?:is|was|were|could\s+be|has\s+been)\s+)?(?:available|found|reported|recorded|published|exists?)\b"
    rf"|\b(?:{_THING}|results)\s+(?:is|are|was|were)\s+(?:missing|unknown)\b|\bunknown\s+(?:company|symbol|ticker)\b"
    r"|\byet\s+to\s+(?:be\s+)?(?:report|publish|release)(?:ed|d)?\b"
    r"|\b(?:trading|trades?|shares?|stock|it)\b(?:(?!\bnot\b|n['’]t\b|\bnever\b)[^.;?!]){0,40}\b(?:halted|suspended)\b|\b(?:halt|suspension)\s+(?:of|in)\s+trading\b"
    r"|\b(?:0|zero)\s+(?:results|records|matches)\b"
    r"|(?<!not )\bunavailable\b|\bnon-?existent\b|(?<![\w/])n/a\b",
    re.IGNORECASE,
)
_NO_REFUSAL = re.compile(
    r"\?|\b(?:if|whether|unless|maybe|perhaps|possibly|(?:may|might)\s+be\s+no)\b|\b(?:not|n['’]t)\s+(?:true|the\s+case)\b|\bfalse\b",
    re.IGNORECASE,
)


def is_refusal(text: str) -> bool:
    """
    Whether a text says that what was asked for does not exist or is not known to the tools.

    Args:
        text (`str`):
            The text. One that gives a figure all the same, asks back or leaves it open says nothing of the kind; years, dates
            and numbers of days or results are no figures.

    Returns:
        `bool`: Whether it does.
    """
    figures = [number for number in numbers_in(text) if not number.is_year and not number.is_count]
    return _REFUSAL.search(text) is not None and _NO_REFUSAL.search(text) is None and not figures
