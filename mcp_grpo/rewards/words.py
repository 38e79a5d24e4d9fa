"""Words that answers may have around a name, and words of a refusal; a field such as finance adds its own."""

import re
from dataclasses import dataclass
from functools import cached_property

from mcp_grpo.rewards.numbers import numbers_in


NEVER = r"(?!)"  # matches nothing
CURRENT = r"(?:the\s+|its\s+)?(?:current\s+|present\s+|new\s+)?"
_OF = r"(?:\s+(?:of|at|for)\s+[^:;,()\n]{1,80}?)?"
_NOT = r"(?:\bnot|n['’]t|\bcannot)"
_THINGS = r"data|records?|results?|information|figures?|values?|prices?|match(?:es)?|reports?|entr(?:y|ies)"
_QUALIFIERS = (
    r"such|any|a|available|matching|corresponding|relevant|known|public|published|reported|recorded|valid|usable|official"
    r"|historical|annual|quarterly|daily|year|full-year|(?:fy|q)?\d{1,4}|\d{4}-\d\d-\d\d|(?-i:[A-Z])[\w.&'’-]*"
)
_FOUND = (
    r"available|exist\w*|found|find|located?|identif(?:y|ied)|retrieved?|listed|reported|report|published|publish"
    r"|recorded|released|known|applicable|present|in\s+(?:(?:the|its|our|this|my)\s+)?(?:data|database|records|tools)"
)
_NO_REFUSAL = re.compile(
    r"\?|\b(?:if|whether|unless|maybe|perhaps|possibly|(?:may|might)\s+be\s+no)\b|\b(?:not|n['’]t)\s+(?:true|the\s+case)\b|\bfalse\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class AnswerWords:
    r"""
    Words of a field, each as the alternatives of a regular expression without capitals.

    Args:
        roles (`str`, *optional*):
            What people are, such as `"ceo|president"`: may stand before or after a person's name.
        labels (`str`, *optional*):
            What a name may be introduced as, such as `"company|symbol"` in "The symbol is VLTA".
        registers (`str`, *optional*):
            What a code in brackets may begin with, such as `"nyse"` in "(NYSE: VLTA)".
        name_endings (`str`, *optional*):
            Words at the end of a name that do not matter, such as `"inc|corp"`.
        name_tails (`str`, *optional*):
            What may follow these endings and does matter, such as `r"class \w+"`.
        things (`str`, *optional*):
            What a refusal may say there is none of, such as `"filings?"`.
        qualifiers (`str`, *optional*):
            Words that may stand before these things, such as `"fiscal|net"`.
        found (`str`, *optional*):
            What a refusal may say was not so, such as `"traded"`.
        refusals (`str`, *optional*):
            Other ways of refusing.
    """

    roles: str = NEVER
    labels: str = NEVER
    registers: str = NEVER
    name_endings: str = NEVER
    name_tails: str = NEVER
    things: str = NEVER
    qualifiers: str = NEVER
    found: str = NEVER
    refusals: str = NEVER

    @property
    def role(self) -> str:
        """Return the pattern of a role, perhaps with its abbreviation in brackets."""
        return rf"(?:{self.roles})(?:\s*\(c[efo]o\))?"

    @cached_property
    def lead_in(self) -> re.Pattern[str]:
        """Match the words before a name: "The answer is ...", "CEO: ...", "Dr. ..."."""
        labels = rf"answer|result|name|{self.labels}|{self.role}"
        return _pattern(
            r"^(?:(?:so|thus|therefore|hence)\W+)?"
            rf"(?:(?:(?:[^:;,()\n]{{1,60}}?['’]s?\s+)?{CURRENT}(?:final\s+)?(?:{labels}){_OF}(?:\s+(?:is|was)\b|\s*[:,])"
            r"|(?:it|that|this)\s+(?:is|was)\b|it['’]s)\W+)?"
            rf"(?:(?:the\s+)?{self.role}\s+)?(?:(?:mr|mrs|ms|dr|prof)\b\.?\s+)?"
        )

    @cached_property
    def lead_out(self) -> re.Pattern[str]:
        """Match the words after a name: "..., CEO of Solvane since 2019"."""
        since = r"(?:\s+since\s+(?:\w+\s+){0,2}\d{4})?"
        return _pattern(rf"(?:\s*\(|,\s+|\s+(?:is|has\s+been)\s+){CURRENT}{self.role}{_OF}{since}\s*\)?\W*$")

    @cached_property
    def register(self) -> re.Pattern[str]:
        """Match the start of a code in brackets: "NYSE: "."""
        return _pattern(rf"^\s*(?:{self.registers})\s*:\s*")

    @cached_property
    def aside(self) -> re.Pattern[str]:
        """Match capitalised words that are not part of a name."""
        words = "the|its|a|an|our|current|new|answer|hi|hello|thanks|in|at|for|it|is|as|of|mr|mrs|ms|dr|prof"
        return _pattern(rf"(?:^|(?<=\s))(?:(?:{words})\.?|{self.role})(?=\s|$)")

    @cached_property
    def owner(self) -> re.Pattern[str]:
        """Match a name that owns what follows: "Solvane's CEO", "of Solvane"."""
        return _pattern(rf"(?:['’]s?(?:\s+{self.role})?|\s{self.role})$|^(?:of|for|at|hi|hello|thanks)\s")

    @cached_property
    def asked(self) -> re.Pattern[str]:
        """Match what follows a name that something is said about."""
        return _pattern(
            rf"\s*(?:\([^()]*\)\s*)?(?::|['’]s?\s|{self.role}\b|has\s+(?-i:[A-Z])|is\s+(?:led|run|headed)\s)"
        )

    @cached_property
    def name_noise(self) -> re.Pattern[str]:
        """Match endings of a name that do not matter, in words without punctuation."""
        return _pattern(rf"(?<=\w)(?: (?:{self.name_endings}))+(?=(?: (?:{self.name_tails}))?$)")

    @cached_property
    def comma_before_ending(self) -> re.Pattern[str]:
        """Match the comma of "Acme, Inc.", which separates nothing."""
        return _pattern(rf",\s+(?=(?:{self.name_endings})\b)")

    @cached_property
    def refusal(self) -> re.Pattern[str]:
        """Match a statement that there is no such thing."""
        thing = rf"(?:{_THINGS}|{self.things})"
        such = rf"(?:{_QUALIFIERS}|{self.qualifiers}|{thing})"
        return _pattern(
            rf"\bno\s+(?:{such}\s+){{0,5}}{thing}\b(?!\s+(?:change|difference|problem|issue|doubt|fee|limit|need|gap|halt|suspension|missing|lacking)s?\b)"
            rf"|{_NOT}\s+(?:yet\s+|been\s+|be\s+|currently\s+|publicly\s+|able\s+to\s+|actually\s+|appear\s+to\s+|seem\s+to\s+)*(?:{_FOUND}|{self.found})\b"
            rf"|{_NOT}\s+(?:have\s+|find\s+|return\s+|show\s+)?any\s+(?:{such}\s+){{0,4}}{thing}\b"
            rf"|{_NOT}\s+(?:have|find|return|show)\s+(?:{such}\s+){{0,4}}{thing}\b"
            r"|\bunable\s+to\s+(?:find|locate|identify|retrieve)\b"
            r"|\b(?:none|nothing)\s+(?:(?:is|was|were|could\s+be|has\s+been)\s+)?(?:available|found|reported|recorded|published|exists?)\b"
            rf"|\b{thing}\s+(?:is|are|was|were)\s+(?:missing|unknown)\b"
            r"|\byet\s+to\s+(?:be\s+)?(?:report|publish|release)(?:ed|d)?\b"
            r"|\b(?:0|zero)\s+(?:results|records|matches)\b"
            rf"|(?<!not )\bunavailable\b|\bnon-?existent\b|(?<![\w/])n/a\b|{self.refusals}"
        )

    def is_refusal(self, text: str) -> bool:
        """Tell whether a text says that what was asked for does not exist, without giving a figure."""
        figures = [number for number in numbers_in(text) if not number.is_year and not number.is_count]
        return self.refusal.search(text) is not None and _NO_REFUSAL.search(text) is None and not figures


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


GENERAL = AnswerWords()
"""No field in particular."""
