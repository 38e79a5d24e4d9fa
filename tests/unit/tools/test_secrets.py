"""One place decides what is a secret."""

import time
from pathlib import Path

import pytest

from mcp_grpo.tools import ServerConfig
from mcp_grpo.tools.secrets import is_secret_name, shown_address, without_secrets, without_tokens


TOKEN = "c4n4ry9Zq7Lm2Xw8Pt"


def stdio(*args: str, **env: str) -> ServerConfig:
    return ServerConfig(name="s", transport="stdio", command="p", args=args, env=env)


@pytest.mark.parametrize(
    ("args", "secret"),
    [
        (("-e", "API_KEY=abc-12345"), "abc-12345"),
        (("--env", "GITHUB_PAT=abc-12345"), "abc-12345"),
        (("postgresql://ann:hunter2hunter2@db/main",), "hunter2hunter2"),
        (("--db=mysql://ann:hunter2hunter2@db/main",), "hunter2hunter2"),
        (("--header", "Authorization: Bearer abc-12345"), "abc-12345"),
        (("-H", "X-Tenant: tenant-12345"), "tenant-12345"),
        (("--header=Authorization: Bearer abc-12345",), "abc-12345"),
        (("X-Api-Key: abc-12345",), "abc-12345"),
        (("run", TOKEN), TOKEN),
        (("run", "ghp_0123456789abcdefABCD"), "ghp_0123456789abcdefABCD"),
        (("https://h/mcp/" + TOKEN + "/sse",), TOKEN),
        (("--apiKey", "abc-12345"), "abc-12345"),
    ],
)
def test_a_secret_in_the_arguments_is_neither_shown_nor_told_by_the_tool(args: tuple[str, ...], secret: str) -> None:
    config = stdio(*args)
    assert secret not in repr(config)
    assert "***" in repr(config)
    assert secret not in config.redact(f"said {secret}.")
    assert config.hide_secrets(f"said {secret}.") == "said ***."


@pytest.mark.parametrize(
    "args",
    [
        ("-y", "@modelcontextprotocol/server-filesystem@2025.7.29", "/data/files"),
        ("mcp-server-time==2025.1.17", "--local-timezone", "Europe/Amsterdam"),
        ("run", "-i", "--rm", "ghcr.io/github/github-mcp-server:v0.4.0", "--toolsets=repos,issues"),
        ("--revision", "3f2c8a90b1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6", "--max-tokens", "512"),
        ("recipes/configs/qwen3_0.6b_lora_vllm.yaml", "--learning_rate=1e-6", "getUserDetails"),
        ("-H", "Accept: application/json", "https://example.com/api/v2/models/list"),
    ],
)
def test_ordinary_arguments_are_shown(args: tuple[str, ...]) -> None:
    assert without_secrets(args) == list(args)
    assert stdio(*args).secret_values == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GITHUB_PAT", "abc-12345"),
        ("JWT", "abc-12345"),
        ("SLACK_WEBHOOK_URL", "https://hooks.example.com/services/T1/B2/abcdefghij"),
        ("API_KEY", "a1b2"),
        ("PIN", "493817"),
        ("sessionId", "abc-12345"),
        ("DATABASE", "redis://:hunter2hunter2@h"),
        ("UNNAMED", "xoxb-1234567890-abc"),
    ],
)
def test_a_variable_that_is_a_secret_is_hidden_in_results(name: str, value: str) -> None:
    config = stdio(**{name: value})
    last = value.rpartition("/")[2] if "services" in value else value
    for text in (value, last):
        assert config.hide_secrets({"told": [f"<{text}>"]}) == {"told": ["<***>"]}


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKEN", "short"), ("PIN", "1234"), ("MAX_TOKENS", "100000"), ("PATH_PREFIX", "/etc/hostname")],
)
def test_words_and_small_numbers_are_no_secrets(name: str, value: str) -> None:
    assert stdio(**{name: value}).hide_secrets(f"<{value}>") == f"<{value}>"


def test_a_short_token_is_hidden_only_where_it_stands_alone() -> None:
    assert stdio(API_KEY="a1b2").hide_secrets("a1b2, xa1b2, a1b23") == "***, xa1b2, a1b23"


def test_a_path_is_no_pat() -> None:
    assert not is_secret_name("PATH")
    assert is_secret_name("GithubPat")


def test_the_secret_in_a_file_that_a_variable_or_an_argument_names_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from-a-file-1\n")
    (tmp_path / "account.json").write_text('{"client_secret": "from-a-file-2", "type": "service_account"}')
    (tmp_path / "settings").write_text("MODE=ordinary\nAPI_TOKEN='from-a-file-3'\n")
    config = stdio(
        "--token-file", str(tmp_path / "settings"), PASSWORD_FILE=str(tmp_path / "password"),
        GOOGLE_CREDENTIALS=str(tmp_path / "account.json"),
    )  # fmt: skip
    assert config.hide_secrets("from-a-file-1 from-a-file-2 from-a-file-3 service_account ordinary") == (
        "*** *** *** service_account ordinary"
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://h/mcp/{TOKEN}/sse", "https://h/mcp/***/sse"),
        ("https://h/mcp/3f2c8a90-b1d2-e3f4-a5b6-c7d8e9f0a1b2", "https://h/mcp/***"),
        (f"https://{TOKEN}@h/mcp?key=abc", "https://h/mcp"),
        ("https://h/api/v1/2026-07-28/list-of-documents", "https://h/api/v1/2026-07-28/list-of-documents"),
        ("https://hooks.slack.com/services/T00/B00/abcdefgh", "https://hooks.slack.com/***"),
    ],
)
def test_a_token_in_an_address_is_not_shown(url: str, shown: str) -> None:
    config = ServerConfig(name="s", transport="http", url=url)
    assert config.target == shown_address(url) == shown
    if TOKEN in url:
        assert config.hide_secrets(f"You called {TOKEN}") == "You called ***"


def test_the_password_in_a_basic_header_and_other_spellings_are_hidden() -> None:
    config = ServerConfig(
        name="s",
        transport="http",
        url="https://h",
        headers={"Authorization": "Basic YW5uOmh1bnRlcjIh", "X-Key": "a+b/c=d e"},
    )
    assert config.hide_secrets("hunter2! a+b/c=d e a%2Bb%2Fc%3Dd%20e") == "*** *** ***"


@pytest.mark.parametrize(
    "token",
    [
        "ghp_0123456789abcdefABCD",
        "github_pat_0123456789_abcdefghij",
        "hf_abcdefghijklmnopqrst",
        "sk-proj-abcdefghijklmno1",
        "xoxb-1234567890-abc",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOi.eyJzdWIiOi.SflKxwRJSM",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow==\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_token_is_known_by_its_form_in_what_is_shown(token: str) -> None:
    assert without_tokens(f"got {token}, and went on") == "got ***, and went on"
    assert stdio().redact(f'{{"a": "{token}"}}') == '{"a": "***"}'


def test_looking_for_tokens_takes_time_that_grows_with_the_text_only() -> None:
    begun = time.process_time()
    for text in (
        "eyJaaaaa.",
        "-----BEGIN PRIVATE KEY-----",
        "://a:",
        "sk-",
        "sk-aaaaaaaaaaaa",
        "eyJ-",
        "bearer ",
        "ghp_",
    ):
        without_tokens(text * 50_000)
    assert time.process_time() - begun < 5
