"""Starts the search server: `python -m mcp_grpo.servers.search`."""

from mcp_grpo.servers.search.backend import SearchBackend
from mcp_grpo.servers.search.server import make_server
from mcp_grpo.servers.serving import parser, refuse, serve


def main() -> None:
    """Read the options, and serve."""
    options = parser("search", "Web search, the text of pages, and short answers with their source.")
    options.add_argument(
        "--backend",
        choices=("recorded", "tavily"),
        default="recorded",
        help="where pages are from: the invented web, or Tavily's API with a key from the environment",
    )
    options.add_argument("--seed", type=int, default=0, help="which invented world, with --backend recorded")
    chosen = options.parse_args()
    try:
        backend = _backend(chosen.backend, chosen.seed)
    except ValueError as error:  # such as a key that is missing
        refuse(str(error))
    serve(make_server(backend), chosen)


def _backend(name: str, seed: int) -> SearchBackend:
    # Imported here: what one source needs is not loaded for another.
    if name == "tavily":
        from mcp_grpo.servers.search.tavily import TavilyBackend

        return TavilyBackend()
    from mcp_grpo.servers.search.recorded import RecordedSearch
    from mcp_grpo.servers.world.corpus import Corpus
    from mcp_grpo.servers.world.market import Market

    return RecordedSearch(Corpus(Market(seed)))


if __name__ == "__main__":
    main()
