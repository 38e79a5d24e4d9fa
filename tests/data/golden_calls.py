"""
Turns with tool calls, each byte labelled by hand.

What is forced stands between « and », what opens a call between ‹ and ›; everything else is a choice. The marks are not
part of the turn.
"""

from dataclasses import dataclass
from typing import Any


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
CLOSED = {"additionalProperties": False}


def tool(name: str, properties: dict[str, Any], required: str = "", **schema: Any) -> dict[str, Any]:
    """A tool whose schema names some arguments; `required` lists those that must be there."""
    parameters = {"type": "object", "properties": properties, "required": required.split(), **schema}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


WEATHER = tool("get_weather", {"city": TEXT}, "city", **CLOSED)
FORECAST = tool("get_forecast", {"city": TEXT, "days": INTEGER}, "city", **CLOSED)
TIME = tool("get_time", {"city": TEXT}, "city")  # open: other arguments are allowed
READ = tool("read_file", {"path": TEXT}, "path", **CLOSED)
READ_ALL = tool("read_files", {"paths": {"type": "array", "items": TEXT}}, "paths", **CLOSED)
STOP = tool("stop", {}, **CLOSED)
PERSON = {"type": "object", "properties": {"name": TEXT, "age": INTEGER}, "required": ["name"], **CLOSED}
BOOK = tool(
    "book",
    {
        "passenger": PERSON,
        "codes": {"type": "array", "items": INTEGER},
        "paid": {"type": "boolean"},
        "price": {"type": "number"},
        "note": {"anyOf": [TEXT, {"type": "null"}]},
        "any": {},
    },
    "passenger",
    **CLOSED,
)
GREET = tool("greet", {"who": {"$ref": "#/$defs/person"}}, "who", **CLOSED, **{"$defs": {"person": PERSON}})
PING = tool("ping", {"count": INTEGER}, **CLOSED)
SEARCH = tool("search", {"query": TEXT})
PAIR = tool("pair", {"at": {"type": "array", "prefixItems": [INTEGER, TEXT], "items": TEXT}}, "at", **CLOSED)
ODD = tool("odd", {'naïve"k"': TEXT}, 'naïve"k"', **CLOSED)
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
BROKEN = tool("broken", {"x": {"type": "no such type"}}, "x", **CLOSED)

ONE, TWO, FILES = (WEATHER,), (FORECAST, TIME), (READ, READ_ALL, STOP)


@dataclass(frozen=True)
class Golden:
    """A turn with its labels: the family whose template writes it, the tools on offer, and what it shows."""

    family: str
    shows: str
    tools: tuple[dict[str, Any], ...]
    marked: str

    @property
    def id(self) -> str:
        return f"{self.family}: {self.shows}"

    @property
    def text(self) -> str:
        return "".join(character for character in self.marked if character not in "«»‹›")

    @property
    def labels(self) -> bytes:
        """A letter per byte of the text: `f`orced, `t`rigger or `c`hoice."""
        labels, label = "", "c"
        for character in self.marked:
            if character in "«»‹›":
                label = {"«": "f", "‹": "t"}.get(character, "c")
            else:
                labels += label * len(character.encode())
        return labels.encode()


def _goldens(family: str, *goldens: tuple[str, tuple[dict[str, Any], ...], str]) -> list[Golden]:
    return [Golden(family, *golden) for golden in goldens]


# A call of the only tool, whose only argument is a text: everything but the text is forced.
_PARIS = '‹<tool_call>›«\n{"name": "get_weather", "arguments": {"city": "»Paris"«}}\n</tool_call>»'
_END = "<|im_end|>"


def _city(value: str) -> str:
    return _PARIS.replace("Paris", value) + _END


JSON_CALLS = _goldens(
    "qwen3",
    ("the only tool", ONE, _PARIS + _END),
    ("an empty text", ONE, _city("")),
    ("escapes", ONE, _city(r"a \"b\" \\ \/ \n")),
    ("unicode", ONE, _city("Zürich, 東京 🎉")),
    ("escaped unicode", ONE, _city(r"Z\u00fcrich \ud83c\udf89")),
    ("a text that looks like syntax", ONE, _city(r"\"}, {\": [1, 2], \"city\": \"")),
    ("a text that looks like a call", ONE, _city(r"{\"name\": \"get_weather\", \"arguments\": {}}")),
    ("a text that ends in a backslash", ONE, _city(r"C:\\")),
    ("text before the call", ONE, "Let me see.\n" + _PARIS + _END),
    ("text after the call", ONE, _PARIS + "\nOne moment." + _END),
    ("reasoning before the call", ONE, "<think>\nParis, so get_weather.\n</think>\n\n" + _PARIS + _END),
    ("a call that is only thought of", ONE, "<think>\n<tool_call>\n{\n</think>\n\n" + _PARIS + _END),
    ("two calls", ONE, _PARIS + "\n" + _PARIS + _END),
    ("three calls with text between them", ONE, "a" + _PARIS + " b " + _PARIS + "\n\n" + _PARIS + "c" + _END),
    (
        "a name is chosen up to where it differs, an optional key may follow or not",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_f«orecast", "arguments": {"»c«ity": "»Paris"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "the last key that is left is forced, the end of a number is not",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_f«orecast", "arguments": {"»c«ity": "»Paris",« "days": »3}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "keys in another order",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_f«orecast", "arguments": {"»d«ays": »-12,« "city": "»Paris"«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "where other arguments are allowed, a required one comes nevertheless",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_t«ime", "arguments": {"»c«ity": "»Oslo"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "an argument that no schema names",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_t«ime", "arguments": {"»c«ity": "»Oslo",« "»zone"«: »"CET"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "an argument that no schema names, first",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_t«ime", "arguments": {"»zone"«: »1,« "»c«ity": "»Oslo"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "two different calls",
        TWO,
        '‹<tool_call>›«\n{"name": "»get_f«orecast", "arguments": {"»c«ity": "»Paris"}«}\n</tool_call>»\n'
        '‹<tool_call>›«\n{"name": "»get_t«ime", "arguments": {"»c«ity": "»Oslo"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "a name that another one begins with ends by choice",
        FILES,
        '‹<tool_call>›«\n{"name": "»read_file"«, "arguments": {"path": "»/tmp/a b"«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "texts in a list",
        FILES,
        '‹<tool_call>›«\n{"name": "»read_files«", "arguments": {"paths": [»"a",« "»b",« "»c"]«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "an empty list",
        FILES,
        '‹<tool_call>›«\n{"name": "»read_files«", "arguments": {"paths": [»]«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "no arguments, because there are none",
        FILES,
        '‹<tool_call>›«\n{"name": "»s«top", "arguments": {}}\n</tool_call>»<|im_end|>',
    ),
    (
        "a nested object",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pas«senger": {"»n«ame": "»Ann"}}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "a nested object with all its keys",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pas«senger": {"»n«ame": "»Ann",« "age": »41}}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "a nested object with its keys in another order",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pas«senger": {"»a«ge": »41,« "name": "»Ann"«}»}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "a boolean",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pas«senger": {"»n«ame": "»Ann"},« "»pa«id": »true}«}\n</tool_call>»'
        "<|im_end|>",
    ),
    (
        "a boolean before what must follow",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pai«d": »false«, "»pa«ssenger": {"»n«ame": "»Ann"}}«}\n</tool_call>»'
        "<|im_end|>",
    ),
    (
        "a text that could have been null",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»n«ote": »"hm"«, "»pas«senger": {"»n«ame": "»Ann"}}«}\n</tool_call>»'
        "<|im_end|>",
    ),
    (
        "values of every kind",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»pas«senger": {"»n«ame": "»A"},« "»c«odes": [»1,« »2],« "»pa«id": »false,«'
        ' "»p«rice": »1.5e3,« "»n«ote": »null,« "any": »{"x"«: »[{}]}«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "anything at all as a value",
        (BOOK,),
        '‹<tool_call>›«\n{"name": "book", "arguments": {"»a«ny": »[[],« »{"a"«: »"b",« "»c"«: »0}]«, "»pas«senger": {"»n«ame": "»A"}}«}'
        "\n</tool_call>»<|im_end|>",
    ),
    (
        "a schema that is referred to",
        (GREET,),
        '‹<tool_call>›«\n{"name": "greet", "arguments": {"who": {"»n«ame": "»Ann"}«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "an optional argument is left out",
        (PING,),
        '‹<tool_call>›«\n{"name": "ping", "arguments": {»}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "an optional argument is given",
        (PING,),
        '‹<tool_call>›«\n{"name": "ping", "arguments": {»"«count": »2}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "an optional argument beside others that no schema names",
        (SEARCH,),
        '‹<tool_call>›«\n{"name": "search", "arguments": {»"query"«: "»x"}«}\n</tool_call>»<|im_end|>',
    ),
    (
        "a list whose first items have types of their own",
        (PAIR,),
        '‹<tool_call>›«\n{"name": "pair", "arguments": {"at": [»3,« »"x"]«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "a key with quotes and unicode",
        (ODD,),
        '‹<tool_call>›«\n{"name": "odd", "arguments": {"naïve\\"k\\"": "»x"«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "a key in other letters",
        ONE,
        '‹<tool_call>›«\n{"name": "get_weather", "arguments": {"»c\\u0069ty"«: »"Paris"«}}\n</tool_call>»<|im_end|>',
    ),
    (
        "a tool without a schema",
        (NOW,),
        '‹<tool_call>›«\n{"name": "now", "arguments": {»}«}\n</tool_call>»<|im_end|>',
    ),
)

_CALL = '‹<tool_call>›\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_FORECAST = _CALL.replace("get_weather", "get_forecast")

# Nothing in these is forced.
BAD_JSON_CALLS = _goldens(
    "qwen3",
    ("no call", ONE, "It rains in Paris.<|im_end|>"),
    ("an empty turn", ONE, "<|im_end|>"),
    ("reasoning that does not end", ONE, "<think>\n" + _CALL.replace("‹", "").replace("›", "") + _END),
    ("broken off in a value", ONE, '‹<tool_call>›\n{"name": "get_weather", "arguments": {"city": "Par'),
    ("broken off before its end", ONE, _CALL.removesuffix("\n</tool_call>")),
    ("a whole call without the end of the turn", ONE, _CALL),
    ("a quote is missing", ONE, _CALL.replace('Paris"', "Paris") + _END),
    ("a brace is missing", ONE, _CALL.replace("}}", "}") + _END),
    ("a brace too many", ONE, _CALL.replace("}}", "}}}") + _END),
    ("a comma too many", ONE, _CALL.replace("}}", ",}}") + _END),
    ("a raw line break in a text", ONE, _CALL.replace("Paris", "Pa\nris") + _END),
    ("an escape that there is not", ONE, _CALL.replace("Paris", r"\Paris") + _END),
    ("no tool of that name", ONE, _CALL.replace("get_weather", "get_rain") + _END),
    ("the beginning of a name", ONE, _CALL.replace("get_weather", "get") + _END),
    ("a required argument is missing", ONE, _CALL.replace('"city": "Paris"', "") + _END),
    ("an argument that is not allowed", ONE, _CALL.replace('"Paris"', '"Paris", "zone": 1') + _END),
    ("a value of the wrong type", ONE, _CALL.replace('"Paris"', "3") + _END),
    ("an argument twice", ONE, _CALL.replace('"Paris"', '"Paris", "city": "Oslo"') + _END),
    ("arguments that are a list", ONE, _CALL.replace('{"city": "Paris"}', '["Paris"]') + _END),
    ("arguments that are a text", ONE, _CALL.replace('{"city": "Paris"}', '"{}"') + _END),
    ("no arguments", ONE, '‹<tool_call>›\n{"name": "get_weather"}\n</tool_call><|im_end|>'),
    (
        "arguments before the name",
        ONE,
        '‹<tool_call>›\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call><|im_end|>',
    ),
    ("more than a name and arguments", ONE, _CALL.replace("}}", '}, "id": 1}') + _END),
    ("other blanks in the arguments", ONE, _CALL.replace('": "P', '":"P') + _END),
    ("other blanks around the name", ONE, _CALL.replace('"name": ', '"name":') + _END),
    ("other blanks around the call", ONE, _CALL.replace("\n</", "</") + _END),
    ("no closing tag", ONE, _CALL.removesuffix("</tool_call>") + _END),
    ("a bad call after a good one", ONE, _CALL + "\n" + _CALL.replace('"Paris"', "3") + _END),
    ("a bad call before a good one", ONE, _CALL.replace('"Paris"', "3") + "\n" + _CALL + _END),
    ("the opening of a call in a value", ONE, _CALL.replace("Paris", "‹<tool_call>›") + _END),
    ("the end of a call in a value", ONE, _CALL.replace("Paris", "</tool_call>") + _END),
    ("a number with a leading zero", TWO, _FORECAST.replace('"Paris"', '"Paris", "days": 03') + _END),
    ("not a number", TWO, _FORECAST.replace('"Paris"', '"Paris", "days": NaN') + _END),
    ("a fraction for an integer", TWO, _FORECAST.replace('"Paris"', '"Paris", "days": 1.5') + _END),
    ("Python instead of JSON", TWO, _FORECAST.replace('"Paris"', "'Paris'") + _END),
    ("a call without JSON", ONE, "‹<tool_call>›\nget_weather(Paris)\n</tool_call><|im_end|>"),
    (
        "two calls between one pair of tags",
        ONE,
        _CALL.replace("}}", '}}\n{"name": "get_weather", "arguments": {}}') + _END,
    ),
    (
        "a tool whose schema is not one",
        (BROKEN,),
        '‹<tool_call>›\n{"name": "broken", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    ),
    ("no tools on offer", (), _CALL + _END),
)

XML_CALLS = _goldens(
    "qwen3_6",
    (
        "the only tool",
        ONE,
        "Paris.\n</think>\n\n‹<tool_call>›«\n<function=get_weather>\n<parameter=city>\n»Paris\n</parameter>«\n</function>\n"
        "</tool_call>»<|im_end|>",
    ),
    (
        "an optional argument is left out",
        TWO,
        "</think>\n\n‹<tool_call>›«\n<function=»get_f«orecast>\n<parameter=»c«ity>\n»Paris\n</parameter>«\n<»/«function>\n"
        "</tool_call>»<|im_end|>",
    ),
    (
        "an optional argument is given",
        TWO,
        "</think>\n\n‹<tool_call>›«\n<function=»get_f«orecast>\n<parameter=»c«ity>\n»Paris\n</parameter>«\n<»p«arameter=days>\n»3\n"  # codespell:ignore
        "</parameter>«\n</function>\n</tool_call>»<|im_end|>",
    ),
    (
        "a value with lines and tags",
        ONE,
        '</think>\n\n‹<tool_call>›«\n<function=get_weather>\n<parameter=city>\n»<b>"é"</b>\n\n</para>\n</parameter>«\n</function>\n'
        "</tool_call>»<|im_end|>",
    ),
    (
        "no arguments, because there are none",
        FILES,
        "</think>\n\n‹<tool_call>›«\n<function=»s«top>\n</function>\n</tool_call>»<|im_end|>",
    ),
    (
        "no arguments, by choice",
        (PING,),
        "</think>\n\n‹<tool_call>›«\n<function=ping>\n<»/«function>\n</tool_call>»<|im_end|>",
    ),
    (
        "a list",
        FILES,
        '</think>\n\n‹<tool_call>›«\n<function=»read_files«>\n<parameter=paths>\n»["a", "b"]\n</parameter>«\n</function>\n</tool_call>»'
        "<|im_end|>",
    ),
    (
        "two calls",
        FILES,
        "</think>\n\n‹<tool_call>›«\n<function=»s«top>\n</function>\n</tool_call>»\n"
        "‹<tool_call>›«\n<function=»s«top>\n</function>\n</tool_call>»<|im_end|>",
    ),
    (
        "reasoning that does not end",
        FILES,
        "<tool_call>\n<function=stop>\n</function>\n</tool_call><|im_end|>",
    ),
    (
        "a value of the wrong type",
        (PING,),
        "</think>\n\n‹<tool_call>›\n<function=ping>\n<parameter=count>\nmany\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    (
        "other blanks",
        ONE,
        "</think>\n\n‹<tool_call>›\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
)

BARE_CALLS = _goldens(
    "llama3_1",
    ("the only tool", ONE, '‹{"name": "›«get_weather", "parameters": {"city": "»Paris"«}}»<|eot_id|>'),
    ("two tools", TWO, '‹{"name": "›get_f«orecast", "parameters": {"»c«ity": "»Paris"}«}»<|eot_id|>'),
    (
        "an argument that is called a name",
        (GREET,),
        '‹{"name": "›«greet", "parameters": {"who": {"»n«ame": "»Ann",« "age": »41}«}}»<|eot_id|>',
    ),
    ("no arguments", FILES, '‹{"name": "›s«top", "parameters": {}}»<|eot_id|>'),
    ("an answer", ONE, "It rains.<|eot_id|>"),
    ("an answer in JSON", ONE, '{"weather": "rain"}<|eot_id|>'),
    ("a call after text is text", ONE, 'So: {"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>'),
    ("text after a call", ONE, '‹{"name": "›get_weather", "parameters": {"city": "Paris"}} ok<|eot_id|>'),
    ("broken off", ONE, '‹{"name": "›get_weather", "parameters": {"city": "Par'),
    ("another end", ONE, '‹{"name": "›get_weather", "parameters": {"city": "Paris"}}<|end_of_text|>'),
)

HARMONY_CALLS = _goldens(
    "gptoss",
    (
        "the only tool",
        ONE,
        '‹ to=functions.›«get_weather<|channel|>commentary json<|message|>{"city": "»Paris"«}»<|call|>',
    ),
    (
        "a call after an analysis",
        TWO,
        "<|channel|>analysis<|message|>Call to=functions.get_time?<|end|><|start|>assistant‹ to=functions.›get_f«orecast<|channel|>"
        'commentary json<|message|>{"»c«ity": "»Paris"}<|call|>',
    ),
    ("an answer", ONE, "<|channel|>final<|message|>It rains.<|return|>"),
    (
        "another end",
        ONE,
        '‹ to=functions.›get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|return|>',
    ),
    ("no message", ONE, "‹ to=functions.›get_weather<|channel|>commentary json<|call|>"),
)

OTHER_CALLS = [
    *_goldens(
        "glm4moe",
        (
            "the only tool",
            ONE,
            "\n<think></think>\n‹<tool_call>›«get_weather\n<arg_key>city</arg_key>\n<arg_value>»Paris</arg_value>«\n</tool_call>»"
            "<|observation|>",
        ),
        (
            "an optional argument is given",
            TWO,
            "\n<think></think>\n‹<tool_call>›get_f«orecast\n<arg_key>»c«ity</arg_key>\n<arg_value>»Paris</arg_value>«\n»<arg_key>«days"
            "</arg_key>\n<arg_value>»3</arg_value>«\n</tool_call>»<|observation|>",
        ),
        ("no arguments", FILES, "\n<think></think>\n‹<tool_call>›s«top\n</tool_call>»<|observation|>"),
        ("no such tool", ONE, "\n<think></think>\n‹<tool_call>›get_rain\n</tool_call><|observation|>"),
    ),
    *_goldens(
        "gemma4",
        (
            "the only tool",
            ONE,
            '‹<|tool_call>›«call:get_weather{city:<|"|>»Paris<|"|>«}<tool_call|>»<|tool_response>',
        ),
        (
            "two tools and two arguments",
            TWO,
            '‹<|tool_call>›«call:»get_f«orecast{»c«ity:<|"|>»Paris<|"|>,«days:»3}«<tool_call|>»<|tool_response>',
        ),
        (
            "a list",
            FILES,
            '‹<|tool_call>›«call:»read_files«{paths:[»<|"|>a"b<|"|>,«<|"|>»c<|"|>]«}<tool_call|>»<|tool_response>',
        ),
        (
            "nested objects",
            (GREET,),
            '‹<|tool_call>›«call:greet{who:{»n«ame:<|"|>»Ann<|"|>}«}<tool_call|>»<|tool_response>',
        ),
        ("a quote is missing", ONE, '‹<|tool_call>›call:get_weather{city:<|"|>Paris}<tool_call|><|tool_response>'),
    ),
    *_goldens(
        "lfm2_v2",
        (
            "the only tool",
            ONE,
            "‹<|tool_call_start|>›«[get_weather(city=»'Paris')]«<|tool_call_end|>»<|im_end|>",
        ),
        (
            "two calls",
            TWO,
            "‹<|tool_call_start|>›«[»get_f«orecast(»c«ity=»'It\\'s'),« »get_t«ime(»c«ity=»'Oslo')]«<|tool_call_end|>»<|im_end|>",
        ),
        (
            "lists and numbers",
            TWO,
            "‹<|tool_call_start|>›«[»get_t«ime(»c«ity=»'Oslo',« »x=[1, {\"a\": true}],« »y=-1.5)]«<|tool_call_end|>»<|im_end|>",
        ),
        ("a text without quotes", ONE, "‹<|tool_call_start|>›[get_weather(city=Paris)]<|tool_call_end|><|im_end|>"),
    ),
]

GOLDENS = [*JSON_CALLS, *BAD_JSON_CALLS, *XML_CALLS, *BARE_CALLS, *HARMONY_CALLS, *OTHER_CALLS]
