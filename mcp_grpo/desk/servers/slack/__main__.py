"""Start the Slack server: `python -m mcp_grpo.desk.servers.slack`."""

from mcp_grpo.desk.servers.serving import run_server
from mcp_grpo.desk.servers.slack.backend import SlackBackend
from mcp_grpo.desk.servers.slack.server import slack_server


def _embedded(seed: int) -> SlackBackend:
    from mcp_grpo.desk.servers.slack.embedded import EmbeddedSlack
    from mcp_grpo.desk.servers.slack.workspace import Workspace

    return EmbeddedSlack(Workspace(seed))


def _live(_: int) -> SlackBackend:
    from mcp_grpo.desk.servers.slack.live import LiveSlack

    return LiveSlack()


if __name__ == "__main__":
    run_server(
        "slack",
        "Slack: read channels and threads, post, reply, react.",
        {"embedded": _embedded, "live": _live},
        slack_server,
    )
