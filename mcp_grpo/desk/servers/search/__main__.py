"""Start the search server: `python -m mcp_grpo.desk.servers.search`."""

from mcp_grpo.desk.servers.search.backend import SearchBackend
from mcp_grpo.desk.servers.search.server import make_server
from mcp_grpo.desk.servers.serving import run_server


# Imported in each function: what one source needs is not loaded for another.
def _recorded(seed: int) -> SearchBackend:
    from mcp_grpo.desk.servers.search.recorded import RecordedSearch
    from mcp_grpo.desk.world.corpus import Corpus
    from mcp_grpo.desk.world.market import Market

    return RecordedSearch(Corpus(Market(seed)))


def _tavily(_: int) -> SearchBackend:
    from mcp_grpo.desk.servers.search.tavily import TavilyBackend

    return TavilyBackend()


if __name__ == "__main__":
    run_server(
        "search",
        "Web search, the text of pages, and short answers with their source.",
        {"recorded": _recorded, "tavily": _tavily},
        make_server,
    )
