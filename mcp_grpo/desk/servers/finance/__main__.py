"""Start the finance server: `python -m mcp_grpo.desk.servers.finance`."""

from mcp_grpo.desk.servers.finance.backend import FinanceBackend
from mcp_grpo.desk.servers.finance.server import make_server
from mcp_grpo.desk.servers.serving import run_server


# Imported in each function: what one source needs is not loaded for another.
def _recorded(seed: int) -> FinanceBackend:
    from mcp_grpo.desk.servers.finance.recorded import RecordedFinance
    from mcp_grpo.desk.world.market import Market

    return RecordedFinance(Market(seed))


def _fmp(_: int) -> FinanceBackend:
    from mcp_grpo.desk.servers.finance.fmp import FMPBackend

    return FMPBackend()


def _polygon(_: int) -> FinanceBackend:
    from mcp_grpo.desk.servers.finance.polygon import PolygonBackend

    return PolygonBackend()


if __name__ == "__main__":
    run_server(
        "finance",
        "Quotes, prices, profiles, statements, key metrics, splits and symbol search.",
        {"recorded": _recorded, "fmp": _fmp, "polygon": _polygon},
        make_server,
    )
