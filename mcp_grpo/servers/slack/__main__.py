"""Starts the Slack server: `python -m mcp_grpo.servers.slack`."""

from mcp_grpo.servers.serving import parser, refuse, serve
from mcp_grpo.servers.slack.embedded import EmbeddedSlack
from mcp_grpo.servers.slack.server import slack_server
from mcp_grpo.servers.slack.workspace import Workspace


def main() -> None:
    """Read the options, and serve."""
    options = parser("slack", "Slack: read channels and threads, post, reply, react.")
    options.add_argument("--backend", choices=("embedded", "live"), default="embedded", help="where messages are")
    options.add_argument("--seed", type=int, default=0, help="which invented workspace, with --backend embedded")
    chosen = options.parse_args()
    try:
        if chosen.backend == "live":
            from mcp_grpo.servers.slack.live import LiveSlack

            backend = LiveSlack()
        else:
            backend = EmbeddedSlack(Workspace(chosen.seed))
    except ValueError as error:
        refuse(str(error))
    serve(slack_server(backend), chosen)


if __name__ == "__main__":
    main()
